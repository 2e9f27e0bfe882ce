"""The example and the notebook run, with the promised lines in them as they were promised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
PROMISED = """
import checkmate
model = tf.keras.applications.vgg19.VGG19(
train_iteration_fn = checkmate.tf2.compile(model, loss, optimizer, input_spec=sample_input[0], label_spec=sample_input[1])
for image, label in train_ds:
prediction, loss = train_iteration_fn(image, label)
"""


def code_of(path: Path) -> str:
    """The code of a script or of a notebook's cells."""
    text = path.read_text()
    if path.suffix == ".py":
        return text
    cells = json.loads(text)["cells"]
    assert all(not cell.get("outputs") for cell in cells), "outputs are not committed"
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize("name", ["vgg19.py", "vgg19.ipynb"])
def test_the_promised_lines_are_there(name):
    """Word for word, in their order; only the network's own options are filled in."""
    lines = [line.strip() for line in code_of(EXAMPLES / name).splitlines()]
    at = -1
    for wanted in PROMISED.strip().splitlines():
        found = next((i for i, line in enumerate(lines) if i > at and line.startswith(wanted)), None)
        assert found is not None, f"{name} has no line that begins with {wanted!r} after its line {at + 1} of code"
        at = found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg19.py", "vgg19.ipynb"])
def test_they_run(name, tmp_path):
    """From beginning to end in a fresh process."""
    script = tmp_path / "script.py"
    script.write_text(code_of(EXAMPLES / name))
    environment = {**os.environ, "TF_CPU_ALLOCATOR_USE_BFC": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
