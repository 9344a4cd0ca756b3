"""What the documentation links to and names is there, and what is there is in it. Its figures: tests/benchmarks."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import tilestream as ts

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
#: Pages that Sphinx reads, which says itself where an anchor is missing; of the others GitHub makes the anchors.
OUTSIDE = [page for page in PAGES if page.parent == ROOT]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_a_page_links_to_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", OUTSIDE, ids=name)
def test_anchors_that_a_page_links_to_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_addresses_have_a_form_that_can_be_opened(page: Path) -> None:
    """Offline: a scheme, a host with a dot, nothing left to fill in."""
    for address in re.findall(r"\]\((\w+://[^)\s]+)\)", page.read_text(encoding="utf-8")):
        assert re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/[^<>{}]*)?", address), address


def test_addresses_outside_the_documentation_are_on_its_pages_too() -> None:
    """`make links` looks up what is on those."""
    address = re.compile(r"\]\((\w+://[^)\s]+)\)")
    included = "".join(re.findall(r"```{include} \.\./(\S+)", "".join(page.read_text() for page in DOCS.glob("*.md"))))
    looked_up = {found for page in DOCS.rglob("*.md") for found in address.findall(page.read_text(encoding="utf-8"))}
    for page in OUTSIDE:
        if page.name not in included:
            assert set(address.findall(page.read_text(encoding="utf-8"))) <= looked_up, page.name


def test_a_built_page_s_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("links", DOCS / "links.py")
    assert spec is not None
    assert spec.loader is not None
    links = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(links)
    first, second = tmp_path / "a b.html", tmp_path / "sub" / "c.html"
    second.parent.mkdir()
    first.write_text('<h1 id="x">1</h1><a href="sub/c.html#y">2</a><a href="#x">3</a><img src="d.png">')
    second.write_text('<a href="../a%20b.html?v=1#x">1</a><a id="y" href="https://e.org/#z">2</a>')
    (tmp_path / "d.png").write_bytes(b"")
    assert links.broken(tmp_path) == []
    second.write_text('<a href="../a%20b.html#z">1</a><img src="../e.png"><a href="f.html">2</a>')
    assert links.broken(tmp_path) == [
        "a b.html: sub/c.html#y", "sub/c.html: ../a%20b.html#z", "sub/c.html: ../e.png", "sub/c.html: f.html"
    ]  # fmt: skip


def resolved(dotted: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name)
def test_names_of_the_library_on_a_page_exist(page: Path) -> None:
    pytest.importorskip("triton")  # modules of kernels are named
    text = page.read_text(encoding="utf-8")
    full = set(re.findall(r"`(tilestream(?:_tools)?(?:\.\w+)+)(?:\(|`)", text))
    short = {f"tilestream.{rest}" for rest in re.findall(r"\bts\.([a-z_]\w*(?:\.\w+)*)", text)}
    assert [dotted for dotted in sorted(full | short) if not resolved(dotted) and not on_package(dotted)] == []


def on_package(dotted: str) -> bool:
    """Whether it is a public name, such as ``tilestream.plan.AttentionPlan``, where ``plan`` is a function."""
    found: object = ts
    for part in dotted.split(".")[1:]:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def test_every_environment_variable_of_ours_is_on_the_troubleshooting_page() -> None:
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "csrc").glob("*.[ch]pp"), ROOT / "hatch_build.py"]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    ours = set(re.findall(r"\"(TILESTREAM_[A-Z_]+)\"", text))
    page = set(re.findall(r"^\| `(TILESTREAM_[A-Z_]+)`", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE))
    assert ours
    assert page == ours


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = set()
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        for body in re.findall(r"^```{toctree}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            names = [line for line in body.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / f"{one}.md").resolve() for one in names}
    assert listed == {page.resolve() for page in DOCS.rglob("*.md")} - {(DOCS / "index.md").resolve()}


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md"])
def test_every_folder_is_said_to_be_there(page: str) -> None:
    text = (ROOT / page).read_text()
    folders = [x.parent.name for x in (ROOT / "src" / "tilestream").glob("*/__init__.py")]
    assert folders
    assert [name for name in folders if f"{name}/" not in text] == []


@pytest.mark.parametrize("plan", ["Plan", "AttentionPlan", "DistributedPlan"])
def test_what_plan_functions_return_is_in_the_reference(plan: str) -> None:
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    assert re.search(rf"autoclass:: (\S+\.)?{plan}\(\)", text)


@pytest.mark.parametrize("module", [ts, ts.distributed, ts.trace], ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(module: object) -> None:
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    listed = set(re.findall(r"auto\w+:: (?:[\w.]+\.)?(\w+)", text))
    modules = {"distributed", "schedule", "trace", "__version__"}
    assert {name for name in module.__all__ if name not in listed | modules | {"Recorder"}} == set()
