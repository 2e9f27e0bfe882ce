"""Take the pictures of the report, and the card of links to the site: `python docs/images/screenshots.py`.

Needs Chromium and selenium.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from selenium import webdriver

import checkmate
from checkmate.report import html_report

HERE = Path(__file__).parent
GRAPH = HERE.parent.parent / "benchmarks" / "graphs" / "bert.graph.json"
WIDTH, HEIGHT = 1100, 2000
CARD = """<body style="margin: 0; padding: 36px 60px; font: 26px sans-serif; color: #24292f; background: #fff">
<h1 style="margin: 0; font-size: 52px"><img src="{logo}" width="56" style="vertical-align: -8px"> Checkmate</h1>
<p style="margin: 14px 0">The cheapest plan found for a training step within a memory budget, with a proven gap.</p>
<img src="{figure}" width="1000">"""


def main() -> None:
    graph = checkmate.read(GRAPH)
    assert isinstance(graph, checkmate.Graph)
    result = checkmate.solve(checkmate.Problem(graph, "50%"))
    assert result.plan is not None
    page = html_report(
        graph, result.plan, result=result, title="BERT at half its memory"
    )
    options = webdriver.ChromeOptions()
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--hide-scrollbars",
        f"--window-size={WIDTH},{HEIGHT}",
    ):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium") or ""
    browser = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "card.html"
        logo = HERE.parent / "_static" / "logo.svg"
        path.write_text(
            CARD.format(logo=logo.as_uri(), figure=(HERE / "memory.svg").as_uri())
        )
        size = {"width": 1200, "height": 630, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(path.as_uri())
        browser.save_screenshot(str(logo.with_name("card.png")))
        path = Path(folder) / "report.html"
        path.write_text(page)
        for theme in ("light", "dark"):
            scheme = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
            size = {
                "width": WIDTH,
                "height": HEIGHT,
                "deviceScaleFactor": 1,
                "mobile": False,
            }
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(path.as_uri())
            browser.save_screenshot(str(HERE / f"report-{theme}.png"))
    browser.quit()


if __name__ == "__main__":
    main()
