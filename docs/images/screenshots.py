"""Take the pictures of the report: `python docs/images/screenshots.py`. Needs Chromium and selenium."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from selenium import webdriver

import checkmate
from checkmate.report import html_report

HERE = Path(__file__).parent
GRAPH = HERE.parent.parent / "benchmarks" / "graphs" / "bert.graph.json"
WIDTH, HEIGHT = 1100, 1500


def main() -> None:
    graph = checkmate.read(GRAPH)
    assert isinstance(graph, checkmate.Graph)
    result = checkmate.solve(checkmate.Problem(graph, "50%"))
    assert result.plan is not None
    page = html_report(graph, result.plan, result=result, title="BERT at half its memory")
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium") or ""
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        path.write_text(page)
        for theme in ("light", "dark"):
            scheme = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
            size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(path.as_uri())
            browser.save_screenshot(str(HERE / f"report-{theme}.png"))
    browser.quit()


if __name__ == "__main__":
    main()
