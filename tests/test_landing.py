"""The first pages: their numbers are those of committed results, and the commands beside their claims exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INDEX = (ROOT / "docs" / "index.md").read_text()
VARIANTS = {
    "eager mode": ("torch_front", "eager"),
    "`gradient_checkpointing_enable()`": ("torch_front", "checkpoint per block"),
    "selective checkpointing: matmuls and attention kept": ("torch_front", "selective per block"),
    "`activation_memory_budget=0.5`": ("torch_front", "activation_memory_budget=0.5"),
    "Inductor": ("torch_inductor", "inductor"),
    "Inductor, `activation_memory_budget=0.1`": ("torch_inductor", "activation_memory_budget=0.1"),
}


def rows() -> list[list[str]]:
    """The cells of the table of ways, without its head."""
    table = INDEX[INDEX.index("| way |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_the_table_has_the_numbers_of_the_committed_results(row: list[str]) -> None:
    """Whoever runs the benchmark again, and commits its results, changes the page too."""
    way, _, peak, time = row
    inductor = "Inductor" in way
    variants = json.loads((ROOT / "benchmarks" / "results" / f"torch_{'inductor' if inductor else 'front'}.json").read_text())
    found = variants["models"]["gpt2"]["variants"]
    if way in VARIANTS:
        (variant,) = (v for v in found if v["name"] == VARIANTS[way][1])
    else:
        budget = re.search(r"at most (\d+) MiB", way)
        assert budget is not None
        (variant,) = (v for v in found if v["name"].startswith("ours, ") and of(v) == int(budget[1]))
    assert (int(peak), float(time)) == (round(variant["peak_bytes"] / 2**20), round(variant["time_s"], 2))


def of(variant: dict[str, float]) -> int:
    """The budget in MiB that the page prints."""
    return round(float(re.findall(r"[\d.]+", str(variant["name"]))[0]))


@pytest.mark.parametrize("page", ["docs/index.md", "README.md"])
def test_every_command_of_a_first_page_has_its_files(page: str) -> None:
    """A claim whose command names a file that is gone cannot be checked by anyone."""
    text = (ROOT / page).read_text()
    files = set(re.findall(r"\b(?:benchmarks|examples|tests)/[\w/.]+\.(?:py|json)", text))
    assert files and all((ROOT / file).exists() for file in files), files
