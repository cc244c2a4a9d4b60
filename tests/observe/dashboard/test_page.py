"""The page in a real browser: what it shows, what can be done with it, and for whom it works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from kit.addresses import own_address
from kit.processes import until
from tenax._core.coordinator import Suspicion

from .browser import Page
from .stage import TRACEBACK, Stage
from .tunnel import Tunnel

# Of every piece of text that is seen: the lowest contrast with what is behind it, and which it was.
_CONTRAST = """
const lum = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const rgb = text => (text.match(/[0-9.]+/g) || []).map(Number);
const behind = element => {
  for (; element; element = element.parentElement) {
    const colour = rgb(getComputedStyle(element).backgroundColor);
    if (colour.length === 3 || colour[3] > 0.99) return colour;
  }
  return [255, 255, 255];
};
let worst = [99, ""];
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
  if (!own || !element.checkVisibility() || element.matches(":disabled, .unseen, .skip, noscript *")) continue;
  const [one, other] = [lum(rgb(getComputedStyle(element).color)), lum(behind(element))];
  const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  if (ratio < worst[0]) worst = [ratio, element.outerHTML.slice(0, 120)];
}
return worst;
"""


def after_a_failure(stage: Stage) -> None:
    stage.progress(4)
    stage.fail(1, 2, 3)
    until(lambda: stage.status.generation == 2 and stage.status.generations[-1].running_at, "the next generation")


def test_it_shows_the_run(set_up: Callable[..., Stage], page: Page) -> None:
    """Nodes, workers, generations, budget; in words, and with nothing for the browser to complain about."""
    stage = set_up(2, 4)
    page.open(stage.link)
    assert page.text("run-id") == "train-large"
    assert page.text("phase") == "● running"
    assert page.text("fact-restarts") == "0 used, 3 left of 3"
    assert page.text("fact-workers") == "8"
    cards = page.js("return [...document.querySelectorAll('.node')].map(card => card.innerText)")
    assert len(cards) == 2
    assert "gpu-000" in cards[0]
    assert "working for" in cards[0]
    assert "coordinator" in cards[0]
    assert "ranks 4–7" in cards[1]
    row = page.text("generations")
    assert "Generation 1" in row
    assert "training" in row
    assert "Began: first generation" in row
    assert "has started its 4 workers" in page.text("events")
    assert "running · train-large" in page.driver.title
    assert page.complaints() == []


def test_a_failure_is_shown_with_its_cause_and_its_consequences(set_up: Callable[..., Stage], page: Page) -> None:
    """As long as it lasts, and as the last one when the run has gone on; what workers said stays text."""
    stage = set_up(2, 2, max_restarts=0)
    page.open(stage.link)
    stage.fail(1, 2, 3)
    failure = page.until_text("failure", "RuntimeError")
    assert "exception" in failure
    assert "exit code 1: RuntimeError: <b>boom</b>" in failure
    assert "rank 1 (local rank 1) on gpu-000" in failure
    assert "2 workers failed because of it" in failure
    page.click("#failure details[data-of^=traceback] summary")
    assert page.js("return document.querySelector('#failure pre').textContent") == TRACEBACK
    assert page.js("return document.querySelectorAll('#failure b').length") == 0
    page.click("#failure details[data-of=consequences] summary")
    assert "peer lost" in page.text("failure")
    page.until_text("phase", "failed")
    assert page.js("return document.getElementById('restart').disabled && document.getElementById('stop').disabled")
    assert page.js("return ['#restart', '#stop', '.drain'].every(each => document.querySelector(each).hidden)")
    page.until_text("announcer", "The run is over: it failed.")


def test_a_failure_that_was_tried_again_stays_to_be_read(set_up: Callable[..., Stage], page: Page) -> None:
    stage = set_up()
    page.open(stage.link)
    after_a_failure(stage)
    page.until_text("failure-title", "The last failure, in generation 1, which was tried again")
    page.until_text("fact-generation", "2")
    assert page.text("fact-restarts") == "1 used, 2 left of 3"
    rows = page.text("generations")
    assert "a worker failed" in rows
    assert "Ended: rank 1 on gpu-000 failed" in rows
    assert "Began: restart 1 of 3" in rows
    assert "steps 0–4" in rows
    assert page.text("lost-steps") == "0"
    assert page.text("to-recover") != "–"
    assert "training" in page.text("ledger")


def test_a_hang_stands_at_the_top_as_long_as_it_lasts(set_up: Callable[..., Stage], page: Page) -> None:
    stage = set_up()
    page.open(stage.link)

    def suspect(hang: Suspicion | None) -> None:
        stage.seat.state.hang = hang
        for on_step in list(stage.seat.watchers):
            on_step()

    stage.do(lambda: suspect(Suspicion(1, stage.loop.now() - 600, "nothing moves", set())))
    page.until_text("phase", "⚠ seems to hang")
    doing = page.until_text("doing", "generation 1 seems to hang: no activity for 10 m ")
    assert doing.endswith(" s; requesting the stacks of its workers")
    page.until_text("announcer", "seems to hang")
    # Nothing of it is green, neither nodes, nor workers, nor the generation; and it can be filtered by.
    assert "⚠ 2 hanging" in page.text("states")
    assert "⚠ hanging for 10 m " in page.text("nodes")
    assert "⚠ seems to hang" in page.text("generations")
    assert page.js("return document.querySelectorAll('.worker.is-hanging').length") == 4
    assert not page.js("return document.querySelector('.is-working, .is-running')")
    made = stage.desk.statuses
    until(lambda: page.text("doing") != doing, "the time to go by")
    assert stage.desk.statuses == made
    stage.do(lambda: suspect(None))
    page.until_text("phase", "● running")
    assert page.text("doing") == "generation 1 is running, 4 workers on 2 nodes"
    assert "● 2 working" in page.text("states")
    assert "hanging" not in page.text("nodes")
    assert "● training" in page.text("generations")


def test_the_times_go_on_by_themselves(set_up: Callable[..., Stage], page: Page) -> None:
    """Nothing is sent for it."""
    stage = set_up()
    page.open(stage.link)
    before, made = page.text("ledger"), stage.desk.statuses
    until(lambda: page.text("ledger") != before, "the time to go by")
    assert stage.desk.statuses == made


def test_a_log_is_followed(set_up: Callable[..., Stage], page: Page) -> None:
    """As text, without what would act on a terminal; the next line comes when it is printed."""
    stage = set_up()
    page.open(stage.link)
    page.click(".node:nth-child(2) .worker:nth-child(1)")
    assert page.text("log-title") == "Log of rank 2, on gpu-001"
    page.until_text("log-lines", "<script>alert(1)</script>")
    assert "red" in page.text("log-lines")
    assert "\x1b" not in page.js("return document.getElementById('log-lines').textContent")
    until(lambda: stage.held, "the page to wait for more")
    stage.print("loss 0.25\r loss 0.125")
    page.until_text("log-lines", "loss 0.125")
    assert "loss 0.25" not in page.text("log-lines")
    page.press(Keys.ESCAPE)
    page.until_true("document.getElementById('log').hidden")
    assert page.js("return document.activeElement.className").startswith("worker")


def test_a_drain_asks_first(set_up: Callable[..., Stage], page: Page) -> None:
    """Cancelled, nothing happens. Meant, the node leaves, and the answer is shown."""
    stage = set_up(3, 2, min_nodes=1)
    page.open(stage.link)
    page.click(".node:nth-child(2) .drain")
    assert page.text("ask-title") == "Drain gpu-001?"
    assert "The other 2 nodes go on in a new generation" in page.text("ask-text")
    page.click("#ask-no")
    page.until_true("!document.getElementById('ask').open")
    assert stage.status.drains == 0
    assert page.js("return document.activeElement.className") == "drain"
    page.click(".node:nth-child(2) .drain")
    page.click("#ask-yes")
    assert page.until_text("ask-answer", "Done") == "Done: gpu-001 is asked to leave."
    page.press(Keys.ENTER)  # Close has the focus
    page.until_true("!document.getElementById('ask').open")
    page.until_true("document.querySelectorAll('.node').length === 2")
    page.until_text("fact-generation", "2")
    assert "1 drain" in page.text("fact-membership")


def test_a_drain_that_leaves_too_few_says_so(set_up: Callable[..., Stage], page: Page) -> None:
    stage = set_up(2, 2)
    page.open(stage.link)
    page.click(".drain")
    assert "That leaves 1 node, and the run needs 2: it waits for another" in page.text("ask-text")
    page.press(Keys.ESCAPE)
    page.until_true("!document.getElementById('ask').open")
    assert stage.status.drains == 0


def test_a_restart_and_the_end_with_the_keyboard_alone(set_up: Callable[..., Stage], page: Page) -> None:
    """Every stop of the tab key is seen; a question is answered without a mouse; the end is told plainly."""
    stage = set_up()
    page.open(stage.link)
    visited = []
    for _ in range(20):
        page.press(Keys.TAB)
        visited.append(page.js("const e = document.activeElement; return e.id || e.className || e.tagName"))
        ring = page.js("const s = getComputedStyle(document.activeElement); return s.outlineStyle + s.outlineWidth")
        assert ring == "solid3px", visited
        if visited[-1].startswith("worker"):
            break
    assert visited[:3] == ["skip", "restart", "stop"]
    assert "filter" in visited
    assert visited[-1].startswith("worker")
    page.js("document.getElementById('restart').focus()")
    page.press(Keys.ENTER)
    assert page.js("return document.activeElement.id") == "ask-no", "the safe answer has the focus"
    page.press(Keys.TAB, Keys.ENTER)
    page.until_text("ask-answer", "Done: generation 1 is being ended, and another follows.")
    page.press(Keys.ENTER)
    page.until_text("fact-generation", "2")
    assert page.text("fact-restarts").startswith("0 used")
    assert page.js("return document.activeElement.id") == "restart"
    page.js("document.getElementById('stop').focus()")
    page.press(Keys.SPACE)
    page.press(Keys.TAB, Keys.SPACE)
    page.until_text("ask-answer", "Done: the run is being ended on every node.")
    page.until_text("phase", "cancelled")
    page.press(Keys.ESCAPE)
    stage.do(stage.dashboard.close)
    page.until_text("connection", "the run is over")
    assert "The run is over: it was stopped." in page.text("notice")
    assert page.js("return document.getElementById('reconnect').hidden"), "there is nothing left to connect to"


def test_an_answer_that_is_a_refusal_is_shown(set_up: Callable[..., Stage], page: Page) -> None:
    """The node was there when the question was asked."""
    stage = set_up(3, 1, min_nodes=1)
    page.open(stage.link)
    page.click(".node:nth-child(3) .drain")
    stage.lose(2)
    until(lambda: len(stage.status.nodes) == 2, "the loss")
    page.click("#ask-yes")
    assert "It was not done: there is no node 'id-2'" in page.until_text("ask-answer", "It was not done")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read_in_both_schemes_on_a_telephone(
    scheme: str, set_up: Callable[..., Stage], page: Page, tmp_path: Path
) -> None:
    """360 pixels: nothing is cut off to the right; a contrast of 4.5 everywhere, in the dialog and the log too."""
    stage = set_up(3, 8, min_nodes=1)
    stage.progress(4)
    page.prefer(color_scheme=scheme, reduced_motion="reduce")
    page.resize(360, 740)
    page.open(stage.link)
    for number in (2, 3):
        stage.fail(1, 2, 3)
        page.until_text("fact-generation", str(number))
        until(lambda: stage.status.generations[-1].running_at, "the next generation")
    page.click("#earlier summary")
    grounds = page.js("return getComputedStyle(document.body).backgroundColor")
    assert (grounds == "rgb(19, 21, 25)") == (scheme == "dark")
    for name, selector in (("page", ""), ("log", ".worker"), ("dialog", "#restart")):
        if selector:
            page.js("document.querySelector(arguments[0]).click()", selector)
        page.driver.save_screenshot(str(tmp_path / f"{name}-{scheme}.png"))
        assert page.js("return document.documentElement.scrollWidth <= innerWidth"), name
        ratio, where = page.js(_CONTRAST)
        assert ratio >= 4.5, where


def test_motion_is_left_out_for_who_wants_none(set_up: Callable[..., Stage], page: Page) -> None:
    stage = set_up()
    for wanted, name in (("no-preference", "fresh"), ("reduce", "none")):
        page.prefer(reduced_motion=wanted)
        page.open(stage.link)
        stage.progress(3)
        stage.fail(0)
        page.until_true("document.querySelector('#events .fresh')")
        shown = page.js("return getComputedStyle(document.querySelector('#events .fresh')).animationName")
        assert shown == name


def test_a_lost_connection_is_told_and_found_again(set_up: Callable[..., Stage], page: Page) -> None:
    """The page keeps what it knew; the buttons rest meanwhile."""
    stage = set_up()
    page.open(stage.link)
    stage.do(stage.dashboard.close)
    page.until_text("connection", "connection lost, trying again")
    assert "has closed it" in page.text("notice")
    assert page.text("fact-workers") == "4"
    assert page.js("return document.getElementById('stop').disabled && document.querySelector('.drain').disabled")
    address = f"{stage.host}:{stage.port}"
    stage.dashboard = stage.do(lambda: type(stage.dashboard)(address, stage.desk, stage.loop, stage.complaints.append))
    stage.dashboard._key = stage.key  # as if it were the same, for the page that is open
    stage.fail(0)
    page.until_text("connection", "live")
    page.until_text("fact-generation", "2")
    assert page.js("return document.getElementById('notice').hidden")


def test_an_agent_that_stays_away_is_not_waited_for_forever(set_up: Callable[..., Stage], page: Page) -> None:
    """After a minute, by the browser's clock, the page says so and rests; a button tries again."""
    stage = set_up()
    page.open(stage.link)
    stage.do(stage.dashboard.close)
    page.until_text("connection", "connection lost, trying again")
    page.js("const now = Date.now; Date.now = () => now() + 61000")
    page.until_text("connection", "not connected")
    assert "cannot be reached: it has ended, or the way to it is broken" in page.until_text("notice", "cannot be")
    address = f"{stage.host}:{stage.port}"
    stage.dashboard = stage.do(lambda: type(stage.dashboard)(address, stage.desk, stage.loop, stage.complaints.append))
    page.click("#reconnect")
    page.until_text("notice", "The page is refused: this page needs the key of the run")  # it is another one's
    stage.dashboard._key = stage.key
    page.click("#reconnect")
    page.until_text("connection", "live")


