"""The machine-code gate: hashes of what the compile gates' quick sets compile to, kept in `machine_code.json`.

A refactoring leaves every hash alone. Run by any Python that has Triton 3.6 or later; needs no torch:

* ``machine_code.py check``: compile, and print the names whose hash moved, appeared or vanished; exit 1 if any did;
* ``machine_code.py record``: compile, and write the hashes into the record;
* ``machine_code.py hashes``: compile, and print the hashes as JSON.

``--triton 3.6.0`` (or ``all``) runs it by a Python that has that Triton: see `tests/tritons.py`. ``--only hopper,cdna``
and ``--match TEXT`` (repeatable) restrict it. ``check --against CHECKOUT`` compares with what another checkout compiles
to, ``--keep FOLDER`` writes the assembly there, to be compared by ``diff``.

A hash covers the code, its constants, registers, stack and shared memory. It does not depend on names of files,
modules, functions, parameters or the kernel, nor on line numbers: these are compiled without line information.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import re
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

# Before Triton is imported, which reads them.
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
os.environ["TRITON_INTERPRET"] = "0"

import triton
from gates import engine, trace
from triton.runtime.cache import triton_key

RECORD = Path(__file__).parent / "machine_code.json"
BACKENDS = ("portable", "hopper", "cdna")
GATES = (
    *(f"{backend} {kernel}" for backend in BACKENDS for kernel in ("gemm", "attention")),
    "hopper grouped", "hopper grouped sources",
)  # fmt: skip
#: Hashes by name, by architecture.
Hashes = dict[str, dict[str, str]]


class Job(NamedTuple):
    """A kernel, and how it is compiled. Its name begins with its backend."""

    arch: str
    name: str
    compile: Callable[[], Any]


def jobs() -> Iterator[Job]:
    """The gates' quick sets, and the kernels that the trace's gate compiles with their trace."""
    for name in GATES:
        gate = engine.load(name)
        for case in engine.cases(gate, "quick"):
            if case.arch in engine.NOT_RUN:  # whose gates are all there is to keep
                continue
            yield Job(case.arch, f"{name} {case.name}", functools.partial(engine.compiled, gate, case))
    for case in engine.cases(trace, "quick"):
        name, of_gate = case.how
        compile_it = functools.partial(engine.compiled, engine.load(name), of_gate, trace=True)
        yield Job(case.arch, f"{case.name} traced", compile_it)


# What is hashed ------------------------------------------------------------------------------------------------------


class Section(NamedTuple):
    """A section of an ELF file; ``info`` is the header's field of that name."""

    name: str
    info: int
    size: int
    data: bytes


def sections(image: bytes) -> list[Section]:
    """Of a 64-bit little-endian ELF file."""
    assert image[:6] == b"\x7fELF\x02\x01", "not a 64-bit little-endian ELF file"
    (start,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, start + i * size) for i in range(count)]
    strings = headers[names][4]
    found = []
    for name, kind, _, _, offset, length, _, info, _, _ in headers:
        first = strings + name
        data = b"" if kind == 8 else image[offset : offset + length]  # SHT_NOBITS has a size and no bytes
        found.append(Section(image[first : image.index(b"\0", first)].decode(), info, length, data))
    return found


def digest(kernel: Any) -> str:
    """The sha256 of a compiled kernel's machine code, and of what it is launched with."""
    image = kernel.asm["cubin"] if "cubin" in kernel.asm else kernel.asm["hsaco"]
    parts = of_cubin(image) if "cubin" in kernel.asm else of_hsaco(image, kernel.asm["amdgcn"])
    launch = [getattr(kernel.metadata, name, 0) or 0 for name in ("num_warps", "shared", "global_scratch_size")]
    # By content: the sections' order may be by the names of what is in them.
    return hashlib.sha256(repr((launch, sorted(parts))).encode()).hexdigest()


