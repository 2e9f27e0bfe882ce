"""Draw `docs/images/architecture.svg` from the imports of the code: `python docs/images/architecture.py`.

There is one panel for each contract of type `layers` in `pyproject.toml`: its layers are the rows, the packages and modules
in a layer are the boxes. The arrows are the imports that import-linter sees, read with grimp as import-linter does. An
arrow that follows from two others is left out (the transitive reduction), or no arrow could be followed by eye.

The layout is that of Sugiyama, Tagawa and Toda (1981): a long arrow gets a place in every row that it passes, rows are
sorted by the mean position of their neighbours, and positions are fitted to those of the neighbours by least squares with
the order kept. Nothing is random and ties are broken by the order of the contract, so that the same imports give the same
text; `tests/test_architecture.py` compares it with the committed file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path

import grimp

HERE = Path(__file__).parent
PROJECT = HERE.parent.parent / "pyproject.toml"
PACKAGE = "checkmate"

WIDTH, MARGIN = 960, 16
BOX_HEIGHT, ROW_GAP, COLUMN_GAP = 40, 34, 18
TITLE_HEIGHT, PANEL_GAP = 34, 40
BEND_WIDTH = 10  # of an arrow where it passes a row
SWEEPS = 24  # the order of the rows no longer changes after about ten
THEME = (
    "svg { color: #24292f; --box: #f3f6fa; --line: #57606a } "
    "@media (prefers-color-scheme: dark) { svg { color: #d0d7de; --box: #1c2530; --line: #9aa4af } } "
    "text { font-family: system-ui, sans-serif; fill: currentColor } "
    ".name { font-size: 13px; font-weight: 600 } .size { font-size: 10.5px; opacity: 0.75 } "
    ".title { font-size: 16px; font-weight: 600 } .words { font-size: 12px; opacity: 0.75 } "
    ".box { fill: var(--box); stroke: var(--line) } .arrow { fill: none; stroke: var(--line); stroke-width: 1.2 } "
    ".head { fill: var(--line) }"
)

Edge = tuple[str, str]


@dataclass(frozen=True)
class Panel:
    """The packages of one contract.

    Attributes:
        title: Heading.
        rows: Names of the boxes, from the uppermost layer down.
        sizes: Second line of each box.
        edges: Who imports whom, without what follows from other edges.
    """

    title: str
    rows: tuple[tuple[str, ...], ...]
    sizes: Mapping[str, str]
    edges: tuple[Edge, ...]


@dataclass
class Layout:
    """Where boxes and bends of one panel are: `rows` has their order, `x` their centres."""

    rows: list[list[str]]
    links: list[Edge]
    widths: dict[str, float]
    x: dict[str, float] = field(default_factory=dict[str, float])


def panels() -> list[Panel]:
    """A panel for each contract of type `layers`, in the order of `pyproject.toml`."""
    graph = grimp.build_graph(
        PACKAGE, exclude_type_checking_imports=True, cache_dir=None
    )
    contracts = tomllib.loads(PROJECT.read_text())["tool"]["importlinter"]["contracts"]
    found: list[Panel] = []
    for contract in contracts:
        if contract["type"] == "layers":
            found += [
                _panel(graph, container, contract["layers"])
                for container in contract.get("containers", [""])
            ]
    return found


def _panel(graph: grimp.ImportGraph, container: str, layers: Iterable[str]) -> Panel:
    """The panel of a contract's layers, whose names are relative to the container or, without one, whole."""
    root = container or PACKAGE
    names = [re.findall(r"[\w.]+", layer) for layer in layers]
    rows = tuple(tuple(name.removeprefix(f"{root}.") for name in row) for row in names)
    boxes = {name for row in rows for name in row}
    edges: set[Edge] = set()
    for module in sorted(graph.modules):
        source = _box(module, root, boxes)
        for imported in graph.find_modules_directly_imported_by(module):
            target = _box(imported, root, boxes)
            if source and target and source != target:
                edges.add((source, target))
    title = root if container else f"{root}: layers"
    return Panel(
        title,
        rows,
        {name: _size(graph, f"{root}.{name}") for name in boxes},
        _reduced(edges),
    )


def _box(module: str, root: str, boxes: set[str]) -> str | None:
    name = (
        module.removeprefix(f"{root}.").split(".")[0]
        if module.startswith(f"{root}.")
        else None
    )
    return name if name in boxes else None


def _size(graph: grimp.ImportGraph, module: str) -> str:
    """How many modules a package has, itself not counted."""
    inside = len(
        [
            name
            for name in graph.find_descendants(module)
            if not graph.find_children(name)
        ]
    )
    return f"{inside} module{'s' * (inside > 1)}" if inside else "module"


