"""MkDocs hook: files of the checkout that lie outside ``docs/`` are pages of the site too.

A link is written for the checkout, so that it works there and on a code host; for the site it is turned into a link to
the page (or to the copy of the picture) that stands for the file. A link to a file that has no page is left as it is:
MkDocs then warns, and a warning ends the build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
#: File of the checkout -> page or file of the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CITATION.cff": "CITATION.cff",
    "examples/own_app/README.md": "own-app.md",
    "examples/classic_app/README.md": "classic-app.md",
}
#: Pictures beside the records that the page of results shows.
PICTURES = "results/**/*.png"
#: Folder of the site that gets them; ``results`` is a page.
RECORDS = "records"
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")


def _copies() -> dict[str, str]:
    """Return which file of the checkout is which file of the site, for all outside ``docs/``."""
    pictures = (path.relative_to(ROOT).as_posix() for path in ROOT.glob(PICTURES))
    return OUTSIDE | {name: name.replace("results/", f"{RECORDS}/", 1) for name in pictures}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the files outside ``docs/`` to the site."""
    for source, target in _copies().items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Return the page with its links turned from places in the checkout into places in the site."""
    copies = _copies()
    origin = {target: source for source, target in copies.items()}
    source = PurePosixPath(origin.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def turned(found: re.Match[str]) -> str:
        meant = os.path.normpath(source.parent / found[2])
        target = copies.get(meant, meant.removeprefix("docs/") if meant.startswith("docs/") else None)
        if target is None:
            return found[0]
        return found[1] + os.path.relpath(target, PurePosixPath(page.file.src_uri).parent) + found[3]

    return LINK.sub(turned, markdown)
