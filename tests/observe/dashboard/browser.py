"""A real headless browser, controlled by the test. One per test process: it takes a second to start."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from kit.processes import until

_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    "--disable-sync --no-first-run --disable-default-apps --disable-extensions --disable-dev-shm-usage --mute-audio "
    "--no-default-browser-check --enable-precise-memory-info --js-flags=--expose-gc"
)

_POLL_S = 0.02  # each look is a request to the driver and a script in the browser


def start_browser(folder: str) -> Any:
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        reason = "the dashboard is tested in Chromium: install the packages chromium and chromium-driver"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in _FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={folder}")
    options.add_argument("--window-size=1280,1000")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as folder:
        driver = start_browser(folder)
        yield driver
        driver.quit()


# The visible text of an element, scrolled into view or not: innerText omits what the browser has not laid out yet.
_READ = """
const root = document.getElementById(arguments[0]);
let text = "";
const read = element => {
  if (element.hidden) return;
  const style = getComputedStyle(element).display;
  const isInline = style.startsWith("inline");
  if (!isInline && text) text += "\\n";
  for (const child of element.childNodes) {
    if (child.nodeType === 3) text += child.data.replace(/\\s+/g, " ");
    else if (child.nodeType === 1 && (element.tagName !== "DETAILS" || element.open || child.tagName === "SUMMARY"))
      read(child);
  }
  text += isInline ? " " : "\\n";
};
if (root) read(root);
return text.split("\\n").map(line => line.replace(/ +/g, " ").replace(/ ,/g, ",").trim()).filter(Boolean).join("\\n");
"""


class Page:
    """Reads and operates a page as a person does."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, link: str) -> None:
        self.driver.get(link)
        self.until_text("connection", "live")

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self, element_id: str) -> str:
        return str(self.js(_READ, element_id))

    def until_text(self, element_id: str, part: str) -> str:
        return until(
            lambda: text if part in (text := self.text(element_id)) else "",
            f"{part!r} in #{element_id}, which contains {self.text(element_id)!r}",
            every_s=_POLL_S,
        )

    def until_true(self, script: str, *arguments: Any) -> Any:
        return until(lambda: self.js(f"return {script}", *arguments), script, every_s=_POLL_S)

    def click(self, selector: str) -> None:
        """Click with the mouse, as soon as the element can be clicked: redrawing may move it."""
        from selenium.common.exceptions import WebDriverException
        from selenium.webdriver.common.by import By

        def has_clicked() -> bool:
            try:
                element = self.driver.find_element(By.CSS_SELECTOR, selector)
                self.js("arguments[0].scrollIntoView({block: 'center'})", element)
                element.click()
            except WebDriverException:
                return False
            return True

        until(has_clicked, f"{selector} to be clicked", every_s=_POLL_S)

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        actions = ActionChains(self.driver)
        for key in keys:
            actions.send_keys(key)
        actions.perform()

    def resize(self, width: int, height: int = 1000) -> None:
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )

    def prefer(self, **features: str) -> None:
        """Set media features: ``prefer(color_scheme="dark")``."""
        values = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": values})

    def browser_errors(self) -> list[str]:
        """Return errors and warnings of the browser: scripts, content policy, missing files."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


@pytest.fixture
def page(chromium: Any) -> Iterator[Page]:
    page = Page(chromium)
    page.browser_errors()  # discard those of the previous test
    yield page
    page.prefer()
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.get("about:blank")