def _reduced(edges: set[Edge]) -> tuple[Edge, ...]:
    """The edges that no path of two or more other edges replaces."""
    below: dict[str, set[str]] = {}
    for source, target in edges:
        below.setdefault(source, set()).add(target)

    def reaches(source: str, target: str) -> bool:
        return target in below.get(source, ()) or any(
            reaches(middle, target) for middle in below.get(source, ())
        )

    return tuple(
        sorted(
            (s, t)
            for s, t in edges
            if not any(reaches(middle, t) for middle in below[s] if middle != t)
        )
    )


def _arranged(panel: Panel) -> Layout:
    """Order and positions of the boxes of a panel, and of the bends of its long arrows."""
    at = {name: row for row, names in enumerate(panel.rows) for name in names}
    rows = [list(names) for names in panel.rows]
    widths = {
        name: max(8.2 * len(_shown(name, size)) + 18, 6.2 * len(size) + 22)
        for name, size in panel.sizes.items()
    }
    links: list[Edge] = []
    for source, target in panel.edges:
        before = source
        for row in range(at[source] + 1, at[target]):
            bend = f"{source} {target} {row}"
            rows[row].append(bend)
            widths[bend] = BEND_WIDTH
            links.append((before, bend))
            before = bend
        links.append((before, target))
    layout = Layout(_ordered(rows, links), links, widths)
    _place(layout)
    return layout


def _ordered(rows: list[list[str]], links: list[Edge]) -> list[list[str]]:
    """The rows, sorted by the mean position of their neighbours, downwards and upwards in turn, until few arrows cross."""
    best, fewest = [list(row) for row in rows], _crossings(rows, links)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        neighbours: dict[str, list[str]] = {}
        for source, target in links:
            neighbours.setdefault(target if down else source, []).append(
                source if down else target
            )
        for row in range(1, len(rows)) if down else range(len(rows) - 2, -1, -1):
            other = rows[row - 1 if down else row + 1]
            place = {
                name: position / max(1, len(other) - 1)
                for position, name in enumerate(other)
            }
            now = {
                name: position / max(1, len(rows[row]) - 1)
                for position, name in enumerate(rows[row])
            }
            means = {
                name: _mean(
                    [place[other] for other in neighbours.get(name, ())] or [now[name]]
                )
                for name in rows[row]
            }
            rows[row].sort(key=means.__getitem__)
        crossings = _crossings(rows, links)
        if crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
    return best


def _crossings(rows: list[list[str]], links: list[Edge]) -> int:
    place = {
        name: (row, position)
        for row, names in enumerate(rows)
        for position, name in enumerate(names)
    }
    ends = sorted((place[s][0], place[s][1], place[t][1]) for s, t in links)
    return sum(
        a[0] == b[0] and a[1] < b[1] and a[2] > b[2]
        for i, a in enumerate(ends)
        for b in ends[i + 1 :]
    )


def _place(layout: Layout) -> None:
    """Centres of boxes and bends: close to those of their neighbours, and no two of a row closer than their widths allow."""
    neighbours: dict[str, list[str]] = {name: [] for row in layout.rows for name in row}
    for source, target in layout.links:
        neighbours[source].append(target)
        neighbours[target].append(source)
    for row in layout.rows:
        offsets = _offsets(layout, row)
        layout.x |= {
            name: offset - offsets[-1] / 2
            for name, offset in zip(row, offsets, strict=True)
        }
    for sweep in range(60):
        for row in layout.rows if sweep % 2 else reversed(layout.rows):
            wanted = [
                _mean([layout.x[n] for n in neighbours[name]] or [layout.x[name]])
                for name in row
            ]
            offsets = _offsets(layout, row)
            fitted = _ascending(
                [w - offset for w, offset in zip(wanted, offsets, strict=True)]
            )
            layout.x |= {
                name: base + offset
                for name, base, offset in zip(row, fitted, offsets, strict=True)
            }
    left = min(x - layout.widths[name] / 2 for name, x in layout.x.items())
    layout.x = {name: x - left for name, x in layout.x.items()}


def _offsets(layout: Layout, row: list[str]) -> list[float]:
    """Least distance of each centre of a row from the first one."""
    offsets = [0.0]
    for left, right in pairwise(row):
        offsets.append(
            offsets[-1] + (layout.widths[left] + layout.widths[right]) / 2 + COLUMN_GAP
        )
    return offsets


