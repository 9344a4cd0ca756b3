"""Sphinx configuration. `make docs` builds the pages into docs/_build/html."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import SphinxError
from sphinx.util.docutils import SphinxDirective

import tilestream

sys.path.insert(0, str(Path(__file__).parent))
from links import broken  # beside this file

project = "tilestream"
author = "the tilestream authors"
copyright = author
version = release = tilestream.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
nitpicky = False  # annotations name types of torch, whose inventory is not here
html_theme = "furo"  # one column that reads well on a phone, search, light and dark by the reader's setting
html_title = f"tilestream {release}"
html_static_path: list[str] = []
html_theme_options = {"navigation_with_keys": True}

linkcheck_retries = 3
linkcheck_timeout = 30

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

napoleon_google_docstring = False
napoleon_use_rtype = False
autodoc_typehints = "none"  # signatures say it; NumPy-style docstrings give shapes, units and meaning
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
default_role = "code"


class CommandHelp(SphinxDirective):
    """The ``--help`` of each command of ``tilestream``, a section a command."""

    def run(self) -> list[nodes.Node]:
        from typer.main import get_command
        from typer.testing import CliRunner

        from tilestream_tools.cli.app import app

        sections: list[nodes.Node] = []
        for name in get_command(app).commands:
            shown = CliRunner().invoke(app, [name, "--help"], prog_name="tilestream", env={"COLUMNS": "100"})
            section = nodes.section(ids=[nodes.make_id(f"tilestream-{name}")])
            text = shown.output.rstrip()
            section += [nodes.title(text=f"tilestream {name}"), nodes.literal_block(text, text, language="text")]
            sections.append(section)
        return sections


def copy_reports(app: Sphinx, error: Exception | None) -> None:
    """Pages of `tilestream report`, which are whole as they are, lie beside those that are built."""
    if error is None and app.builder.format == "html":
        there = Path(app.outdir) / "report"
        there.mkdir(exist_ok=True)
        for page in (Path(app.srcdir) / "report").glob("*.*"):
            shutil.copy(page, there)


def without_unread(app: Sphinx) -> list[tuple[str, dict[str, object], str]]:
    """viewcode lists modules that it could not read, such as those that named tuples name, with links to no page."""
    modules = getattr(app.env, "_viewcode_modules", {})
    for module in [module for module, source in modules.items() if not source]:
        del modules[module]
    return []


def check_links(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html" and (found := broken(Path(app.outdir))):
        raise SphinxError(
            "links that lead nowhere (`make clean` first, where a page was renamed):\n" + "\n".join(found)
        )


def setup(app: Sphinx) -> None:
    app.add_directive("command-help", CommandHelp)
    app.connect("html-collect-pages", without_unread, priority=100)  # before viewcode's
    app.connect("build-finished", copy_reports)
    app.connect("build-finished", check_links, priority=900)
