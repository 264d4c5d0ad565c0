"""Build the site: the pages of docs/, the reference pages, and Zensical in strict mode, in which a broken link is an error."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tools.site import reference

ROOT = Path(__file__).parents[2]
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")
"""A link to a file of the repository, which the site does not contain."""
NAMED = re.compile(r"\[([\w-]+\.md)\]\(\1(?P<anchor>#[^)]*)?\)")
"""A link whose text is the name of the file."""


def build(folder: Path) -> Path:
    """Write sources and site into a folder; returns the site. Raises CalledProcessError with Zensical's warnings."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "zensical.toml", folder)
    pages = {page.name: page.read_text() for page in (folder / "docs").glob("*.md")}
    titles = {name: text.partition("\n")[0].removeprefix("# ") for name, text in pages.items()}
    for name, text in pages.items():
        titled = NAMED.sub(lambda found: f"[{titles[found[1]]}]({found[1]}{found['anchor'] or ''})", text)
        (folder / "docs" / name).write_text(OUTSIDE.sub(r"\1", titled))
    (folder / "docs/reference").mkdir()
    for path, text in reference.pages().items():
        (folder / "docs" / path).write_text(text)
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=folder, check=True)
    return folder / "site"
