"""Link checker for Markdown pages: relative links must name existing files, and anchors existing headings."""

import re
from collections import Counter
from pathlib import Path

LINK = re.compile(r"\]\(([^)\s]+)\)|\b(?:src|srcset)=\"([^\"]+)\"")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


def broken_links(page: Path) -> list[str]:
    """The relative links of a page whose file or heading does not exist."""
    targets = [link or image for link, image in LINK.findall(prose(page))]
    return [target for target in targets if not _resolves(page, target)]


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings: lower case, no punctuation, hyphens for spaces, numbered when repeated."""
    seen: Counter[str] = Counter()
    found = set()
    for title in HEADING.findall(prose(page)):
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


def prose(page: Path) -> str:
    """The text of a page without its code blocks."""
    return FENCED.sub("", page.read_text())


def _resolves(page: Path, target: str) -> bool:
    if re.match(r"[a-z]+:", target):
        return True
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    return file.exists() and (not anchor or anchor in anchors(file))