def _ascending(wanted: list[float]) -> list[float]:
    """The ascending sequence that is closest in least squares (pool adjacent violators)."""
    pools: list[list[float]] = []
    for value in wanted:
        pools.append([value])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [_mean(pool) for pool in pools for _ in pool]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _drawn(panel: Panel, layout: Layout, left: float, top: float) -> list[str]:
    """Elements of a panel whose upper left corner is at `left` and `top`."""
    y = {
        name: top + TITLE_HEIGHT + row * (BOX_HEIGHT + ROW_GAP)
        for row, names in enumerate(layout.rows)
        for name in names
    }
    layout = Layout(
        layout.rows,
        layout.links,
        layout.widths,
        {name: x + left for name, x in layout.x.items()},
    )
    out, into = _ports(layout, down=True), _ports(layout, down=False)
    parts = [
        f'<text class="title" x="{left:.1f}" y="{top + 16:.0f}">{escape(panel.title)}</text>'
    ]
    for source, target in layout.links:
        x0, y0 = out[source, target], y[source] + BOX_HEIGHT
        x1, y1 = into[source, target], y[target]
        if source not in panel.sizes:  # a bend: the arrow passes its row
            parts.append(
                f'<path class="arrow" d="M{x0:.1f} {y[source]:.0f}V{y0:.0f}"/>'
            )
        tip = y1 - 5 if target in panel.sizes else y1
        parts.append(
            f'<path class="arrow" d="M{x0:.1f} {y0:.0f}C{x0:.1f} {y0 + 17:.0f} {x1:.1f} {tip - 17:.0f} {x1:.1f} {tip:.0f}"/>'
        )
        if target in panel.sizes:
            parts.append(
                f'<path class="head" d="M{x1 - 3.5:.1f} {y1 - 7:.0f}h7l-3.5 7z"/>'
            )
    for row in layout.rows:
        for name in row:
            if name in panel.sizes:
                parts += _boxed(
                    name,
                    panel.sizes[name],
                    layout.x[name],
                    y[name],
                    layout.widths[name],
                )
    return parts


def _ports(layout: Layout, *, down: bool) -> dict[Edge, float]:
    """Where links leave a box, or enter it: spread over the middle of its edge in the order of their other ends."""
    ports: dict[Edge, float] = {}
    ends: dict[str, list[Edge]] = {}
    for link in layout.links:
        ends.setdefault(link[0] if down else link[1], []).append(link)
    for name, links in ends.items():
        links.sort(key=lambda link: layout.x[link[1] if down else link[0]])
        step = min(16.0, 0.7 * layout.widths[name] / len(links))
        for index, link in enumerate(links):
            ports[link] = layout.x[name] + (index - (len(links) - 1) / 2) * step
    return ports


def _boxed(name: str, size: str, x: float, y: float, width: float) -> list[str]:
    return [
        f'<rect class="box" x="{x - width / 2:.1f}" y="{y:.0f}" width="{width:.1f}" height="{BOX_HEIGHT}" rx="6"/>',
        f'<text class="name" x="{x:.1f}" y="{y + 17:.0f}" text-anchor="middle">{escape(_shown(name, size))}</text>',
        f'<text class="size" x="{x:.1f}" y="{y + 32:.0f}" text-anchor="middle">{escape(size)}</text>',
    ]


def _shown(name: str, size: str) -> str:
    return f"{name}.py" if size == "module" else f"{name}/"


def draw() -> str:
    """The picture as SVG text, the same for the same imports: panels side by side, as many in a row as its width holds."""
    words = "An arrow is an import. One that follows from two others is left out."
    parts = [f'<text class="words" x="{MARGIN}" y="{MARGIN + 12}">{words}</text>']
    left, top, bottom = float(MARGIN), MARGIN + 34.0, 0.0
    for panel in panels():
        layout = _arranged(panel)
        width = max(x + layout.widths[name] / 2 for name, x in layout.x.items())
        if left > MARGIN and left + width > WIDTH - MARGIN:
            left, top = float(MARGIN), bottom + PANEL_GAP
        parts += _drawn(panel, layout, left, top)
        left += max(width, 9.0 * len(panel.title)) + PANEL_GAP
        bottom = max(
            bottom,
            top + TITLE_HEIGHT + len(layout.rows) * (BOX_HEIGHT + ROW_GAP) - ROW_GAP,
        )
    height = bottom + MARGIN
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    title = "<title>The packages of Checkmate on their layers, with an arrow for every import</title>"
    return "\n".join([head, title, f"<style>{THEME}</style>", *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    (HERE / "architecture.svg").write_text(draw())