def of_cubin(image: bytes) -> list[tuple[str, int, str]]:
    """Code with its registers and barriers; constants; static shared memory; stack."""
    parts, code = [], 0
    for section in sections(image):
        kind = re.match(r"\.(text|nv\.constant\d+|nv\.global\.init|nv\.global|nv\.shared)\b", section.name)
        if kind and section.name != ".nv.shared.reserved.0":
            code += kind[1] == "text"
            # Of code its upper 8 bits are the registers, the rest is a symbol's number.
            registers = section.info >> 24 if kind[1] == "text" else 0
            parts.append((f"{kind[1]} of {section.size} bytes", registers, section.data.hex()))
        if section.name == ".nv.info":
            # Records of 12 bytes: a format (4), an attribute, a length (8), a symbol's number, and what it has.
            for form, attribute, length, _, value in struct.iter_unpack("<BBHII", section.data):
                assert (form, length) == (4, 8), "a record of .nv.info that is not a function's number"
                parts.append((f"attribute {attribute}", value, ""))
    assert code, "no code"
    return parts


def of_hsaco(image: bytes, assembly: str) -> list[tuple[str, int, str]]:
    """Code; constants and the kernel's descriptor; registers, spills, LDS and stack."""
    found = {section.name: section.data for section in sections(image)}
    # In a descriptor, the first 64 bytes, where the code lies from it depends on the length of the kernel's name.
    constants = found[".rodata"][:16] + bytes(8) + found[".rodata"][24:]
    data = [(name, 0, found[name].hex()) for name in (".data", ".bss", ".data.rel.ro") if name in found]
    counts = re.findall(r"\.((?:[vas]gpr|\w+_segment_fixed)_(?:count|spill_count|size)):\s+(\d+)", assembly)
    assert {"vgpr_count", "sgpr_count", "group_segment_fixed_size"} <= {name for name, _ in counts}
    return [
        (".text", 0, found[".text"].hex()), (".rodata", 0, constants.hex()), *data,
        *((name, int(count), "") for name, count in counts),
    ]  # fmt: skip


# Compiling it all ----------------------------------------------------------------------------------------------------


def send_hashed(job: Job, to: Connection) -> None:
    """Send the hash, or an error, and the assembly."""
    try:
        kernel, _ = job.compile()
        to.send((digest(kernel), kernel.asm["ptx" if "ptx" in kernel.asm else "amdgcn"]))
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        to.send((f"error: {type(error).__name__}: {error}"[-600:], ""))


