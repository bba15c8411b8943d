"""Hooks of mkdocs: what pages link to outside of docs/ becomes part of the site.

In the repository a page links to ``../examples/trainer.py`` or ``../CONTRIBUTING.md``, which works where the repository
is browsed. mkdocs knows the files in docs/ only. So Markdown files of the repository's root become pages, linked source
files become pages that show them, and links are rewritten to lead there.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.links import EXTERNAL
from tools.page import ROOT, Page

ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the root's pages, and a page for every source file that some page links to."""
    for name in ROOT_PAGES:
        files.append(File.generated(config, _site_path(name), content=(ROOT / name).read_text(encoding="utf-8")))
    linked = set()
    for file in files.documentation_pages():
        page = Page(_repository_path(file.src_uri), file.content_string)
        linked |= {page.target(link.href)[0] for link in page.links() if not EXTERNAL.match(link.href)}
    for path in sorted(linked):
        if not path.startswith("docs/") and path not in ROOT_PAGES and (ROOT / path).exists():
            file = File.generated(config, _site_path(path), content=_shown(path))
            file.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links that lead out of docs/, and those of pages that come from outside of it."""
    source = page.file.src_uri
    if source.startswith("source/"):
        return markdown
    here = Page(_repository_path(source), "")

    def moved(found: re.Match[str]) -> str:
        href = found[2]
        if EXTERNAL.match(href) or href.startswith("#"):
            return found[0]
        path, anchor = here.target(href)
        if path.startswith("docs/") and here.path.startswith("docs/"):
            return found[0]
        target = posixpath.relpath(_site_path(path), posixpath.dirname(source) or ".")
        return f"{found[1]}{target}{'#' + anchor if anchor else ''}{found[3]}"

    return LINK.sub(moved, markdown)


def _site_path(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path.lower() if path in ROOT_PAGES else f"source/{path}.md"


def _repository_path(source: str) -> str:
    """Where a page of the site is in the repository."""
    return next((name for name in ROOT_PAGES if _site_path(name) == source), f"docs/{source}")


def _shown(path: str) -> str:
    """A page that shows a source file, or names the files of a folder."""
    place = ROOT / path
    if place.is_dir():
        names = sorted(f"{p.name}{'/' if p.is_dir() else ''}" for p in place.iterdir() if not p.name.startswith("__"))
        return f"# {path}\n\n" + "".join(f"- `{name}`\n" for name in names)
    language = {".py": "python", ".cpp": "cpp", ".toml": "toml", ".sh": "sh"}.get(place.suffix, "text")
    return f"# {place.name}\n\n`{path}`\n\n``````{language}\n{place.read_text(encoding='utf-8')}\n``````\n"
