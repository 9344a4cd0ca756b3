"""Sphinx configuration. `make docs` builds the pages into docs/_build/html."""

from __future__ import annotations

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
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"tilestream {release}"
html_static_path: list[str] = []

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

napoleon_google_docstring = False
napoleon_use_rtype = False
autodoc_typehints = "none"  # signatures say it; NumPy-style docstrings give shapes, units and meaning
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
default_role = "code"
