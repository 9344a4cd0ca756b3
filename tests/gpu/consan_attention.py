"""One launch of the Hopper attention under Triton's concurrency sanitizer, in the frame of `consan_program`.

``python consan_attention.py VARIANT [BUG]``. The smallest tile there is: two consumers of 64 rows, 32 keys a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from consan_program import descriptor, launch, main

from mutants.sanitized import ATTENTION

BLOCK, STAGES = 32, 1


class AttentionCase(NamedTuple):
    """A call of `attention_maths`, and what is asked of its plan."""

    queries: int
    keys: tuple[int, ...]
    features: str = "full"
    how: str = "dense"
    variant: str = "unordered"
    shares: int = 1
    dtype: str = "bfloat16"

    def call(self, device: str) -> Any:
        """Its numbers."""
        import torch

        from attention_maths import Case, call_of

        dtype = getattr(torch, self.dtype)
        return call_of(
            Case((self.queries,), self.keys, (2, 2), (64, 64), self.features, self.how, 8, dtype=dtype), device
        )

    def plan(self, device: Any) -> Any:
        """One worker, a few items, several blocks of keys each."""
        from gpu_runs import asked

        from tilestream.ops.attention_operands import problem_of
        from tilestream.plan.attention_plan import of_candidate
        from tilestream.plan.policy import hopper_attention

        problem = problem_of(*asked(self.call("cpu")))
        made = hopper_attention.candidates(
            problem, device, 1, kind="static", variant=self.variant, splits=self.shares
        )  # fmt: skip
        found = next(one for one in made if one.block[0] == 2 * hopper_attention.ROWS)
        room = hopper_attention.shared_bytes(problem, 2, BLOCK, STAGES, 1, self.shares)
        device = replace(device, shared=room)  # so that there are queries of one item
        return of_candidate(
            problem, device, "hopper", replace(found, block=(found.block[0], BLOCK), stages=STAGES), "a test's", ()
        )


#: More items than the item ring has slots and than there are queries of, more blocks than stages.
CASES = {
    "attention": AttentionCase(200, (200,)),
    "attention in turns": AttentionCase(130, (200,), "causal", variant="ordered"),
    "attention, pages of 8": AttentionCase(130, (150, 77), how="paged"),
    "attention in shares": AttentionCase(100, (300,), shares=2),
    "attention in 8 bits": AttentionCase(130, (200,), "causal", dtype="float8_e4m3fn"),
}


class Prepared(NamedTuple):
    """A launch that is not issued yet: its arguments, the plan's part of them, and what raises if it answers wrong."""

    arguments: Any
    filled: tuple[Any, ...]
    check: Callable[[], None]


def prepared(case: AttentionCase, device: str, properties: Any) -> Prepared:
    """A launch of a case, by a plan for a device of such properties; outputs are NaN."""
    import torch
    from gpu_runs import asked

    import tilestream as ts
    from tilestream.kernels.hopper.attention import attend
    from tilestream.launch.hopper.attention_arguments import HopperAttentionArguments
    from tilestream.ops.attention_gpu import layout_of

    call, plan = case.call(device), case.plan(properties)
    x, *_ = asked(call)
    batch, rows, heads, columns = x.q.shape

    def nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((plan.shares, batch, *shape), float("nan"), dtype=dtype, device=device)

    if plan.shares > 1:  # as the launch that joins them has it
        out, lse = nan(rows, heads, columns), nan(rows, heads).transpose(2, 3)
    else:
        out, lse = nan(rows, heads, columns, dtype=torch.bfloat16), nan(heads, rows)
    arguments = HopperAttentionArguments(plan, layout_of(x._replace(out=out[0], lse=lse[0])))
    maps = zip((arguments.q, arguments.k, arguments.v, arguments.out), (x.q, x.k, x.v, out), strict=True)
    slots = torch.zeros(64, dtype=torch.int32, device=device)
    given = (
        lse, None, x.scale_q, x.scale_k, x.scale_v, None, None, x.seqlens_k, x.block_table, slots, None, None, None,
    )  # fmt: skip
    filled = (*[descriptor(*one) for one in maps], *given, 0, 0, *arguments.scales(64**-0.5))

    def check() -> None:
        answer, logs = out[0], lse[0]
        if plan.shares > 1:
            answer, logs = ts.merge_attention(out[0], lse[0], out[1], lse[1])
        call.check(answer.to(torch.bfloat16), logs)

    return Prepared(arguments, arguments.pack(attend)(filled), check)


def run(kernel: Any, case: AttentionCase) -> None:
    """A launch, whose answer is checked."""
    from tilestream.runtime.properties import cuda_properties

    ready = prepared(case, "cuda", cuda_properties())
    launch(kernel, ready.filled, (1, 1, 1), ready.arguments.options)
    try:
        ready.check()
    except AssertionError as error:
        raise SystemExit(f"a wrong answer: {error}") from error


if __name__ == "__main__":
    main(ATTENTION, CASES, run)
