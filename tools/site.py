"""Checks the built documentation, prints what leads out of it, and says where it is: `make docs`.

python tools/site.py docs/_build/html

Nothing is loaded from elsewhere; every link inside leads to a page and an anchor that exist; every public name of the
package has an anchor. Problems are printed, and the exit code is 1.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FACE = Path(__file__).parents[1] / "tests" / "repo" / "public_face.txt"
LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "srcset", "object": "data"}
IN_STYLES = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])(https?:)?//""")


class Page(HTMLParser):
    """What a page loads, where it leads, and where it can be entered."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if (
            tag in LOADS
            and found.get(LOADS[tag])
            and found.get("rel") not in ("canonical", "index", "search", "next", "prev")
        ):
            self.loads.append(found[LOADS[tag]])
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])


def outside(address: str) -> bool:
    return address.startswith("//") or urlsplit(address).scheme in ("http", "https")


def problems(site: Path) -> tuple[list[str], list[str]]:
    """What is wrong with the site, and the addresses outside of it that people may follow."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    wrong, leaving = [], set()
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        wrong += [f"{name} loads {address}" for address in page.loads if outside(address)]
        for address in [*page.links, *page.loads]:
            if outside(address):
                leaving.add(address)
            elif not urlsplit(address).scheme:
                wrong += [f"{name}: {address} leads nowhere"] if not _exists(path, address, pages) else []
    for path in site.rglob("*.css"):
        wrong += [f"{path.relative_to(site)} loads from elsewhere"] if IN_STYLES.search(path.read_text("utf-8")) else []
    anchors = set().union(*(page.anchors for page in pages.values())) if pages else set()
    wrong += [f"{name} has no place in the reference" for name in public_names() if name not in anchors]
    return wrong, sorted(leaving)


def _exists(path: Path, address: str, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(address)
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        return False
    return not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].anchors


def public_names() -> list[str]:
    """Functions, classes and constants of tests/repo/public_face.txt, by the path under which it writes them."""
    lines = FACE.read_text(encoding="utf-8").splitlines()
    return [match[1] for line in lines if (match := re.match(r"(?:class )?(intention[\w.]*\.\w+)(?=$|\()", line))]


def main() -> int:
    site = Path(sys.argv[1])
    wrong, leaving = problems(site)
    print("leads out of the site:", *leaving, sep="\n  ")
    for problem in wrong:
        print(f"error: {problem}", file=sys.stderr)
    print(f"the documentation is in {site.resolve() / 'index.html'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
