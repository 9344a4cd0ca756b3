"""The compile gate of the trace: free where it is off, and within the registers where it is on.

Run by `test_trace_compiles`, in a process of its own and by whatever Python has the Triton that is meant: needs Triton,
no torch. ``python trace_gate.py quick|all`` prints one JSON object a line.

"Free" is asked of the machine code: a kernel that is compiled without its trace, and one from whose text every
``if TRACE:`` was struck out, are the same instruction for instruction.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "portable"))
sys.path.insert(0, str(Path(__file__).parent / "hopper"))

import attention_gate
import gate
import hopper_attention_gate
import hopper_gate
import triton

from tilestream.kernels.device import items as items_text
from tilestream.kernels.hopper import attention as hopper_attention_text
from tilestream.kernels.hopper import attention_load as hopper_load_text
from tilestream.kernels.hopper import attention_math as hopper_math_text
from tilestream.kernels.hopper import gemm as hopper_text
from tilestream.kernels.portable import attention as portable_attention_text
from tilestream.kernels.portable import gemm as portable_text
from tilestream.launch.portable import arguments as portable_arguments
from tilestream.launch.portable.arguments import Arguments
from tilestream_tools.isa.sass import disassembled

#: Of Hopper: tile, swapped, inputs, how, layout, as `hopper_gate` has them.
HOPPER = (
    (("single", 64, 64), False, "bfloat16", "worst", "nt"),
    (("single", 64, 32), False, "bfloat16", "arriving", "nt"),
    (("ping_pong", 64, 128), False, "bfloat16", "plain", "nn"),
    (("cooperative", 128, 128), False, "bfloat16", "rows", "nt"),
    (("cooperative", 128, 256), False, "bfloat16", "plain", "nt"),
    (("cooperative", 128, 128), False, "fp8 precise", "plain", "nt"),
    (("cooperative", 256, 128), False, "bfloat16", "across", "nt"),
    (("cooperative", 128, 128), False, "bfloat16", "worst", "nt"),
)
#: Of the portable kernel: by name, as `gate` has them.
PORTABLE = (
    "bfloat16 64x64 plain nt", "bfloat16 128x256 worst nt", "bfloat16 128x128 arriving nt", "float32 128x128 worst nt",
)  # fmt: skip


#: Of attention: on Hopper by name, as `hopper_attention_gate` has them; of the portable kernel as `attention_gate` has.
HOPPER_ATTENTION = (
    "128-128 causal apart 2x128", "64-64 full turns 3x128", "128-128 arriving turns 2x128", "256-256 worst turns 2x32",
)  # fmt: skip
PORTABLE_ATTENTION = ("bfloat16 128 128x64 causal", "bfloat16 128 128x32 arriving")


def untraced(folder: Path, *texts: ModuleType) -> ModuleType:
    """The last of these modules, each of which imports those before it, from texts without any ``if C.TRACE:``."""
    for text in texts:
        module = _untraced(text, folder, texts)
    return module


def _untraced(text: ModuleType, folder: Path, texts: tuple[ModuleType, ...]) -> ModuleType:
    """A module from whose text every ``if C.TRACE:`` was struck out, all other lines where they were."""
    path = Path(str(text.__file__))
    source = path.read_text(encoding="utf-8")
    lines, struck = source.splitlines(), 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TRACE", "C.TRACE"):
            if node.orelse:  # what there is instead stays
                line = node.orelse[0].lineno - 2
                lines[line] = lines[line].replace("else:", "if True:")
                node.end_lineno = line
            indent = " " * node.col_offset
            lines[node.lineno - 1 : node.end_lineno] = [f"{indent}pass"] * (node.end_lineno - node.lineno + 1)
            struck += 1
    assert struck >= (2 if len(texts) == 1 else 1), f"{path} has no `if C.TRACE:`"  # in each of a kernel's modules
    source = "\n".join(lines) + "\n"
    for other in texts:
        source = source.replace(f"from {other.__name__} import", f"from {_name(other)} import")
    made = folder / f"{_name(text)}.py"
    made.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(made.stem, made)
    module = importlib.util.module_from_spec(spec)
    sys.modules[made.stem] = module
    spec.loader.exec_module(module)
    return module


def _name(text: ModuleType) -> str:
    return text.__name__.replace(".", "_") + "_untraced"


def same(off: Any, without: Any) -> bool:
    """Whether they are the same machine code, or made by the assembler of the same program.

    Where a kernel is large, the assembler orders the same instructions by what debug information there is: the name of
    the file, which is another one where the text was changed.
    """
    one, other = (disassembled(kernel.asm["cubin"]) for kernel in (off, without))
    return one == other or program(off.asm["ptx"]) == program(without.asm["ptx"])


def program(ptx: str) -> list[str]:
    """Its lines, without debug information."""
    lines = (line.partition("//")[0].strip() for line in ptx.partition(".section")[0].splitlines())
    return [line for line in lines if line and not line.startswith((".loc", ".file"))]


def clocks(off: Any, on: Any, without: Any) -> list[int]:
    """How often a trace looks at the clock; what arrives is waited for by the clock, too."""
    return [one.asm["ptx"].count("globaltimer") - without.asm["ptx"].count("globaltimer") for one in (off, on)]


def hopper(folder: Path, what: str) -> Iterator[dict[str, Any]]:
    """Each configuration compiled three times."""
    struck = untraced(folder, items_text, hopper_text).gemm
    for row, swapped, inputs, how, layout in HOPPER[: 2 if what == "quick" else None]:
        tile = next(tile for tile in hopper_gate.TILES if tile[:3] == row)
        made = hopper_gate._make(tile, swapped, inputs, how, layout)
        options, filled = hopper_gate.fill(made.plan, made.layout)
        log = hopper_gate.fill(made.plan, made.layout, trace=True)[1]
        off, _ = hopper_gate.build(options, filled)
        without, _ = hopper_gate.build(options, filled, struck)
        on, said = hopper_gate.build(options, log)
        yield compared(made.name, off, on, without, hopper_gate.report(made, on, said))


def hopper_attention(folder: Path, what: str) -> Iterator[dict[str, Any]]:
    """The same of Hopper's attention."""
    text, build = hopper_attention_gate, hopper_gate.build
    struck = untraced(folder, hopper_load_text, hopper_math_text, hopper_attention_text).attend
    for name in HOPPER_ATTENTION[: 1 if what == "quick" else None]:
        found = list(text.configurations(name))
        assert found, f"the gate has no {name}"
        for made in found:
            layout = text.layout_of(made.plan.problem)
            options, filled = text.fill(made.plan, layout)
            off, _ = build(options, filled, kernel=text.attend)
            without, _ = build(options, filled, kernel=struck)
            on, said = build(options, text.fill(made.plan, layout, trace=True)[1], kernel=text.attend)
            yield compared(made.name, off, on, without, text.report(made, on, said))


