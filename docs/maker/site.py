"""The site: every page as HTML with a navigation, in light and dark, without anything from elsewhere."""

from __future__ import annotations

import posixpath
import re
import shutil
from html import escape
from pathlib import Path
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_by_name, get_lexer_for_filename
from pygments.util import ClassNotFound

from .links import OUTSIDE
from .pages import ROOT, Page, navigation, parser, url_of

TEMPLATE = Path(__file__).with_name("page.html")
STYLE = Path(__file__).with_name("site.css")
LANGUAGES = {"console": "console", "sh": "bash", "python": "python", "json": "json", "toml": "toml"}


def build(pages: dict[str, Page], out: Path, root: Path = ROOT) -> int:
    """Write the site into an empty directory; how many pages it has."""
    shutil.rmtree(out, ignore_errors=True)
    linked: set[str] = set()
    for page in pages.values():
        _write(out, page.url, page.title, _content(page, root), page, pages)
        linked |= {path for href, _ in page.links() if not OUTSIDE.match(href) for path in [page.target(href)[0]]}
    for path in sorted(linked - pages.keys()):
        if path.startswith("docs/"):
            target = out / url_of(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / path, target)
        else:
            _write(out, url_of(path), path, _source(root / path, path), None, pages)
    light, dark = (HtmlFormatter(style=name).get_style_defs(".highlight") for name in ("default", "github-dark"))
    colours = f"{light}\n@media (prefers-color-scheme: dark) {{\n{_scoped(dark, ':root:not([data-theme=light])')}\n}}\n"
    colours += _scoped(dark, ":root[data-theme=dark]")
    (out / "site.css").write_text(f"{STYLE.read_text()}\n{colours}", encoding="utf-8")
    return len(pages)


def _scoped(rules: str, scope: str) -> str:
    return "\n".join(f"{scope} {line}" for line in rules.splitlines() if line.startswith(".highlight"))


def _write(out: Path, url: str, title: str, content: str, page: Page | None, pages: dict[str, Page]) -> None:
    up = "../" * url.count("/")
    values = {
        "TITLE": escape(title),
        "UP": up,
        "NAVIGATION": _navigation(page, pages, up),
        "CONTENT": content,
        "HERE": _contents(page),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    text = re.sub(r"%%(\w+)%%", lambda found: values[found[1]], text)
    target = out / url
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def _navigation(current: Page | None, pages: dict[str, Page], up: str) -> str:
    parts = []
    for section, paths in navigation(pages).items():
        parts.append(f"<h2>{escape(section)}</h2><ul>")
        for path in paths:
            here = ' aria-current="page"' if current is not None and current.path == path else ""
            parts.append(f'<li><a href="{up}{url_of(path)}"{here}>{escape(pages[path].title)}</a></li>')
        parts.append("</ul>")
    return "\n".join(parts)


def _contents(page: Page | None) -> str:
    """The headings of a long page."""
    found = [(text, anchor) for level, text, anchor in page.headings if level == 2] if page else []
    if len(found) < 3:
        return ""
    items = "".join(f'<li><a href="#{anchor}">{escape(text)}</a></li>' for text, anchor in found)
    return f'<nav class="here" aria-label="On this page"><ul>{items}</ul></nav>'


# -- one page ----------------------------------------------------------------------------------------------------------


def _content(page: Page, root: Path) -> str:
    markdown = parser()
    rules: Any = markdown.renderer.rules
    up = "../" * page.url.count("/")
    anchors = iter(page.headings)

    def moved(href: str) -> str:
        if OUTSIDE.match(href):
            return href
        path, anchor = page.target(href)
        return f"{up}{url_of(path)}" + (f"#{anchor}" if anchor else "") if path != page.path else f"#{anchor}"

    def heading(tokens: Any, i: int, *_: Any) -> str:
        anchor = next(anchors)[2]
        return f'<{tokens[i].tag} id="{anchor}">'

    def heading_end(tokens: Any, i: int, *_: Any) -> str:
        return f"</{tokens[i].tag}>\n"

    def link(tokens: Any, i: int, *_: Any) -> str:
        return f'<a href="{escape(moved(str(tokens[i].attrs["href"])))}">'

    def image(tokens: Any, i: int, *_: Any) -> str:
        src, text = str(tokens[i].attrs["src"]), escape(tokens[i].content)
        path = page.target(src)[0]
        if path.endswith(".svg"):  # in the page, so that it follows the page's theme
            drawing = (root / path).read_text(encoding="utf-8")
            return drawing.replace("<svg ", f'<svg role="img" aria-label="{text}" ', 1)
        return f'<a href="{escape(moved(src))}"><img src="{escape(moved(src))}" alt="{text}" loading="lazy"></a>'

    def fence(tokens: Any, i: int, *_: Any) -> str:
        return code(tokens[i].content, tokens[i].info.strip())

    def comment(tokens: Any, i: int, *_: Any) -> str:
        return "" if tokens[i].content.lstrip().startswith("<!--") else tokens[i].content

    def table(tokens: Any, i: int, *_: Any) -> str:
        return '<div class="wide"><table>\n'

    def table_end(tokens: Any, i: int, *_: Any) -> str:
        return "</table></div>\n"

    rules.update(heading_open=heading, heading_close=heading_end, link_open=link, image=image, fence=fence)
    rules.update(code_block=fence, html_block=comment, table_open=table, table_close=table_end)
    return str(markdown.renderer.render(page.tokens, markdown.options, {}))


def code(text: str, language: str) -> str:
    lexer = get_lexer_by_name(LANGUAGES[language]) if language in LANGUAGES else TextLexer()
    return str(highlight(text, lexer, HtmlFormatter()))


def _source(path: Path, name: str) -> str:
    text = path.read_text(encoding="utf-8")
    try:
        lexer = get_lexer_for_filename(name)
    except ClassNotFound:
        lexer = TextLexer()
    shown = highlight(text, lexer, HtmlFormatter())
    return f"<h1>{escape(posixpath.basename(name))}</h1><p><code>{escape(name)}</code></p>{shown}"
