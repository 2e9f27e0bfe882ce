"""A headless Chromium, one for all tests of a run; without one they are skipped, which says what to install."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def start(width: int = 1200, height: int = 900) -> Any:
    """A browser that logs what its console says."""
    selenium = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install selenium")
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("needs a headless Chromium: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.add_argument(f"--window-size={width},{height}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return selenium.Chrome(options=options, service=selenium.ChromeService(driver))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    browser = start()
    yield browser
    browser.quit()


class Page:
    """An open page: what it says when it is asked."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.browser = browser
        browser.get_log("browser")
        browser.get(path.as_uri())

    def ask(self, script: str, *arguments: object) -> Any:
        return self.browser.execute_script(f"return {script}", *arguments)

    def text(self, selector: str) -> str:
        return self.ask("document.querySelector(arguments[0]).innerText", selector)

    @property
    def console(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser")]


@pytest.fixture
def open_page(chromium, tmp_path) -> Any:
    """Open a page that is given as text."""

    def open_page(text: str) -> Page:
        path = tmp_path / "report.html"
        path.write_text(text)
        return Page(chromium, path)

    return open_page
