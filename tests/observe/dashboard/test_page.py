"""The dashboard in a real browser: content, actions and accessibility."""

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
from .fake_cluster import TRACEBACK, FakeCluster
from .tunnel import Tunnel

# The lowest contrast of any visible text with its background, and its element.
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
  if (!own || !element.checkVisibility() || element.matches(":disabled, .visually-hidden, .skip, noscript *")) continue;
  const [one, other] = [lum(rgb(getComputedStyle(element).color)), lum(behind(element))];
  const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  if (ratio < worst[0]) worst = [ratio, element.outerHTML.slice(0, 120)];
}
return worst;
"""


def fail_and_restart(cluster: FakeCluster) -> None:
    cluster.progress(4)
    cluster.fail(1, 2, 3)
    until(lambda: cluster.status.generation == 2 and cluster.status.generations[-1].running_at, "the next generation")


def test_the_page_shows_the_run(start_cluster: Callable[..., FakeCluster], page: Page) -> None:
    """Nodes, workers, generations and restarts, without errors of the browser."""
    cluster = start_cluster(2, 4)
    page.open(cluster.link)
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
    assert "started its 4 workers" in page.text("events")
    assert "running · train-large" in page.driver.title
    assert page.browser_errors() == []


def test_a_failure_is_shown_with_its_cause_and_its_consequences(
    start_cluster: Callable[..., FakeCluster], page: Page
) -> None:
    """Text of workers is never interpreted as markup."""
    cluster = start_cluster(2, 2, max_restarts=0)
    page.open(cluster.link)
    cluster.fail(1, 2, 3)
    failure = page.until_text("failure", "RuntimeError")
    assert "exception" in failure
    assert "raised RuntimeError: <b>boom</b>" in failure
    assert "rank 1 (local rank 1) on gpu-000" in failure
    assert "2 workers failed as a consequence" in failure
    page.click("#failure details[data-of^=traceback] summary")
    assert page.js("return document.querySelector('#failure pre').textContent") == TRACEBACK
    assert page.js("return document.querySelectorAll('#failure b').length") == 0
    page.click("#failure details[data-of=consequences] summary")
    assert "peer lost" in page.text("failure")
    page.until_text("phase", "failed")
    assert page.js("return document.getElementById('restart').disabled && document.getElementById('stop').disabled")
    assert page.js("return ['#restart', '#stop', '.drain'].every(each => document.querySelector(each).hidden)")
    page.until_text("announcer", "The run failed.")


def test_the_last_failure_is_shown_after_a_restart(start_cluster: Callable[..., FakeCluster], page: Page) -> None:
    cluster = start_cluster()
    page.open(cluster.link)
    fail_and_restart(cluster)
    page.until_text("failure-title", "Last failure (generation 1, restarted)")
    page.until_text("fact-generation", "2")
    assert page.text("fact-restarts") == "1 used, 2 left of 3"
    rows = page.text("generations")
    assert "a worker failed" in rows
    assert "Ended: rank 1 on gpu-000 failed" in rows
    assert "Began: restart 1 of 3" in rows
    assert "steps 0–4" in rows
    assert page.text("lost-steps") == "0"
    assert page.text("survivors") == str(len(cluster.parts))
    assert page.text("to-recover") != "–"
    assert "training" in page.text("ledger")


def test_a_hang_is_shown_while_it_lasts(start_cluster: Callable[..., FakeCluster], page: Page) -> None:
    cluster = start_cluster()
    page.open(cluster.link)

    def suspect(hang: Suspicion | None) -> None:
        cluster.coordinator.state.phase.watch.suspicion = hang
        for on_step in list(cluster.coordinator.watchers):
            on_step()

    cluster.do(lambda: suspect(Suspicion(1, cluster.loop.now() - 600, "nothing moves", set())))
    page.until_text("phase", "⚠ seems to hang")
    doing = page.until_text("doing", "generation 1 seems to hang: no activity for 10 min")
    assert doing.endswith("; requesting the stacks of its workers")
    page.until_text("announcer", "seems to hang")
    # Neither nodes, workers nor the generation are shown as working; the state can be filtered.
    assert "⚠ 2 hanging" in page.text("states")
    assert "⚠ hanging for 10 min " in page.text("nodes")
    assert "⚠ seems to hang" in page.text("generations")
    assert page.js("return document.querySelectorAll('.worker.is-hanging').length") == 4
    assert not page.js("return document.querySelector('.is-working, .is-running')")
    made = cluster.operators.statuses
    until(lambda: page.text("doing") != doing, "the time to change")
    assert cluster.operators.statuses == made
    cluster.do(lambda: suspect(None))
    page.until_text("phase", "● running")
    assert page.text("doing") == "generation 1 is running, 4 workers on 2 nodes"
    assert "● 2 working" in page.text("states")
    assert "hanging" not in page.text("nodes")
    assert "● training" in page.text("generations")


def test_the_page_updates_times_itself(start_cluster: Callable[..., FakeCluster], page: Page) -> None:
    """Nothing is sent for that."""
    cluster = start_cluster()
    page.open(cluster.link)
    before, made = page.text("ledger"), cluster.operators.statuses
    until(lambda: page.text("ledger") != before, "the time to change")
    assert cluster.operators.statuses == made


def test_a_log_is_followed(start_cluster: Callable[..., FakeCluster], page: Page) -> None:
    """As text without control codes; new lines appear when they are printed."""
    cluster = start_cluster()
    page.open(cluster.link)
    page.click(".node:nth-child(2) .worker:nth-child(1)")
    assert page.text("log-title") == "Log of rank 2, on gpu-001"
    page.until_text("log-lines", "<script>alert(1)</script>")
    assert "red" in page.text("log-lines")
    assert "\x1b" not in page.js("return document.getElementById('log-lines').textContent")
    until(lambda: cluster.held, "the request to wait for more lines")
    cluster.print("loss 0.25\r loss 0.125")
    page.until_text("log-lines", "loss 0.125")
    assert "loss 0.25" not in page.text("log-lines")
    page.press(Keys.ESCAPE)
    page.until_true("document.getElementById('log').hidden")
    assert page.js("return document.activeElement.className").startswith("worker")


def test_a_drain_needs_confirmation(start_cluster: Callable[..., FakeCluster], page: Page) -> None:
    """After Cancel nothing happens. After confirmation the node leaves, and the answer is shown."""
    cluster = start_cluster(3, 2, min_nodes=1)
    page.open(cluster.link)
    page.click(".node:nth-child(2) .drain")
    assert page.text("ask-title") == "Drain gpu-001?"
    assert "The other 2 nodes continue in a new generation" in page.text("ask-text")
    page.click("#ask-no")
    page.until_true("!document.getElementById('ask').open")
    assert cluster.status.drains == 0
    assert page.js("return document.activeElement.className") == "drain"
    page.click(".node:nth-child(2) .drain")
    page.click("#ask-yes")
    assert page.until_text("ask-answer", "Done") == "Done: draining gpu-001."
    page.press(Keys.ENTER)  # Close has the focus
    page.until_true("!document.getElementById('ask').open")
    page.until_true("document.querySelectorAll('.node').length === 2")
    page.until_text("fact-generation", "2")
    assert "1 drain" in page.text("fact-membership")


def test_the_confirmation_warns_if_too_few_nodes_remain(start_cluster: Callable[..., FakeCluster], page: Page) -> None:
    cluster = start_cluster(2, 2)
    page.open(cluster.link)
    page.click(".drain")
    assert "That leaves 1 node, but the run needs 2: it waits for another" in page.text("ask-text")
    page.press(Keys.ESCAPE)
    page.until_true("!document.getElementById('ask').open")
    assert cluster.status.drains == 0


def test_restart_and_stop_work_with_the_keyboard_alone(start_cluster: Callable[..., FakeCluster], page: Page) -> None:
    """The focus is always visible; dialogs need no mouse; the end of the run is shown."""
    cluster = start_cluster()
    page.open(cluster.link)
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
    page.until_text("ask-answer", "Done: stopping generation 1; the next one follows.")
    page.press(Keys.ENTER)
    page.until_text("fact-generation", "2")
    assert page.text("fact-restarts").startswith("0 used")
    assert page.js("return document.activeElement.id") == "restart"
    page.js("document.getElementById('stop').focus()")
    page.press(Keys.SPACE)
    page.press(Keys.TAB, Keys.SPACE)
    page.until_text("ask-answer", "Done: stopping the run on every node.")
    page.until_text("phase", "cancelled")
    page.press(Keys.ESCAPE)
    cluster.do(cluster.dashboard.close)
    page.until_text("connection", "run ended")
    assert "The run was cancelled." in page.text("notice")
    assert page.js("return document.getElementById('reconnect').hidden"), "the run has ended"


def test_a_rejected_action_is_shown(start_cluster: Callable[..., FakeCluster], page: Page) -> None:
    """The node was lost while the dialog was open."""
    cluster = start_cluster(3, 1, min_nodes=1)
    page.open(cluster.link)
    page.click(".node:nth-child(3) .drain")
    cluster.lose(2)
    until(lambda: len(cluster.status.nodes) == 2, "the loss")
    page.click("#ask-yes")
    assert "Rejected: no node 'id-2'" in page.until_text("ask-answer", "Rejected")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable_in_both_colour_schemes_on_a_phone(
    scheme: str, start_cluster: Callable[..., FakeCluster], page: Page, tmp_path: Path
) -> None:
    """360 pixels wide without horizontal scrolling; a contrast of at least 4.5, also in dialog and log."""
    cluster = start_cluster(3, 8, min_nodes=1)
    cluster.progress(4)
    page.prefer(color_scheme=scheme, reduced_motion="reduce")
    page.resize(360, 740)
    page.open(cluster.link)
    for number in (2, 3):
        cluster.fail(1, 2, 3)
        page.until_text("fact-generation", str(number))
        until(lambda: cluster.status.generations[-1].running_at, "the next generation")
    page.click("#earlier summary")
    background = page.js("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(19, 21, 25)") == (scheme == "dark")
    for name, selector in (("page", ""), ("log", ".worker"), ("dialog", "#restart")):
        if selector:
            page.js("document.querySelector(arguments[0]).click()", selector)
        page.driver.save_screenshot(str(tmp_path / f"{name}-{scheme}.png"))
        assert page.js("return document.documentElement.scrollWidth <= innerWidth"), name
        ratio, where = page.js(_CONTRAST)
        assert ratio >= 4.5, where


def test_animations_follow_the_reduced_motion_preference(start_cluster: Callable[..., FakeCluster], page: Page) -> None:
    cluster = start_cluster()
    for preference, name in (("no-preference", "fresh"), ("reduce", "none")):
        page.prefer(reduced_motion=preference)
        page.open(cluster.link)
        page.until_true("document.querySelector('#events li')")  # those of the first status are not animated
        cluster.progress(3)
        cluster.fail(0)
        page.until_true("document.querySelector('#events .fresh')")
        shown = page.js("return getComputedStyle(document.querySelector('#events .fresh')).animationName")
        assert shown == name


def test_a_lost_connection_is_shown_and_restored(start_cluster: Callable[..., FakeCluster], page: Page) -> None:
    """The page keeps its state; the buttons are disabled meanwhile."""
    cluster = start_cluster()
    page.open(cluster.link)
    cluster.do(cluster.dashboard.close)
    page.until_text("connection", "connection lost, retrying")
    assert "closed it" in page.text("notice")
    assert page.text("fact-workers") == "4"
    assert page.js("return document.getElementById('stop').disabled && document.querySelector('.drain').disabled")
    address = f"{cluster.host}:{cluster.port}"
    cluster.dashboard = cluster.do(
        lambda: type(cluster.dashboard)(address, cluster.operators, cluster.loop, cluster.errors.append)
    )
    cluster.dashboard._key = cluster.key  # the same key, for the open page
    cluster.fail(0)
    page.until_text("connection", "live")
    page.until_text("fact-generation", "2")
    assert page.js("return document.getElementById('notice').hidden")


def test_the_page_gives_up_after_a_minute(start_cluster: Callable[..., FakeCluster], page: Page) -> None:
    """By the browser's clock; a button reconnects."""
    cluster = start_cluster()
    page.open(cluster.link)
    cluster.do(cluster.dashboard.close)
    page.until_text("connection", "connection lost, retrying")
    page.js("const now = Date.now; Date.now = () => now() + 61000")
    page.until_text("connection", "not connected")
    assert "it exited, or the network is down" in page.until_text("notice", "Could not reach")
    address = f"{cluster.host}:{cluster.port}"
    cluster.dashboard = cluster.do(
        lambda: type(cluster.dashboard)(address, cluster.operators, cluster.loop, cluster.errors.append)
    )
    page.click("#reconnect")
    page.until_text("notice", "The server rejected this page: the key is missing or wrong")  # it has another key
    cluster.dashboard._key = cluster.key
    page.click("#reconnect")
    page.until_text("connection", "live")


