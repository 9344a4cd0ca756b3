"""What ships, and what importing it costs."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import tilestream

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
RUNNING = sys.version_info[:2]
SUPPORTED = [(3, minor) for minor in range(10, 15)]

# These decide, count and prove; they import nothing that computes.
PURE = [
    "tilestream",
    "tilestream.core",
    "tilestream.schedule",
    "tilestream.plan",
    "tilestream_tools.verify",
    "tilestream.arrival",
]
PURE += ["tilestream.core.protocols.handshake", "tilestream.core.protocols.one_shot"]
PURE += ["tilestream.core.protocols.reduce_scatter"]
PURE += [f"tilestream.distributed{name}" for name in ("", ".dispatch", ".shards")]

COMPILE_AND_IMPORT = """
import importlib, pathlib, sys
sys.modules.update(dict.fromkeys(["torch", "triton", "numpy"]))  # None: importing it raises
src, *pure = sys.argv[1:]
files = sorted(pathlib.Path(src).rglob("*.py"))
for path in files:
    compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
for name in pure:
    importlib.import_module(name)
print(len(files))
"""

IMPORTS_ARE_LAZY = """
import sys
import tilestream
heavy = {"torch", "triton", "numpy"} & set(sys.modules)
assert not heavy, f"import tilestream imports {sorted(heavy)}"
for name in tilestream.__all__:
    getattr(tilestream, name)
import torch
assert not torch.cuda.is_initialized(), "the public names create a CUDA context"
import tilestream.distributed.moe_dispatch
assert "triton" not in sys.modules, "ranks on the CPU sort their choices without Triton"
"""

SUBPACKAGE_AND_FUNCTION = """
import importlib, sys
if sys.argv[1] == "before":
    importlib.import_module("tilestream.plan")
import tilestream
if sys.argv[1] == "after":
    importlib.import_module("tilestream.plan")
assert callable(tilestream.plan), tilestream.plan
"""


def run(python: str, script: str, *args: str) -> str:
    """Run ``script`` in another interpreter that sees nothing of this one but src/; its standard output."""
    unseen = ("PYTHON", "COVERAGE", "COV_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(unseen)}
    env |= {"PYTHONPATH": str(SRC), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [python, "-W", "error::SyntaxWarning", "-c", script, *args],
        capture_output=True,
        text=True,
        timeout=850,
        env=env,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{python}:\n{done.stderr}"
    return done.stdout


def interpreter(version: tuple[int, int]) -> str | None:
    """An interpreter of this version that really runs: this one, on PATH, or among pyenv's."""
    if version == RUNNING:
        return sys.executable
    name = "python{}.{}".format(*version)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates = [Path(folder, name) for folder in os.get_exec_path()]
    candidates += sorted(pyenv.glob("{}.{}*/bin/".format(*version) + name))
    return next((str(path) for path in candidates if os.access(path, os.X_OK) and answers(path, version)), None)


