"""What ranks do in the tests of DTensor's strategies.

Placements are words, one a dimension of the mesh: "R" is replicated, "S1" sharded along dimension 1, "P" a sum over
ranks and "A" a mean, of other values on each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tilestream as ts
from rank_checks import raised

ACTIVATIONS = {None: lambda x: x, "relu": F.relu, "gelu": F.gelu}


def random(seed, shape, dtype=torch.float64):
    """The same numbers on each rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def placements_of(words):
    others = {"R": Replicate(), "P": Partial(), "A": Partial("avg")}
    return tuple(others.get(word) or Shard(int(word[1:])) for word in words.split())


def distribute(x, mesh, words):
    """A leaf with the values of ``x``."""
    if words in ("P", "A"):
        world = mesh.size()
        part = x.detach() * (2 * (mesh.get_rank() + 1) / ((world if words == "P" else 1) * (world + 1)))
        made = DTensor.from_local(part, mesh, placements_of(words))
    else:
        made = distribute_tensor(x.detach(), mesh, placements_of(words), src_data_rank=None)
    return made.detach().requires_grad_(x.requires_grad)


def gradients(outs, leaves):
    """Gradients of fixed weightings of the outputs."""
    wholes, weights = [], []
    for i, out in enumerate(outs):
        weight = random(90 + i, out.shape, out.dtype)
        if isinstance(out, DTensor):
            mesh, whole = out.device_mesh, [Replicate()] * out.device_mesh.ndim
            out, weight = out.redistribute(mesh, whole), distribute_tensor(weight, mesh, whole)
        wholes.append(out)
        weights.append(weight)
    return torch.autograd.grad(wholes, leaves, weights, retain_graph=True)


def assert_equal(case, ours, expected, **tolerance):
    for x, y in zip(ours, expected, strict=True):
        whole = x.full_tensor()
        assert (whole.shape, whole.dtype) == (y.shape, y.dtype), case
        assert torch.allclose(whole, y, **tolerance), (case, (whole - y).abs().max())


def ours_as_torchs(rank, world, op, mesh, cases):
    """Values, gradients and the placements of both are torch's on the same DTensors; what torch refuses may be, too.

    Returns
    -------
    int
        How many cases were refused.
    """
    mesh = init_device_mesh("cpu", mesh)
    ours, torchs = getattr(ts, op), getattr(F if op == "linear" else torch, op)
    refused = 0
    for shapes, words in cases:
        case = f"{op} {shapes} {words}"
        tensors = [random(i, shape).requires_grad_() for i, shape in enumerate(shapes)]
        leaves = [distribute(x, mesh, word) for x, word in zip(tensors, words, strict=True)]
        said, of_torch = (raised(lambda: call(*leaves)) for call in (ours, torchs))  # noqa: B023
        if said != "nothing":
            refused += 1
            assert said[:60] == of_torch[:60], case
            continue
        result, expected = ours(*leaves), torchs(*tensors)
        mine = result, *gradients([result], leaves)
        assert_equal(case, mine, (expected, *gradients([expected], tensors)))
        # Placed alike; but torch.matmul multiplies transposes there, and older torches first add up sums over ranks.
        transposed = 1 < len(shapes[0]) < len(shapes[-1])
        if (
            of_torch == "nothing"
            and not transposed
            and (not {"P", "A"} & set(words) or hasattr(Partial, "LINEAR_REDUCE_OPS"))
        ):
            theirs = torchs(*leaves)
            for x, y in zip(mine, (theirs, *gradients([theirs], leaves)), strict=True):
                assert x.placements == y.placements, (case, x.placements, y.placements)
    return refused


def epilogues(rank, world, mesh, cases):
    """Results with an epilogue are those of torch's operations on the whole tensors, placed as expected."""
    mesh = init_device_mesh("cpu", mesh)
    for options, shapes, words, expected in cases:
        case, dtype = f"{options} {shapes} {words}", getattr(torch, options.get("dtype", "float64"))
        learns, names = dtype == torch.float64, [name for name in shapes if not name.startswith("scale")]
        whole = {}
        for i, (name, shape) in enumerate(shapes.items()):
            kind = torch.float32 if name.startswith("scale") else dtype if name in ("a", "b") else torch.float64
            whole[name] = random(i, shape, kind)
            if name in names and learns:
                whole[name].requires_grad_()
        sharded = {name: distribute(x, mesh, words[name]) for name, x in whole.items()}
        activation, beta = options.get("activation"), options.get("beta", 1.0)
        out = ts.matmul(**sharded, activation=activation, beta=beta)
        fits = Partial() not in out.placements if expected == "not P" else out.placements == placements_of(expected)
        assert fits, (case, out.placements)
        x = whole["a"].double() @ whole["b"].double()
        if "scale_a" in whole:
            scale = whole["scale_a"].double()
            x = x * (scale[:, None] if scale.shape == x.shape[:1] else scale)
        if "scale_b" in whole:
            x = x * whole["scale_b"].double()
        if "bias" in whole:
            x = x + whole["bias"]
        if "residual" in whole:
            x = x + beta * whole["residual"]
        wanted = ACTIVATIONS[activation](x)
        if learns:
            mine = gradients([out], [sharded[name] for name in names])
            assert_equal(case, (out, *mine), (wanted, *gradients([wanted], [whole[name] for name in names])), rtol=1e-6)
        else:
            assert_equal(case, [out], [wanted.to(out.dtype)], rtol=2e-2, atol=2e-2)
    return True