def test_a_log_continues_after_a_network_failure(start_cluster: Callable[..., FakeCluster], page: Page) -> None:
    """A tunnel was down for a while; the run and its dashboard are not affected."""
    cluster = start_cluster()
    tunnel = Tunnel(own_address(), (cluster.host, cluster.port))
    try:
        page.open(f"http://{tunnel.host}:{tunnel.port}/?key={cluster.key}")
        page.click(".worker")
        page.until_text("log-lines", "epoch 1")
        until(lambda: cluster.held, "the request for more lines")
        tunnel.close()
        page.until_text("connection", "connection lost, retrying")
        page.until_text("log-state", "could not reach the agent that serves this page")
        cluster.held.clear()  # the answer would go through the closed tunnel
        cluster.print("printed meanwhile")
        tunnel.open()
        page.until_text("connection", "live")
        page.until_text("log-lines", "printed meanwhile")
        page.until_text("log-state", "Following.")
    finally:
        tunnel.close()


def test_a_wrong_key_is_reported(start_cluster: Callable[..., FakeCluster], page: Page) -> None:
    """As plain text instead of the page."""
    cluster = start_cluster()
    page.driver.get(cluster.origin)
    assert "open the link that tenax printed" in page.js("return document.body.innerText")
    page.open(cluster.link)
    cluster.dashboard._key = "another"
    page.js("history.replaceState(null, '', '/?key=wrong')")
    page.driver.refresh()
    assert "open the link that tenax printed" in page.js("return document.body.innerText")


