"""HTML building blocks of the static pages: frame, style, escaping, tables.

A page is self-contained. Its Content-Security-Policy forbids it to load or send anything. Pure, except that styles and
scripts are read from this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from tenax._core.text import harmless
from tenax._view.text import outcome_label

_FOLDER = Path(__file__).parent
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)


def page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """Return a whole HTML file. ``body`` is already HTML."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{text(title)}</title>\n<style>\n{read_asset('page.css')}{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n"
        f"{f'<script>{script}</script>' if script else ''}\n</body>\n</html>\n"
    )


def read_asset(name: str) -> str:
    return (_FOLDER / name).read_text("utf-8")


def text(value: object) -> str:
    """Escape untrusted text for HTML, and lone surrogates, which cannot be encoded."""
    return escape(harmless(str(value)), quote=True)


def data(encoded: bytes, name: str) -> str:
    """Embed JSON for the page's script, escaped so that it cannot close the element."""
    safe = encoded.decode().replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return f'<script type="application/json" id="{name}">{safe}</script>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    inner = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="facts">{inner}</dl>'


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells are already HTML. A wide table scrolls, by keyboard too."""
    head = "".join(f'<th scope="col">{text(each)}</th>' for each in heads)
    lines = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{text(caption)}">'
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>"
    )


def cell(value: object, kind: str = "n") -> str:
    """Return a table cell. ``kind``: ``n`` stays on one line, ``text`` may wrap."""
    return f'<td class="{kind}">{text(value)}</td>'


def cells(*values: object) -> list[str]:
    return [cell(value) for value in values]


def badge(outcome: str) -> str:
    """Return the outcome with a symbol, so that it does not depend on colour."""
    if not outcome:
        return '<span class="badge neutral">&#8230; no end known</span>'
    known = {"succeeded": ("&#10003;", "good"), "cancelled": ("&#9632;", "neutral")}
    mark, kind = known.get(outcome, ("&#10007;", "bad"))
    return f'<span class="badge {kind}">{mark} {text(outcome_label(outcome))}</span>'


def notes(messages: Iterable[str]) -> str:
    return "".join(f'<p class="note">{text(each)}</p>' for each in messages)
