"""MkDocs hooks: pages from outside docs/, generated pages, and links that hold both there and in the repository.

In the repository a page links to another one by its path; on the site README.md is the first page, and the results and
their log are beside the other pages. A link to any other file in the repository becomes text. A link to no file stays,
so that `mkdocs build --strict` fails on it.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# place in the repository -> place on the site
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "results.md",
    "benchmarks/gates.png": "images/gates.png",
    **{f"benchmarks/log/{path.name}": f"log/{path.name}" for path in sorted((ROOT / "benchmarks/log").glob("*.md"))},
}
_ON_SITE = {**OUTSIDE, "examples/dense_to_experts.ipynb": "tutorials/notebook.md"}
_IN_REPOSITORY = {site: place for place, site in OUTSIDE.items()}
_LINKED = re.compile(r"(?<!!)\[([^\[\]]+)\]\((?!https?:|mailto:|#)([^)#\s]+)\)")
_LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)")


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages outside docs/, and those that are generated."""
    for place, site in OUTSIDE.items():
        files.append(File.generated(config, site, abs_src_path=str(ROOT / place)))
    sys.path.insert(0, str(ROOT))
    from scripts.reference_pages import PAGES

    for site, write in PAGES.items():
        files.append(File.generated(config, site, content=write()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Links as the repository has them, turned into the site's."""
    site = page.file.src_uri
    folder = posixpath.dirname(_IN_REPOSITORY.get(site, f"docs/{site}"))

    def on_site(link: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join(folder, link[2]))
        target = _ON_SITE.get(place, place.removeprefix("docs/") if place.startswith("docs/") else None)
        return link[0] if target is None else link[1] + posixpath.relpath(target, posixpath.dirname(site) or ".")

    def without_sources(link: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join(folder, link[2]))
        page = place in _ON_SITE or place.startswith("docs/")
        return link[1] if not page and (ROOT / place).is_file() else link[0]

    return _LINK.sub(on_site, _LINKED.sub(without_sources, markdown))
