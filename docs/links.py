"""The links of the built documentation, looked up without the network. `make docs` fails where one leads nowhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote


class Links(HTMLParser):
    """Where a page's links and pictures lead, and what can be linked to in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.targets.add(value)
            elif value and name in ("id", "name"):
                self.anchors.add(value)


def broken(folder: Path) -> list[str]:
    """The links from a built page to another, to a picture or to an anchor that is not there. Needs no network."""
    pages = {page.resolve(): Links(page) for page in sorted(folder.rglob("*.html"))}
    found = []
    for page, links in pages.items():
        for target in sorted(links.targets):
            if re.match(r"\w+:|//", target):
                continue  # `make links` looks these up
            path, _, anchor = target.partition("#")
            there = (page.parent / unquote(path.partition("?")[0])).resolve() if path else page
            missing = not there.exists() or (anchor and there in pages and unquote(anchor) not in pages[there].anchors)
            found += [f"{page.relative_to(folder.resolve())}: {target}"] * bool(missing)
    return found
