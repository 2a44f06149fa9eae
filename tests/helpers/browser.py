"""Chromium without a window, and every address that it asks for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

NO_BROWSER = "no chromium and chromedriver on PATH"


def has_browser() -> bool:
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


class Browser:
    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def __getitem__(self, css: str) -> Any:
        """The first element that a selector finds."""
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def all(self, css: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def texts(self, css: str) -> list[str]:
        return [element.text for element in self.all(css)]

    def wait(self, css: str, *texts: str, seconds: float = 120) -> str:
        """Until an element's text is one of these; which one."""
        WebDriverWait(self.driver, seconds, 0.1).until(lambda _: self[css].text in texts)
        found: str = self[css].text
        return found

    def write(self, css: str, text: str) -> None:
        """Types a text in the place of another."""
        self[css].clear()
        self[css].send_keys(text)

    def run(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def emulate(self, **media: str) -> None:
        """CSS media features; ``_`` in a name is a hyphen."""
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def resize(self, width: int, height: int) -> None:
        """Narrower than a window can be, too."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def addresses(self) -> list[str]:
        """What was asked for since the last call."""
        messages = [
            json.loads(line["message"])["message"] for line in self.driver.get_log("performance")
        ]
        sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def complaints(self) -> list[str]:
        """Of the browser, about the page's code, since the last call."""
        return [line["message"] for line in self.driver.get_log("browser")]


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser that is closed at the end."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
