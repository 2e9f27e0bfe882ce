"""Look at the built documentation in Chromium: `python .ci/site.py docs/_build`.

Exits with 1 if a link within it leads nowhere, if code is cut off or a page is wider than its window at a width of `WIDTHS`, or
if a text, also of a figure, has a contrast below 4.5 in the light or the dark scheme.
"""

from __future__ import annotations

import html.parser
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

WIDTHS = (390, 1000, 1100, 1200, 1300, 1400, 1600)

CUT = """
const found = [];
const page = document.documentElement;
if (page.scrollWidth > page.clientWidth + 1) found.push("the page is " + page.scrollWidth + " pixels wide");
for (const code of document.querySelectorAll(".bd-article pre"))
  if (code.offsetParent && code.scrollWidth > code.clientWidth + 1)
    found.push(code.scrollWidth + " of " + code.clientWidth + " pixels: " + code.innerText.slice(0, 40));
for (const code of document.querySelectorAll(".bd-article :not(pre) > code")) {
  const end = code.getBoundingClientRect().right;
  if (code.offsetParent && !code.closest("table") && end > page.clientWidth)
    found.push("a name ends at " + end + " pixels: " + code.innerText.slice(0, 40));
}
return found;
"""

CONTRAST = """
const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
function rgba(color) {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
}
function over(top, ground) { const a = top[3] / 255; return [0, 1, 2].map(i => a * top[i] + (1 - a) * ground[i]).concat(255); }
function ground(element) {
  const layers = [];
  for (let e = element; e; e = e.parentElement) layers.push(rgba(getComputedStyle(e).backgroundColor));
  return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255, 255]);
}
function luminance(color) {
  const [r, g, b] = color.map(c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
const found = {};
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node; node = texts.nextNode();) {
  const e = node.parentElement, box = e.getBoundingClientRect();
  if (!node.data.trim() || !box.width || !box.height) continue;
  if (!e.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
  const style = getComputedStyle(e), below = ground(e);
  const paint = e instanceof SVGElement ? style.fill : style.color;
  const [a, b] = [luminance(over(rgba(paint), below)), luminance(below)].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < 4.5) found[paint + " on " + below.slice(0, 3)] = ratio.toFixed(2) + ": " + node.data.trim().slice(0, 40);
}
return Object.entries(found).map(([colors, text]) => colors + ", " + text);
"""

FIGURES = """
const done = arguments[0];
document.querySelectorAll(".figure-in-page").forEach(host => host.remove());
Promise.all([...document.querySelectorAll(".bd-article img[src$='.svg']")].map(async image => {
  const host = document.createElement("div");
  host.className = "figure-in-page";
  host.style.backgroundColor = getComputedStyle(image).backgroundColor;
  host.innerHTML = await (await fetch(image.src)).text();
  image.after(host);
})).then(() => done(), error => done(String(error)));
"""
"""Puts figures into the page on their grounds, where their texts can be asked."""

AT_ONCE = """
const style = document.createElement("style");
style.textContent = "* { transition: none !important }";
document.head.append(style);
"""


class Links(html.parser.HTMLParser):
    """Where a page leads, and what it can be entered at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep ids, and addresses of links and pictures."""
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif (tag, name) in (("a", "href"), ("img", "src"), ("link", "href"), ("script", "src")):
                self.targets.append(value or "")


def broken_links(site: Path) -> list[str]:
    """Links between pages that lead nowhere."""
    pages = {path.resolve(): Links(path.read_text()) for path in site.rglob("*.html") if "_static" not in path.parts}
    broken = []
    for path, page in pages.items():
        for target in page.targets:
            address = urlsplit(target)
            if address.scheme or address.netloc or "searchindex" in target:
                continue
            aim = (path.parent / unquote(address.path)).resolve() if address.path else path
            missing = not aim.exists() or (
                address.fragment and aim in pages and unquote(address.fragment) not in pages[aim].anchors
            )
            if missing:
                broken.append(f"{path.relative_to(site.resolve())}: {target} leads nowhere")
    return broken


def browser() -> Any:
    """Chromium, which may read files of the site."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars", "--allow-file-access-from-files"):
        options.add_argument(argument)
    options.binary_location = shutil.which("chromium") or ""
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def resize(chromium: Any, width: int, height: int = 900) -> None:
    """Give the window a size; a narrow one is a phone's."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def seen(site: Path) -> list[str]:
    """What is cut off, or hard to read."""
    chromium, found = browser(), []
    for path in sorted(site.rglob("*.html")):
        name = str(path.relative_to(site))
        if name.startswith(("_modules", "genindex", "search", "_static")):
            continue
        chromium.get(path.resolve().as_uri())
        chromium.execute_script(AT_ONCE)
        for width in WIDTHS:
            resize(chromium, width)
            found += [f"{name} at {width} pixels: {line}" for line in chromium.execute_script(CUT)]
        for scheme in ("light", "dark"):
            media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            chromium.execute_script("document.documentElement.dataset.theme = arguments[0]", scheme)
            failure = chromium.execute_async_script(FIGURES)
            found += [
                f"{name}, {scheme}: {line}" for line in [*chromium.execute_script(CONTRAST), *([failure] if failure else [])]
            ]
    chromium.quit()
    return found


def main() -> int:
    """Print what is wrong with the site."""
    site = Path(sys.argv[1])
    found = broken_links(site)
    if shutil.which("chromium") and shutil.which("chromedriver"):
        found += seen(site)
    else:
        print("no Chromium: only links are checked")
    print(*found or ["the site has no broken link, nothing is cut off, and every text is legible"], sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
