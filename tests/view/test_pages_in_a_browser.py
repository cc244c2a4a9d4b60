"""The pages in a real browser: the script draws, moves and zooms the lanes, and pages fit a phone."""

from __future__ import annotations

from pathlib import Path

import pytest

from observe.dashboard.browser import Page, chromium, page
from tenax._view.html.report_page import report_page
from tenax._view.html.timeline_page import timeline_page
from tenax._view.summary import summary_of
from view.test_pages import the_run

__all__ = ["chromium", "page"]

pytestmark = pytest.mark.browser

_COLOURS = """
const canvas = document.querySelector("#lanes canvas"), copy = document.createElement("canvas");
[copy.width, copy.height] = [canvas.width, canvas.height];
const pen = copy.getContext("2d", {willReadFrequently: true});
pen.drawImage(canvas, 0, 0);
const pixels = pen.getImageData(0, 0, copy.width, copy.height).data;
const found = new Set();
for (let n = 0; n < pixels.length; n += 4) found.add(pixels[n] + "," + pixels[n + 1] + "," + pixels[n + 2]);
return [...found];
"""
_VALUE = """
const probe = document.createElement("i");
probe.style.color = "var(--" + arguments[0] + ")";
document.body.append(probe);
const found = getComputedStyle(probe).color.match(/\\d+/g).join(",");
probe.remove();
return found;
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    history = the_run(tmp_path / "journals")
    pages = {"timeline": timeline_page(history), "report": report_page(summary_of([history]), [history])}
    for name, text in pages.items():
        (tmp_path / f"{name}.html").write_text(text)
    return {name: (tmp_path / f"{name}.html").as_uri() for name in pages}


def until_drawn(page: Page, *names: str) -> None:
    """Wait until the canvas contains these colours."""
    for name in names:
        colour = page.js(_VALUE, name)
        page.until_true(f"(() => {{{_COLOURS}}})().includes({colour!r})")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lanes_are_drawn_in_the_colours_of_the_scheme(page: Page, files: dict[str, str], scheme: str) -> None:
    """With failures, and without errors of the browser."""
    page.prefer(color_scheme=scheme)
    page.driver.get(files["timeline"])
    until_drawn(page, "bg", "training", "starting", "stopping", "failed")
    assert page.browser_errors() == []


def test_buttons_and_keys_zoom_and_move(page: Page, files: dict[str, str]) -> None:
    """One key shows the whole run again."""
    page.driver.get(files["timeline"])
    until_drawn(page, "training")
    picture = 'document.querySelector("#lanes canvas").toDataURL()'
    whole = page.js(f"return {picture}")
    page.click("#zoom-in")
    zoomed = page.until_true(f"{picture} !== arguments[0] && {picture}", whole)
    page.js('document.querySelector("#lanes canvas").focus()')
    page.press("\ue014")  # arrow to the right
    page.until_true(f"{picture} !== arguments[0]", zoomed)
    page.press("0")
    page.until_true(f"{picture} === arguments[0]", whole)
    page.click("#with-workers")
    page.until_true(f"{picture} !== arguments[0]", whole)
    assert page.browser_errors() == []


def test_the_span_under_the_pointer_is_described(page: Page, files: dict[str, str]) -> None:
    """As text that a screen reader reads."""
    page.driver.get(files["timeline"])
    until_drawn(page, "training")
    page.js(
        """
        const canvas = document.querySelector("#lanes canvas"), bounds = canvas.getBoundingClientRect();
        const x = bounds.left + 150 + (bounds.width - 150) * 0.4, y = bounds.top + 24 + 22 + 11;
        canvas.dispatchEvent(new PointerEvent("pointermove", {clientX: x, clientY: y, bubbles: true}));
        """
    )
    page.until_text("description", "node0: working, generation 2, after 12 s, for 17 s")


@pytest.mark.parametrize("name", ["timeline", "report"])
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_window(page: Page, files: dict[str, str], name: str, width: int) -> None:
    """On a phone only tables scroll horizontally."""
    page.resize(width)
    page.driver.get(files[name])
    assert page.js("return document.documentElement.scrollWidth") <= width
    assert page.browser_errors() == []