def test_one_thousand_nodes_are_usable(start_cluster: Callable[..., FakeCluster], page: Page) -> None:
    """1,000 nodes with 8 workers each: tiles by state, a filter, a card for an opened node."""
    before_kb = rss_kb()
    cluster = start_cluster(1000, 8)
    cluster.progress(100)
    page.open(cluster.link)
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
    cluster.fail(8 * 500 + 1)
    page.until_text("fact-generation", "2")
    page.until_true("document.querySelectorAll('.is-working.tile').length === 1000")
    page.until_text("failure", "gpu-500")
    elements = page.js("return document.querySelectorAll('*').length")
    heap_mb = page.js("gc(); return performance.memory.usedJSHeapSize") / 1e6
    grown_mb = (rss_kb() - before_kb) / 1024
    print(
        f"1,000 x 8: first paint {paint:.0f} ms, all shown {shown_ms:.0f} ms, filter {filtered_ms:.0f} ms, "
        f"{elements} elements, heap {heap_mb:.1f} MB, RSS of coordinator and dashboard +{grown_mb:.0f} MB, "
        f"a status takes {1000 * cluster.operators.cpu_s / cluster.operators.statuses:.1f} ms"
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


# Records when each event and each generation appears in the document.
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


def test_frequent_restarts_are_shown_within_a_second_and_cost_little(
    start_cluster: Callable[..., FakeCluster], page: Page
) -> None:
    """8 nodes with 8 workers, a failure every 0.25 s: every update is shown within 1 s, for less than 5 % of a core.

    On a busy machine the page and the loop are delayed too: the longest delays are measured and added to the limit.
    """
    import time

    cluster = start_cluster(8, 8, max_restarts=1000)
    page.open(cluster.link)
    page.js(_WATCH)
    thread = cluster.dashboard._server._thread
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    cpu_before, status_before, began = time.clock_gettime(clock), cluster.operators.cpu_s, time.monotonic()
    waited_s = cluster.fail_repeatedly(20, 0.25).result(60)
    status = cluster.status
    page.until_text("fact-generation", str(status.generation))
    wall_s = time.monotonic() - began
    serving_s, making_s = time.clock_gettime(clock) - cpu_before, cluster.operators.cpu_s - status_before
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
        f"restarts 8 x 8: {len(formed)} generations, {len(late_events)} events in {wall_s:.1f} s; shown after at most "
        f"{max(late_events):.2f} s (events), {max(late_generations.values()):.2f} s (generations); "
        f"{100 * share:.1f} % of a core ({1000 * making_s:.0f} ms statuses, {1000 * serving_s:.0f} ms serving); "
        f"delays of the machine: up to {waited_s:.2f} s"
    )
    assert len(formed) >= 20
    texts = {event.text for event in status.events}
    assert texts <= {text for _, _, text in seen["events"]}
    assert max(late_events) < 1.0 + waited_s
    assert max(late_generations.values()) < 1.0 + waited_s
    assert share < 0.05
    assert page.browser_errors() == []