def compared(name: str, off: Any, on: Any, without: Any, found: dict[str, Any]) -> dict[str, Any]:
    """What a test asserts on, of a Hopper kernel of whose traced form ``found`` is reported."""
    return {
        "name": name,
        "same": same(off, without),
        "times": clocks(off, on, without),
        "spilled": found["spilled"] + found["local"] + found["stack"],
        "notes": found["notes"],
        "registers": set(found["expected"]["registers"]) <= set(found["registers"]),
        "reused": found["reused"],
    }


def portable(folder: Path, what: str) -> Iterator[dict[str, Any]]:
    """The same of the portable kernel."""
    struck, kernel = untraced(folder, items_text, portable_text).gemm, gate.gemm
    names = list(PORTABLE[: 1 if what == "quick" else None])
    for name, plan, layout, aligned in gate.configurations("sm_90a", "all"):
        if name not in names:
            continue
        built = [
            build_portable(text, plan, layout, aligned, trace)
            for text, trace in ((kernel, False), (struck, False), (kernel, True))
        ]
        names.remove(name)
        yield compared_portable(name, *built)
    assert not names, f"the gate has no {names}"


def build_portable(text: Any, plan: Any, layout: Any, aligned: bool, trace: bool) -> tuple[Any, str]:
    """`gate.build` of another kernel than the gate's, or with its trace."""
    kernel = gate.gemm
    gate.gemm = text
    portable_arguments.Arguments = lambda plan, layout: _Logged(plan, layout, trace)
    try:
        return gate.build(plan, layout, aligned, "sm_90a")
    finally:
        gate.gemm, portable_arguments.Arguments = kernel, Arguments


def portable_attention(folder: Path, what: str) -> Iterator[dict[str, Any]]:
    """The same of the portable attention."""
    struck, kernel = untraced(folder, portable_attention_text).attention, attention_gate.attention
    names = list(PORTABLE_ATTENTION[: 1 if what == "quick" else None])
    for name, plan, layout in attention_gate.configurations("sm_90a", "all"):
        if name not in names:
            continue
        built = []
        for text, trace in ((kernel, False), (struck, False), (kernel, True)):
            attention_gate.attention = text
            built.append(attention_gate.build(plan, layout, "sm_90a", trace))
        attention_gate.attention = kernel
        names.remove(name)
        yield compared_portable(name, *built)
    assert not names, f"the gate has no {names}"


def compared_portable(
    name: str, off: tuple[Any, str], without: tuple[Any, str], on: tuple[Any, str]
) -> dict[str, Any]:  # fmt: skip
    """`compared`, of kernels as `gate` builds them."""
    return {
        "name": name,
        "same": same(off[0], without[0]),
        "times": clocks(off[0], on[0], without[0]),
        "spilled": sum(gate.spilled(*on).values()),
        "notes": [],
        "registers": True,
        "reused": [],  # it has no barriers
    }


class _Logged(Arguments):
    """Arguments with a log where they are of a traced launch."""

    def __init__(self, plan: Any, layout: Any, trace: bool) -> None:
        super().__init__(plan, layout, trace=trace)
        self._log = gate.Pointer("int64") if trace else None

    def fill(self, operands: tuple[Any, ...], *more: Any, **others: Any) -> list[Any]:
        return super().fill((*operands[:11], self._log, *operands[12:]), *more, **others)


def main() -> None:
    what = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        for target in (portable, portable_attention, hopper, hopper_attention):
            for found in target(Path(folder), what):
                print(json.dumps({**found, "triton": triton.__version__}), flush=True)


if __name__ == "__main__":
    main()
