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

import gate
import hopper_gate
import triton

from tilestream.isa.sass import disassembled
from tilestream.kernels.hopper import gemm as hopper_text
from tilestream.kernels.portable import arguments as portable_arguments
from tilestream.kernels.portable import gemm as portable_text
from tilestream.kernels.portable.arguments import Arguments

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


def untraced(text: ModuleType, folder: Path) -> Any:
    """The kernel of a module from whose text every ``if TRACE:`` was struck out, all other lines where they were."""
    path = Path(str(text.__file__))
    source = path.read_text(encoding="utf-8")
    lines, struck = source.splitlines(), 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TRACE":
            indent = " " * node.col_offset
            lines[node.lineno - 1 : node.end_lineno] = [f"{indent}pass"] * (node.end_lineno - node.lineno + 1)
            struck += 1
    assert struck >= 2, f"{path} has no `if TRACE:`"
    made = folder / f"untraced_{path.parent.name}.py"
    made.write_text("\n".join(lines) + "\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location(made.stem, made)
    module = importlib.util.module_from_spec(spec)
    sys.modules[made.stem] = module
    spec.loader.exec_module(module)
    return module.gemm


def clocks(off: Any, on: Any, without: Any) -> list[int]:
    """How often a trace looks at the clock; what arrives is waited for by the clock, too."""
    return [one.asm["ptx"].count("globaltimer") - without.asm["ptx"].count("globaltimer") for one in (off, on)]


def hopper(folder: Path, what: str) -> Iterator[dict[str, Any]]:
    """Each configuration compiled three times."""
    struck = untraced(hopper_text, folder)
    for row, swapped, inputs, how, layout in HOPPER[: 2 if what == "quick" else None]:
        tile = next(tile for tile in hopper_gate.TILES if tile[:3] == row)
        made = hopper_gate._make(tile, swapped, inputs, how, layout)
        options, filled = hopper_gate.fill(made.plan, made.layout)
        log = hopper_gate.fill(made.plan, made.layout, trace=True)[1]
        off, _ = hopper_gate.build(options, filled)
        without, _ = hopper_gate.build(options, filled, struck)
        on, said = hopper_gate.build(options, log)
        found = hopper_gate.report(made, on, said)
        yield {
            "name": made.name,
            "same": disassembled(off.asm["cubin"]) == disassembled(without.asm["cubin"]),
            "times": clocks(off, on, without),
            "spilled": found["spilled"] + found["local"] + found["stack"],
            "notes": found["notes"],
            "registers": found["registers"] == found["expected"]["registers"],
        }


def portable(folder: Path, what: str) -> Iterator[dict[str, Any]]:
    """The same of the portable kernel."""
    struck, kernel = untraced(portable_text, folder), gate.gemm
    names = PORTABLE[: 1 if what == "quick" else None]
    for name, plan, layout, aligned in gate.configurations("sm_90a", "all"):
        if name not in names:
            continue
        built = []
        for text, trace in ((kernel, False), (struck, False), (kernel, True)):
            gate.gemm = text
            portable_arguments.Arguments = lambda plan, layout, trace=trace: _Logged(plan, layout, trace)
            built.append(gate.build(plan, layout, aligned, "sm_90a"))
        gate.gemm, portable_arguments.Arguments = kernel, Arguments
        (off, _), (without, _), (on, said) = built
        yield {
            "name": name,
            "same": disassembled(off.asm["cubin"]) == disassembled(without.asm["cubin"]),
            "times": clocks(off, on, without),
            "spilled": sum(gate.spilled(on, said).values()),
            "notes": [],
            "registers": True,
        }


class _Logged(Arguments):
    """Arguments with a log where they are of a traced launch."""

    def __init__(self, plan: Any, layout: Any, trace: bool) -> None:
        super().__init__(plan, layout, trace=trace)
        self._log = gate.Pointer("int64") if trace else None

    def fill(self, *operands: Any, **more: Any) -> tuple[Any, ...]:
        return super().fill(*operands[:9], self._log, *operands[10:], **more)


def main() -> None:
    what = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        for target in (portable, hopper):
            for found in target(Path(folder), what):
                print(json.dumps({**found, "triton": triton.__version__}), flush=True)


if __name__ == "__main__":
    main()
