"""HTML building blocks of the static pages: frame, style, escaping, tables.

A page is self-contained. Its Content-Security-Policy forbids it to load or send anything.
"""

from __future__ import annotations

from html import escape

from tenax._core.text import harmless

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Phases and states have the colours of the live page (``dashboard/page.css``).
_STYLE = """
:root {
  color-scheme: light dark;
  --bg: #ffffff; --fg: #1c2127; --muted: #5a6470; --line: #d5dbe1; --card: #f5f7f9; --focus: #0a66c2;
  --waiting: #d9b25c; --starting: #6fa3ec; --training: #4aa56a; --stopping: #e08a55; --lost: #c9574f;
  --draining: #7a3db8; --done: #0d6b68; --idle: #98a2ad; --failed: #b3261e; --good: #1a7339;
  --on-waiting: #000000; --on-starting: #000000; --on-training: #000000; --on-stopping: #000000; --on-lost: #000000;
  --on-draining: #ffffff; --on-done: #ffffff; --on-idle: #000000; --on-failed: #ffffff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #12161b; --fg: #e4e8ec; --muted: #9ba6b2; --line: #313943; --card: #1a2027; --focus: #6cb2ff;
    --waiting: #a17f33; --starting: #4478c2; --training: #3d8f5a; --stopping: #b5632f; --lost: #b0483f;
    --draining: #cba3ff; --done: #5cd6cd; --idle: #6b7580; --failed: #ff8a80; --good: #6fd08c;
    --on-lost: #ffffff; --on-draining: #000000; --on-done: #000000; --on-idle: #ffffff; --on-failed: #000000;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 20px 20px 48px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 32px 0 8px; }
p { margin: 6px 0; overflow-wrap: anywhere; }
a { color: var(--focus); }
.muted, figcaption, caption { color: var(--muted); }
.badge { display: inline-block; padding: 1px 10px; border-radius: 999px; font-weight: 600; font-size: .85rem;
  border: 1px solid currentColor; white-space: nowrap; }
.good { color: var(--good); } .bad { color: var(--failed); } .neutral { color: var(--muted); }
.note { border-left: 4px solid var(--waiting); background: var(--card); padding: 8px 14px; margin: 10px 0; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px;
  margin: 16px 0; padding: 0; }
.facts div { background: var(--card); border-radius: 8px; padding: 10px 12px; }
.facts dt { color: var(--muted); font-size: .85rem; } .facts dd { margin: 0; font-size: 1.1rem; font-weight: 600;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
figure { margin: 12px 0; } figcaption { font-size: .9rem; margin-bottom: 4px; }
svg { display: block; width: 100%; overflow: visible; } svg text { fill: var(--fg); font: 13px system-ui, sans-serif; }
svg .quiet { fill: var(--muted); font-size: 12px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0; padding: 0; list-style: none;
  font-size: .9rem; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; }
.wide { overflow-x: auto; } .wide:focus-visible, canvas:focus-visible { outline: 2px solid var(--focus); }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--muted); font-weight: 600; white-space: nowrap; } td.n { white-space: nowrap; }
td.text { min-width: 190px; overflow-wrap: anywhere; }
pre { overflow-x: auto; background: var(--card); padding: 10px; border-radius: 6px; font-size: .82rem; margin: 6px 0; }
details summary { cursor: pointer; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 0 40px; }
footer { margin-top: 40px; color: var(--muted); font-size: .85rem; }
@media (max-width: 480px) { main { padding: 14px 12px 32px; } .facts dd { font-size: 1rem; } }
@media print { .tools { display: none; } }
"""
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)


def page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """Return a whole HTML file. ``body`` is already HTML."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{text(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f"{f'<script>{script}</script>' if script else ''}\n</body>\n</html>\n"
    )


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


def badge(outcome: str) -> str:
    """Return the outcome with a symbol, so that it does not depend on colour."""
    if not outcome:
        return '<span class="badge neutral">&#8230; no end known</span>'
    mark, kind = ("&#10003;", "good") if outcome == "succeeded" else ("&#10007;", "bad")
    if outcome == "cancelled":
        mark, kind = "&#9632;", "neutral"
    return f'<span class="badge {kind}">{mark} {text(outcome)}</span>'


def notes(messages: Iterable[str]) -> str:
    return "".join(f'<p class="note">{text(each)}</p>' for each in messages)