def test_a_log_goes_on_when_the_way_to_the_run_is_there_again(set_up: Callable[..., Stage], page: Page) -> None:
    """As after a tunnel that was down for a while: the run and its page have not noticed."""
    stage = set_up()
    tunnel = Tunnel(own_address(), (stage.host, stage.port))
    try:
        page.open(f"http://{tunnel.host}:{tunnel.port}/?key={stage.key}")
        page.click(".worker")
        page.until_text("log-lines", "epoch 1")
        until(lambda: stage.held, "the question for more")
        tunnel.close()
        page.until_text("connection", "connection lost, trying again")
        page.until_text("log-state", "the agent that serves this page cannot be reached")
        stage.held.clear()  # who asked through the tunnel has no way back
        stage.print("printed meanwhile")
        tunnel.open()
        page.until_text("connection", "live")
        page.until_text("log-lines", "printed meanwhile")
        page.until_text("log-state", "Following.")
    finally:
        tunnel.close()


def test_a_wrong_key_is_told(set_up: Callable[..., Stage], page: Page) -> None:
    """On the page itself when another run is served there now; as a sentence when it is opened so."""
    stage = set_up()
    page.driver.get(stage.origin)
    assert "open the link that tenax printed" in page.js("return document.body.innerText")
    page.open(stage.link)
    stage.dashboard._key = "another"
    page.js("history.replaceState(null, '', '/?key=wrong')")
    page.driver.refresh()
    assert "open the link that tenax printed" in page.js("return document.body.innerText")


