"""The picture of the packages is that of the code, and the page describes every box of it."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("grimp")

DOCS = Path(__file__).parent.parent / "docs"
PICTURE = DOCS / "images" / "architecture.svg"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("architecture", DOCS / "images" / "architecture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # a dataclass looks up its module
        spec.loader.exec_module(module)
    return module


def test_the_picture_is_current(script, request):
    """A picture that is drawn from the code is wrong as soon as an import changes; `--regen` draws it again."""
    drawn = script.draw()
    if request.config.getoption("--regen"):
        PICTURE.write_text(drawn)
    assert PICTURE.read_text() == drawn, "run `pytest tests/test_architecture.py --regen` and look at the picture"


def test_every_arrow_points_down(script):
    """Rows are the layers of a contract, so that an arrow up would be a broken contract."""
    for panel in script.panels():
        row = {name: index for index, names in enumerate(panel.rows) for name in names}
        assert panel.edges
        assert all(row[source] < row[target] for source, target in panel.edges)


def test_an_arrow_that_follows_from_others_is_left_out(script):
    """a -> b -> c makes a -> c superfluous; a -> d stays."""
    assert script._reduced({("a", "b"), ("b", "c"), ("a", "c"), ("a", "d")}) == (("a", "b"), ("a", "d"), ("b", "c"))


def test_boxes_do_not_overlap(script):
    """Two boxes of one row are apart, and all are inside the picture."""
    root = ET.fromstring(PICTURE.read_text())
    boxes = [
        {k: float(rect.attrib[k]) for k in ("x", "y", "width", "height")} for rect in root.iter() if rect.tag.endswith("rect")
    ]
    assert len(boxes) == sum(len(panel.sizes) for panel in script.panels())
    for i, a in enumerate(boxes):
        assert a["x"] >= 0
        assert a["x"] + a["width"] <= script.WIDTH
        for b in boxes[i + 1 :]:
            assert a["y"] != b["y"] or a["x"] + a["width"] < b["x"] or b["x"] + b["width"] < a["x"]


def test_every_box_has_a_paragraph(script):
    """The page says in one paragraph what each package is for, and describes none that does not exist."""
    described = re.findall(r"^\*\*`([\w.]+)/?`\*\*", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    boxes = [name for panel in script.panels() for name in panel.sizes]
    assert sorted(name.removesuffix(".py") for name in described) == sorted(boxes)
