"""A real browser, Chromium without a window, for tests that look at pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)


@contextmanager
def open_browser(profile: Path) -> Iterator[Any]:
    """Open the browser with a profile of its own; skips the test where there is none."""
    binaries = [shutil.which("chromium"), shutil.which("chromedriver")]
    if None in binaries:
        pytest.skip("needs Chromium: chromium and chromedriver are not both on the path")
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        pytest.skip("needs Chromium: selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = str(binaries[0])
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(str(binaries[1])))
    try:
        yield browser
    finally:
        browser.quit()


def set_width(browser: Any, width: int) -> None:
    """Set the page's own width, which a window's smallest size does not bound."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    assert browser.execute_script("return window.innerWidth") == width