def test_one_thousand_nodes_are_usable(set_up: Callable[..., Stage], page: Page) -> None:
    """1,000 nodes with 8 workers each: tiles by state, a filter, a card for the one that is looked at."""
    before_kb = rss_kb()
    stage = set_up(1000, 8)
    stage.progress(100)
    page.open(stage.link)
    page.until_true("document.querySelectorAll('.tile').length === 1000")
    shown_ms = page.js("return performance.now()")
    paint = page.js("return performance.getEntriesByType('paint').map(each => each.startTime)[0]")
    assert "1,000 nodes, 8,000 workers" in page.text("nodes")
    filtered_ms = page.js(_FILTERED, "gpu-1")
    page.js(_FILTERED, "gpu-77")
    page.until_true("document.querySelectorAll('.node').length === 10")
    page.js(_FILTERED, "7990")
    page.until_true("document.querySelectorAll('.node').length === 1")
    assert "ranks 7984–7991" in page.text("nodes")
    page.js(_FILTERED, "")
    page.until_true("document.querySelectorAll('.tile').length === 1000")
    page.js("document.querySelector('.tile').focus()")
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_UP, Keys.ENTER)
    page.until_true("document.querySelectorAll('.node').length === 1")
    assert "gpu-001" in page.js("return document.querySelector('.node').innerText")
    assert page.js("return document.activeElement.title") == "gpu-001, working"
    stage.fail(8 * 500 + 1)
    page.until_text("fact-generation", "2")
    page.until_true("document.querySelectorAll('.is-working.tile').length === 1000")
    page.until_text("failure", "gpu-500")
    elements = page.js("return document.querySelectorAll('*').length")
    heap_mb = page.js("gc(); return performance.memory.usedJSHeapSize") / 1e6
    grown_mb = (rss_kb() - before_kb) / 1024
    print(
        f"1,000 x 8: first paint {paint:.0f} ms, all shown {shown_ms:.0f} ms, filter {filtered_ms:.0f} ms, "
        f"{elements} elements, heap {heap_mb:.1f} MB, RSS of coordinator, desk and page +{grown_mb:.0f} MB, "
        f"a status takes {1000 * stage.desk.cpu_s / stage.desk.statuses:.1f} ms"
    )
    assert elements < 4000
    assert heap_mb < 64
    assert grown_mb < 200