def attentions(rank, world, mesh, cases):
    """Attention of shards is that of the whole: results, log-sum-exps, gradients, and their placements."""
    mesh = init_device_mesh("cpu", mesh)
    for options, shapes, words, expected in cases:
        case, options = f"{options} {shapes} {words}", dict(options)
        lists = {name: torch.tensor(value, dtype=torch.int32) for name, value in options.pop("lists", {}).items()}
        learns = "block_table" not in lists
        whole = {
            name: random(i, shape, torch.float32 if name.startswith("scale") else torch.float64)
            for i, (name, shape) in enumerate(shapes.items())
        }
        leaves = [name for name in whole if not name.startswith("scale")] if learns else []
        for name in leaves:
            whole[name].requires_grad_()
        sharded = {name: distribute(x, mesh, words[name]) for name, x in (whole | lists).items()}
        alone = ts.attention(**sharded, **options)
        with torch.no_grad():  # where the op itself is called with and without a log-sum-exp
            bare = ts.attention(**sharded, **options), *ts.attention(**sharded, **options, return_lse=True)
        out = ts.attention(**sharded, **options, return_lse=True)
        wanted = ts.attention(**whole, **lists, **options, return_lse=True)
        if set(options) <= {"layout"} and len(shapes) == 3 and not lists:
            assert torch.allclose(wanted[0], of_torch(*whole.values(), **options)), case
        results = (alone, *bare, *out)
        assert [x.placements for x in results] == [placements_of(expected[i]) for i in (0, 0, 0, 1, 0, 1)], case
        assert_equal(case, results, [wanted[i] for i in (0, 0, 0, 1, 0, 1)])
        if not learns:
            continue
        for ours, theirs in ((out, wanted), ([alone], wanted[:1]), (out[1:], wanted[1:])):
            mine = gradients(ours, [sharded[name] for name in leaves])
            assert_equal(case, mine, gradients(theirs, [whole[name] for name in leaves]))
            for name, x in zip(leaves, mine, strict=True):
                if name != "sinks" and words["q"] == expected[0]:
                    assert x.placements == placements_of(words[name]), (case, name, x.placements)
    return True


def of_torch(q, k, v, layout="bshd"):
    if layout == "bshd":
        return of_torch(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), "bhsd").transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def outputs(rank, world):
    """``out=`` of any placements has the result; what has chunks, and mixed tensors, are refused."""
    mesh = init_device_mesh("cpu", (world,))
    a, b, x = random(0, (3, 4, 6)), random(1, (6, 8)), random(2, (3, 4, 8))
    q = random(3, (2, 4, 2, 8))
    sharded = [distribute(a, mesh, "S2"), distribute(b, mesh, "S1")]
    for words in ("R", "S0", "S1", "S2"):
        for given in ({}, {"residual": distribute(x, mesh, "S2"), "activation": "relu"}):
            out = distribute(torch.zeros(3, 4, 8, dtype=torch.float64), mesh, words)
            assert ts.matmul(*sharded, out=out, **given) is out
            expected = torch.relu(a @ b + x) if given else a @ b
            assert out.placements == placements_of(words)
            assert_equal(words, [out], [expected])
        for layout in ("bshd", "bhsd"):
            out, like = distribute(torch.zeros_like(q), mesh, words), distribute(q, mesh, "S1")
            made = ts.attention(like, like, like, layout=layout, out=out, return_lse=True)
            assert made[0] is out
            assert out.placements == placements_of(words)
            assert_equal(words, made, ts.attention(q, q, q, layout=layout, return_lse=True))
    arrival = ts.Arrival.uniform(1, 12)
    plain = [y.full_tensor() for y in sharded]
    return [
        raised(lambda: ts.matmul(*sharded, arrival=arrival)),
        raised(lambda: ts.matmul(plain[0], sharded[1], publish=arrival)),
        raised(lambda: ts.attention(like, like, like, arrival=arrival)),
        raised(lambda: ts.matmul(sharded[0], plain[1])),
        raised(lambda: ts.matmul(*sharded, out=distribute(torch.zeros(3, 4, 7, dtype=torch.float64), mesh, "R"))),
        raised(lambda: ts.attention(like, like, like, out=distribute(torch.zeros(1, 4, 2, 8).double(), mesh, "R"))),
        raised(lambda: ts.matmul(*sharded, out=distribute(torch.zeros(0).double(), mesh, "R"))),
    ]


