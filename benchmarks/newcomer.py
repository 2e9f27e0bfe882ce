"""The first use, timed: the README's first command, then a new model under a budget, then its report.

    python benchmarks/newcomer.py    # a fresh copy of what is committed, a fresh environment; about five minutes

The model is written as a user would write it after reading only the README.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "newcomer.json"
PAGE = ROOT / "docs" / "benchmarks" / "newcomer.md"

MODEL = """
import torch
from torch import nn


def build():
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = nn.Sequential(nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 6), nn.Linear(256, 1000))
    tokens = torch.randint(1000, (8, 128))
    return model, lambda logits, y: nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()), (tokens, tokens)
"""

OWN = (
    "checkmate capture mine.py:build",
    "checkmate plan mine.graph.json --budget 50% --out mine.plan.json --result mine.result.json",
    "checkmate verify mine.graph.json mine.plan.json --budget 50%",
    "checkmate report mine.graph.json mine.result.json",
)


def main() -> int:
    readme = (ROOT / "README.md").read_text().splitlines()
    first = next(line for line in readme if line.startswith("pip install -c constraints.txt "))
    rows: list[tuple[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        tree, environment = Path(folder) / "checkmate", Path(folder) / "environment"
        tree.mkdir()
        subprocess.run(f"git -C {ROOT} archive HEAD | tar -x -C {tree}", shell=True, check=True)
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        (tree / "mine.py").write_text(MODEL)
        home = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        home |= {"PATH": f"{environment}/bin:{os.environ['PATH']}", "XDG_CACHE_HOME": f"{folder}/cache"}
        for command in (*first.split(" && "), *OWN):
            print(f"$ {command}", flush=True)
            began = time.perf_counter()
            subprocess.run(command, shell=True, check=True, cwd=tree, env=home)
            rows.append((command, round(time.perf_counter() - began, 1)))
        assert "<canvas" in (tree / "report.html").read_text()
    where = {
        "cpu": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        "load": f"{os.getloadavg()[2]:.0f}",
    }
    RESULTS.write_text(json.dumps({"where": where, "rows": rows}, indent=1) + "\n")
    total = sum(seconds for _, seconds in rows)
    lines = [
        "# First use, timed",
        "",
        "Made by `python benchmarks/newcomer.py`: the README's first command in a fresh environment and a fresh copy, then a",
        "new model (six transformer layers), written after reading only the README, within half of its memory, and its",
        f"report. {where['cpu']}, Python {where['python']}, packages from a nearby mirror, and a load of {where['load']} from",
        "other processes.",
        "",
        "| command | seconds |",
        "|---|---:|",
        *(f"| `{command}` | {seconds} |" for command, seconds in rows),
        f"| **in all** | **{total:.0f}** |",
        "",
        "The rest of ten minutes is for reading the README and writing the ten lines of the model.",
    ]
    PAGE.write_text("\n".join(lines) + "\n")
    print(PAGE.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