def answers(python: Path, version: tuple[int, int]) -> bool:
    """Whether it starts and is of this version; a pyenv shim that is not set up is on PATH and fails."""
    try:
        done = subprocess.run(
            [python, "-c", "import sys; print(*sys.version_info[:2])"],
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.split() == [str(part) for part in version]


@pytest.mark.parametrize("version", sorted({*SUPPORTED, RUNNING}), ids="{0[0]}.{0[1]}".format)
def test_every_supported_python_compiles_all_and_imports_the_pure_parts(version):
    python = interpreter(version)
    if python is None:
        pytest.skip("no Python {}.{} on this machine".format(*version))
    files = run(python, COMPILE_AND_IMPORT, str(SRC), *PURE)
    assert int(files) == len(list(SRC.rglob("*.py")))


def test_supported_versions_are_the_declared_ones():
    declared = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert [(3, int(minor)) for minor in declared] == SUPPORTED


def test_import_is_lazy_and_creates_no_cuda_context():
    run(sys.executable, IMPORTS_ARE_LAZY)


@pytest.mark.parametrize("when", ["before", "after"])
def test_plan_stays_a_function_beside_the_subpackage_of_that_name(when):
    run(sys.executable, SUBPACKAGE_AND_FUNCTION, when)


@pytest.mark.parametrize("first", ["the other name", "the module", "the function"])
def test_a_function_stays_one_beside_the_module_of_its_name(first):
    lines = ["import importlib, sys, tilestream as ts"]
    for function, other in (("async_tp", "AsyncTP"), ("moe", "plan_moe")):
        name = f"tilestream.distributed.{function}"
        do = {
            "the other name": f"ts.distributed.{other}",
            "the module": f"importlib.import_module({name!r})",
            "the function": f"ts.distributed.{function}; importlib.import_module({name!r})",
        }[first]
        # Neither is imported with the other.
        lines += [f"assert {name!r} not in sys.modules", do]
        lines += [f"assert ts.distributed.{function} is sys.modules[{name!r}].{function}"]
    run(sys.executable, "\n".join(lines))


def test_schedules_are_an_attribute_of_the_package():
    run(sys.executable, "import tilestream as ts; assert ts.schedule.Grid and ts.schedule.take_ready")


def test_names_of_the_plan_package_are_attributes_of_the_function():
    run(sys.executable, "import tilestream as ts; assert ts.plan.AttentionPlan and ts.plan.Plan is ts.Plan")


def test_unknown_name_raises():
    with pytest.raises(AttributeError, match=r"tilestream.*no_such_name"):
        _ = tilestream.no_such_name


def test_version_is_the_metadata_s():
    try:
        installed = importlib.metadata.version("tilestream")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("run from src/, not installed")
    assert tilestream.__version__ == installed


def test_types_are_shipped():
    assert importlib.resources.files("tilestream").joinpath("py.typed").is_file()


def test_wheel_holds_the_package_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("TILESTREAM_BUILD_NATIVE", "0")  # with it: tests/native/test_native_wheel.py
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    (wheel,) = builder.build(directory=str(tmp_path))
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {p for p in SRC.rglob("*") if p.is_file() and not {"__pycache__", "_native"} & {*p.parts}}
    sources = {f"tilestream/_native/csrc/{p.name}" for p in (ROOT / "csrc").iterdir()}
    assert names == {p.relative_to(SRC).as_posix() for p in package} | sources | {"tilestream_tools/examples/demo.py"}
    assert "tilestream/py.typed" in names
    assert wheel.endswith("-py3-none-any.whl")


@pytest.fixture
def hooks():
    """The build hooks' module."""
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_and_pictures_work_on_an_index_page(hooks):
    text = (ROOT / "README.md").read_text()
    home = "https://example.org/tilestream"
    links = re.findall(r"\]\(([^)]+)\)", hooks.index_page(text, home, "v1"))
    assert len(links) > 5
    assert all(link.startswith("https://") for link in links)
    assert any(link == f"{home}/raw/v1/docs/images/demo.png" for link in links)
    assert any(link == f"{home}/blob/v1/docs/start.md" for link in links)
    without = hooks.index_page(text, "", "v1")
    assert "](docs/" not in without
    assert "![" not in without
    assert hooks.index_page("[a](https://b.org) ![c](d.png) [e](f.md)", "", "v1") == "[a](https://b.org)  e"


def test_the_metadata_has_what_an_index_page_shows(hooks, monkeypatch):
    metadata = pytest.importorskip("hatchling.metadata.core").ProjectMetadata
    manager = pytest.importorskip("hatchling.plugin.manager").PluginManager()
    monkeypatch.setenv(hooks.HOME, "https://example.org/tilestream/")
    found = metadata(str(ROOT), manager).core
    assert found.urls["Homepage"] == "https://example.org/tilestream"
    assert found.readme.startswith("# tilestream")
    assert found.authors
    assert len(found.description) < 200
    classifiers = pytest.importorskip("trove_classifiers").classifiers
    assert set(found.classifiers) <= classifiers


def test_sdist_has_no_records_and_no_pictures(tmp_path, monkeypatch):
    builder = pytest.importorskip("hatchling.builders.sdist").SdistBuilder(str(ROOT))
    (sdist,) = builder.build(directory=str(tmp_path))
    with tarfile.open(sdist) as tar:
        names = {member.name.partition("/")[2]: member.size for member in tar.getmembers()}
    assert not [
        name for name in names if name.startswith("benchmarks/results/") or name.endswith((".png", "held.json"))
    ]
    wanted = {
        "src/tilestream/__init__.py",
        "csrc/ops.cpp",
        "hatch_build.py",
        "examples/demo.py",
        "README.md",
        "LICENSE",
    }
    assert wanted <= set(names)
    assert Path(sdist).stat().st_size < 2_700_000


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.stem)
def test_workflows_and_templates_are_yaml_and_run_what_is_there(path):
    text = path.read_text()
    yaml = pytest.importorskip("yaml")
    assert isinstance(yaml.safe_load(text), dict)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= set(targets)


def test_the_conda_recipe_asks_for_what_the_package_asks_for():
    yaml, metadata = pytest.importorskip("yaml"), importlib.metadata.requires("tilestream")
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    wanted = {one.partition(";")[0].strip() for one in metadata if ";" not in one or "extra == 'cli'" in one}
    known = {"torch": "pytorch"}
    named = {re.match(r"[a-z]+", one)[0]: re.search(r">=.*", one)[0] for one in wanted}
    asked = dict(one.split() for one in recipe["requirements"]["run"])
    python = importlib.metadata.metadata("tilestream")["Requires-Python"]
    assert asked == {"python": python, **{known.get(name, name): bound for name, bound in named.items()}}
    version = re.match(r"[\d.]+\d", tilestream.__version__)[0]
    assert recipe["context"] == {"name": "tilestream", "version": version, "home": ""}


def test_no_tracked_file_names_a_path_of_some_machine():
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run([git, "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    # In two parts, so that this file is not found; with a word before it, it is a path inside something else.
    path = re.compile(rb"(?<![\w.-])/" + b"(?:root|work|home|farm)" + b"/")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        file = ROOT / name
        if not file.is_file():  # deleted and not yet committed, or a link to elsewhere
            continue
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            if path.search(line):
                found.append(f"{name}:{number}: {line.strip()[:120].decode(errors='replace')}")
    assert not found, "\n".join(found)


def test_importing_the_ops_does_not_import_torchs_compiler() -> None:
    code = "import sys, torch, tilestream.ops; sys.exit('torch._dynamo' in sys.modules)"
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, check=False)
    assert run.returncode == 0, "it takes two seconds"
