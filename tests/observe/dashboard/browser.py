"""A real browser, headless, driven by the test. One for a module: it takes a second to start."""

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


def start_browser(folder: str) -> Any:
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        sentence = "the page is tested in Chromium: install the packages chromium and chromium-driver"
        if os.environ.get("CI") == "true":
            pytest.fail(sentence)
        pytest.skip(sentence)
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


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as folder:
        driver = start_browser(folder)
        yield driver
        driver.quit()


# What a person can read there, scrolled into view or not: innerText leaves out what the browser has not laid out yet.
_READ = """
const place = document.getElementById(arguments[0]);
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
if (place) read(place);
return text.split("\\n").map(line => line.replace(/ +/g, " ").replace(/ ,/g, ",").trim()).filter(Boolean).join("\\n");
"""


class Page:
    """What a person sees and does."""

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
            f"{part!r} in #{element_id}, where there is {self.text(element_id)!r}",
        )

    def until_true(self, script: str, *arguments: Any) -> Any:
        return until(lambda: self.js(f"return {script}", *arguments), script)

    def click(self, selector: str) -> None:
        """With the mouse, as soon as it can be reached: what is drawn meanwhile may move it."""
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

        until(has_clicked, f"{selector} to be clicked at")

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
        """As a media query: ``prefer(color_scheme="dark")``."""
        asked = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": asked})

    def complaints(self) -> list[str]:
        """What the browser has to say about the page: errors of scripts, of the policy, of what was not found."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


@pytest.fixture
def page(chromium: Any) -> Iterator[Page]:
    made = Page(chromium)
    made.complaints()  # of the test before
    yield made
    made.prefer()
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.get("about:blank")
