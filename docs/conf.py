"""Sphinx configuration. `make docs` builds the pages into docs/_build/html."""

from __future__ import annotations

import shutil
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import tilestream

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


def setup(app: Sphinx) -> None:
    app.add_directive("command-help", CommandHelp)
    app.connect("build-finished", copy_reports)