def cpu_seconds() -> float:
    """Of this process, and of those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def compiled(chosen: list[Job], processes: int, keep: Path | None) -> Hashes:
    """The hashes of these.

    Each in a process of its own, forked from this one, which compiles nothing: what Triton makes for AMD depends on
    what its process compiled before.
    """
    hashes: Hashes = {}
    context = multiprocessing.get_context("fork")
    left, running = chosen[::-1], {}
    triton_key()  # reads all of Triton's files: once, before the forks
    with tempfile.TemporaryDirectory() as cache:
        # Not the user's cache: its key could leave out what has changed.
        os.environ.setdefault("TRITON_CACHE_DIR", cache)
        while left or running:
            while left and len(running) < processes:
                job = left.pop()
                results, to = context.Pipe(duplex=False)
                process = context.Process(target=send_hashed, args=(job, to))
                process.start()
                to.close()
                running[results] = (job, process)
            for results in wait(list(running)):
                job, process = running.pop(results)
                try:
                    found, assembly = results.recv()
                except EOFError:
                    found, assembly = "error: the compiler ended its process", ""
                process.join()
                hashes.setdefault(job.arch, {})[job.name] = found
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / f"{job.arch} {job.name}.s").write_text(assembly, encoding="utf-8")
    return {arch: dict(sorted(hashes[arch].items())) for arch in sorted(hashes)}


def compared(before: Hashes, after: Hashes) -> list[str]:
    """What moved, appeared, vanished or does not compile, one a line."""
    old, new = ({(arch, name): one for arch in of for name, one in of[arch].items()} for of in (before, after))
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if new.get(key, "").startswith("error"):
            what = new[key]
        elif key not in old:
            what = "appeared"
        elif key not in new:
            what = "vanished"
        else:
            what = "moved"
        if old.get(key) != new.get(key) or what.startswith("error"):
            lines.append(f"{' '.join(key)}: {what}")
    return lines


# The command line ----------------------------------------------------------------------------------------------------


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("check", "record", "hashes"))
    parser.add_argument("--triton", help="a version, or 'all'; default: this Python's")
    parser.add_argument("--only", default=",".join(BACKENDS), help="backends, with commas between them")
    parser.add_argument("--match", action="append", help="a part of '<architecture> <name>'; may be given again")
    parser.add_argument("--against", type=Path, help="another checkout, to compare with instead of the record")
    parser.add_argument("--keep", type=Path, help="a folder for the assembly")
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args()


def run_by(version: str) -> int:
    """This command line, by a Python that has this Triton."""
    sys.path.append(str(Path(__file__).parents[1]))
    from tritons import TRITONS
    from tritons import triton as python_of

    words = sys.argv[1:]
    at = next(i for i, word in enumerate(words) if word.startswith("--triton"))
    del words[at : at + (1 if "=" in words[at] else 2)]
    versions = TRITONS if version == "all" else (version,)
    return max(subprocess.run([python_of(one), __file__, *words], check=False).returncode for one in versions)


def of_checkout(checkout: Path) -> Hashes:
    """What another checkout compiles to, restricted as this run is."""
    words = [f"--only={arguments.only}", *(f"--match={text}" for text in arguments.match or ())]
    script = checkout / "tests" / "kernels" / Path(__file__).name
    run = subprocess.run([sys.executable, script, "hashes", *words], stdout=subprocess.PIPE, check=True)
    found: Hashes = json.loads(run.stdout)
    return found


def is_chosen(arch: str, name: str) -> bool:
    """Whether the command line does not restrict to others."""
    return name.split()[0] in arguments.only.split(",") and (
        not arguments.match or any(text in f"{arch} {name}" for text in arguments.match)
    )


def main() -> int:
    began = time.perf_counter()
    chosen = [job for job in jobs() if is_chosen(job.arch, job.name)]
    unmatched = [text for text in arguments.match or () if not any(text in f"{x.arch} {x.name}" for x in chosen)]
    version = triton.__version__.partition("+")[0]
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    if unmatched or not chosen:
        print(f"--match={unmatched or arguments.match}, --only={arguments.only}: no such name", file=sys.stderr)
        return 2
    if arguments.what == "check" and not arguments.against and version not in record:
        print(f"Triton {version}: the record has {', '.join(record)}", file=sys.stderr)
        return 2
    found = compiled(chosen, arguments.processes, arguments.keep)
    took = f"{len(chosen)} kernels in {time.perf_counter() - began:.0f} s, {cpu_seconds():.0f} s of CPU"
    if arguments.what == "hashes":
        print(json.dumps(found, indent=1))
        return 0
    recorded = of_checkout(arguments.against) if arguments.against else record.get(version, {})
    before = {
        arch: {name: one for name, one in names.items() if is_chosen(arch, name)} for arch, names in recorded.items()
    }
    lines = compared(before, found)
    print("\n".join([*lines, f"Triton {version}: {len(lines)} differ of {took}"]), flush=True)
    if arguments.what == "check":
        return int(bool(lines))
    if any(one.startswith("error") for names in found.values() for one in names.values()):
        print("not recorded: not all of it compiles", file=sys.stderr)
        return 1
    for arch in recorded.keys() | found.keys():
        kept = {name: one for name, one in recorded.get(arch, {}).items() if name not in before.get(arch, {})}
        recorded[arch] = kept | found.get(arch, {})
    record[version] = recorded
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    arguments = parsed()
    if arguments.triton:
        sys.exit(run_by(arguments.triton))
    ended = main()
    sys.stdout.flush()
    os._exit(ended)  # which ends it without the page about leaks that Triton 3.9 ends with