_FILTERED = """
const began = performance.now();
const box = document.getElementById("filter");
box.value = arguments[0];
box.dispatchEvent(new Event("input"));
return new Promise(done => requestAnimationFrame(() => setTimeout(() => done(performance.now() - began))));
"""


def rss_kb() -> int:
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmRSS"))


# When each event, and each generation, is in the document.
_WATCH = """
window.seen = {events: [], generations: []};
new MutationObserver(records => {
  for (const record of records) for (const node of record.addedNodes)
    window.seen.events.push([Number(node.dataset.at), Date.now() / 1000, node.lastElementChild.textContent]);
}).observe(document.getElementById("events"), {childList: true});
window.gap = 0;
let last = performance.now();
setInterval(() => {
  const now = performance.now();
  window.gap = Math.max(window.gap, now - last - 20);
  last = now;
}, 20);
new MutationObserver(records => {
  for (const record of records) for (const node of record.addedNodes)
    window.seen.generations.push([Number(node.dataset.number), Date.now() / 1000]);
}).observe(document.getElementById("generations"), {childList: true});
"""


def test_a_storm_of_restarts_is_shown_within_a_second_and_costs_little(
    set_up: Callable[..., Stage], page: Page
) -> None:
    """8 nodes with 8 workers, a failure every 0.25 s: every update is seen within 1 s, for less than 5 % of a core.

    On a machine that keeps everybody waiting, the page and the loop can wait for their turn too: how long the longest
    such wait was is measured beside, and comes on top.
    """
    import time

    stage = set_up(8, 8, max_restarts=1000)
    page.open(stage.link)
    page.js(_WATCH)
    thread = stage.dashboard._server.thread
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    cpu_before, status_before, began = time.clock_gettime(clock), stage.desk.cpu_s, time.monotonic()
    waited_s = stage.storm(20, 0.25).result(60)
    status = stage.status
    page.until_text("fact-generation", str(status.generation))
    wall_s = time.monotonic() - began
    serving_s, making_s = time.clock_gettime(clock) - cpu_before, stage.desk.cpu_s - status_before
    seen: Any = page.js("return window.seen")
    waited_s += page.js("return window.gap") / 1000
    formed = {entry.number: entry.formed_at for entry in status.generations if entry.number > 1}
    shown: dict[int, float] = {}
    for number, at in seen["generations"]:
        shown.setdefault(number, at)
    late_generations = {number: shown[number] - at for number, at in formed.items()}
    late_events = [at - happened for happened, at, _ in seen["events"]]
    share = (serving_s + making_s) / wall_s
    print(
        f"storm 8 x 8: {len(formed)} generations, {len(late_events)} events in {wall_s:.1f} s; shown after at most "
        f"{max(late_events):.2f} s (events), {max(late_generations.values()):.2f} s (generations); "
        f"{100 * share:.1f} % of a core ({1000 * making_s:.0f} ms statuses, {1000 * serving_s:.0f} ms serving); "
        f"the machine kept others waiting for up to {waited_s:.2f} s"
    )
    assert len(formed) >= 20
    told = {event.text for event in status.events}
    assert told <= {text for _, _, text in seen["events"]}
    assert max(late_events) < 1.0 + waited_s
    assert max(late_generations.values()) < 1.0 + waited_s
    assert share < 0.05
    assert page.complaints() == []
