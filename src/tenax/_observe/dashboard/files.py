"""The static files of the dashboard as HTTP responses. They contain no data of the run, which comes over the stream."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path

from tenax._io.http.message import HTML, OK, Response

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# No external or inline content, and no text may become markup or script.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the URL contains the key
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@lru_cache(maxsize=8)
def _page(name: str, content_type: str) -> Response:
    return Response(OK, (Path(__file__).parent / name).read_bytes(), content_type)


PAGES: dict[str, Callable[[], Response]] = {
    "/": partial(_page, "page.html", HTML),
    "/page.css": partial(_page, "page.css", "text/css; charset=utf-8"),
    "/page.js": partial(_page, "page.js", "text/javascript; charset=utf-8"),
}
