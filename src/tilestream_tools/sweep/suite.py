"""Shapes to sweep over: those of a YAML file, checked; the package brings a suite or two."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

#: Dtypes that a sweep multiplies.
DTYPES = ("bfloat16", "float16", "float32")
_FOLDER = resources.files("tilestream_tools.sweep") / "suites"


@dataclass(frozen=True)
class Shape:
    """``[m, k] @ [k, n]``, B as it lies in a Linear weight ``[n, k]``."""

    m: int
    n: int
    k: int
    name: str = ""

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def operations(self) -> int:
        """Multiply-adds, counted two each."""
        return 2 * self.m * self.n * self.k

    @classmethod
    def parse(cls, text: str) -> Shape:
        """``"4096x8192x28672"``: M, N, K.

        Raises
        ------
        ValueError
            If it is something else.
        """
        extents = text.lower().split("x")
        if len(extents) != 3 or not all(extent.isdecimal() and int(extent) for extent in extents):
            raise ValueError(f"shape {text!r}: give M, N and K as 4096x8192x28672")
        m, n, k = map(int, extents)
        return cls(m, n, k)


@dataclass(frozen=True)
class Suite:
    """Shapes, and the dtype of their operands and outputs."""

    name: str
    dtype: str
    shapes: tuple[Shape, ...]


def names() -> list[str]:
    """Of the suites that come with the package."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _FOLDER.iterdir() if entry.name.endswith(".yaml"))


def load(name: str) -> Suite:
    """A suite of the package by its name, or one of your own by its file's.

    The file is YAML: a mapping of ``shapes``, a list of mappings of ``m``, ``n``, ``k`` and, if you like, ``name``; and
    of ``dtype``, bfloat16 where it is not given.

    Raises
    ------
    ValueError
        If there is no such suite, or the file is not like that: it names what is wrong.
    ImportError
        If PyYAML is missing.
    """
    try:
        import yaml
    except ImportError as error:
        raise ImportError("reading a suite takes PyYAML: pip install 'tilestream[cli]'") from error
    path = Path(name)
    if name in names():
        data = (_FOLDER / f"{name}.yaml").read_bytes()
    elif path.suffix in (".yaml", ".yml"):
        data = path.read_bytes()
    else:
        raise ValueError(f"suite {name!r}: give a .yaml file, or one of {', '.join(names())}")
    try:
        found = yaml.safe_load(data.decode())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: no YAML: {' '.join(str(error).split())}") from None
    return _checked(path.stem, found, name)


def _checked(name: str, found: Any, where: str) -> Suite:
    if not isinstance(found, dict) or not isinstance(found.get("shapes"), list) or not found["shapes"]:
        raise ValueError(f"{where}: a suite is a mapping with a list of `shapes`")
    if odd := set(found) - {"shapes", "dtype"}:
        raise ValueError(f"{where}: {', '.join(map(str, sorted(odd)))}: a suite has `shapes` and `dtype`")
    dtype = found.get("dtype", DTYPES[0])
    if dtype not in DTYPES:
        raise ValueError(f"{where}: dtype: {dtype!r}; it must be one of {', '.join(DTYPES)}")
    return Suite(name, dtype, tuple(_shape(entry, f"{where}: shape {i}") for i, entry in enumerate(found["shapes"], 1)))


def _shape(entry: Any, where: str) -> Shape:
    if not isinstance(entry, dict) or not {"m", "n", "k"} <= set(entry) <= {"m", "n", "k", "name"}:
        raise ValueError(f"{where}: {entry!r}; a shape has m, n, k and, if you like, name")
    for key in ("m", "n", "k"):
        value = entry[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{where}: {key}: {value!r}; an extent is a positive whole number")
    return Shape(entry["m"], entry["n"], entry["k"], str(entry.get("name", "")))