class Linear(nn.Linear):
    def forward(self, x):
        return ts.linear(x, self.weight, self.bias)


class Block(nn.Module):
    """Attention of 4 heads and an MLP, by torch's operations or by tilestream's."""

    def __init__(self, linear):
        super().__init__()
        self.attention = ts.attention if linear is Linear else attention_of_torch
        self.q, self.k, self.v = linear(16, 32), linear(16, 32), linear(16, 32, bias=False)
        self.out, self.up, self.down = linear(32, 16), linear(16, 24), linear(24, 16)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (-1, 8)) for y in (self.q(x), self.k(x), self.v(x)))
        x = x + self.out(self.attention(q, k, v).flatten(-2))
        return x + self.down(F.relu(self.up(x)))


def infers(rank, world):
    """In inference mode, of tensors that were made outside of it."""
    mesh = init_device_mesh("cpu", (world,))
    x, w, q = random(0, (2, 4, 6)), random(1, (8, 6)), random(2, (2, 4, 2, 8))
    dx, dw, dt = (distribute(y, mesh, of) for y, of in ((x, "S0"), (w, "R"), (w.t().contiguous(), "R")))
    dq = distribute(q, mesh, "S0")
    with torch.inference_mode():
        assert_equal("linear", [ts.linear(dx, dw)], [x @ w.t()])
        assert_equal("matmul", [ts.matmul(dx, dt)], [x @ w.t()])
        for layout in ("bshd", "bhsd"):
            assert_equal(layout, [ts.attention(dq, dq, dq, layout=layout)], [ts.attention(q, q, q, layout=layout)])
    return True


def attention_of_torch(q, k, v):
    """In operations that DTensor shards by heads on the CPU."""
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    scores = (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1) / q.shape[-1] ** 0.5
    return (scores.softmax(-1).unsqueeze(-1) * v.unsqueeze(2)).sum(-2).transpose(1, 2)


def tensor_mesh(mesh):
    return mesh["tp"] if mesh.ndim > 1 else mesh


def block(kind, mesh, how):
    """A block with the same weights on each rank, parallelised by torch."""
    torch.manual_seed(0)
    made = Block(Linear if kind == "ours" else nn.Linear).double()
    if kind == "whole":
        return made
    shard = {"input_layouts": Shard(1)} if "sequence" in how else {}
    into = {"output_layouts": Shard(1)} if "sequence" in how else {}
    if "tp" in how:
        # DTensors, not this rank's parts, go into attention, and from one linear into the next.
        column, row = ColwiseParallel(use_local_output=False, **shard), RowwiseParallel(use_local_output=False, **into)
        plan = {**dict.fromkeys(["q", "k", "v", "up"], column), **dict.fromkeys(["out", "down"], row)}
        parallelize_module(made, tensor_mesh(mesh), plan)
    if "fsdp" in how:
        fully_shard(made, mesh=mesh["dp"] if mesh.ndim > 1 else mesh)
    return made


def learns(rank, world, shape, how):
    """A block learns as torch's own does, parallelised alike, and as one rank: gradients, their placements, weights."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    data = shape[0] if "fsdp" in how else 1
    mine = rank * data // world
    models = {}
    for kind in ("whole", "torch", "ours"):
        model = block(kind, mesh, how)
        x = random(7, (2 * data, 4, 16))
        if kind != "whole":
            x = x.chunk(data)[mine]
            if "tp" in how:
                x = distribute(x, tensor_mesh(mesh), "S1" if "sequence" in how else "R")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x).square().sum() * (1 if kind == "whole" else data)  # FSDP takes the mean
            loss.backward()
            optimizer.step()
        models[kind] = model
    for name, theirs in models["torch"].named_parameters():
        ours, whole = (models[kind].get_parameter(name) for kind in ("ours", "whole"))
        assert (ours.placements, ours.grad.placements) == (theirs.placements, theirs.grad.placements), name
        assert torch.allclose(ours.grad.full_tensor(), theirs.grad.full_tensor()), name
        assert torch.allclose(ours.full_tensor(), whole), name
    return True


def compiles(rank, world):
    """A layer of DTensors compiles to one graph, with the results, gradients and placements of the eager one."""
    mesh = init_device_mesh("cpu", (world,))

    def layer(x, up, down):
        h = ts.linear(x, up, activation="gelu").unflatten(-1, (4, 8))
        return ts.linear(ts.attention(h, h, h).flatten(-2), down)

    weights = [random(0, (2, 4, 16)), random(1, (32, 16)), random(2, (16, 32))]
    leaves = [distribute(x.requires_grad_(), mesh, words) for x, words in zip(weights, ("R", "S0", "S1"), strict=True)]
    results = []
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        out = call(*leaves)
        results.append((out, *gradients([out], leaves)))
    for eager, compiled in zip(*results, strict=True):
        assert eager.placements == compiled.placements
        assert torch.allclose(eager.full_tensor(), compiled.full_tensor())
    return True
