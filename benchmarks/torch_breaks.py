"""A step of several graphs beside the same model without graph breaks, at the same budgets.

    python benchmarks/torch_breaks.py [--time-limit 20]

A language model of eight blocks, broken into up to six graphs. The budgets, in bytes, are shares of the step in one graph. The
promises checked are: the overhead of the whole step is within 0.5 % of that of one graph; a gap is proven for the whole step; the
measured peak keeps the budget; gradients are equal to the bit. Exit status 1 if one breaks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fresh import answer, child, digest, parser, ran, save

GRAPHS = {1: (), 2: (4,), 3: (3, 6), 4: (2, 4, 6), 6: (1, 2, 4, 5, 6)}
"""Number of graphs -> blocks before which there is a break."""

SHARES = ("70%", "50%", "35%")
TOLERANCE = 0.005


def main() -> int:
    """Run the benchmark, or one child of it."""
    command = parser(__doc__)
    command.add_argument("--time-limit", type=float, default=20.0, help="seconds that planning may take")
    command.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = command.parse_args()
    if options.child:
        graphs, budget, limit = options.child
        answer(run(int(graphs), budget, float(limit)))
        return 0
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:  # costs of the first run serve all others
        for share in SHARES:
            budget = share
            for graphs in GRAPHS:
                found = child(__file__, str(graphs), budget, str(options.time_limit), CHECKMATE_CACHE=cache)
                rows.append({"share": share, "parts": graphs, **found})
                budget = str(found["budget_bytes"])  # in bytes, after the share of the step in one graph
    save(__file__, {**ran("torch"), "time_limit_s": options.time_limit, "rows": rows})
    broken = broken_promises(rows)
    print(*broken or ["all promises hold"], sep="\n")
    return bool(broken)


def run(parts: int, budget: str, time_limit_s: float) -> dict[str, Any]:
    """Child: plan and train the model in so many graphs."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    import checkmate.torch
    from checkmate.torch.steps.coordinator import coordinator

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(64), nn.LayerNorm(64)
            self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
            self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.first(x)).view(*x.shape[:2], 4, 48).transpose(1, 2).chunk(3, -1)
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
            return x + self.mlp(self.second(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
            self.blocks = nn.ModuleList(Block() for _ in range(8))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x, b = self.embedding(ids), self.blocks  # Dynamo does not go on after a graph break in a loop
            x = cuts[1](b[0](x))
            x = cuts[2](b[1](x))
            x = cuts[3](b[2](x))
            x = cuts[4](b[3](x))
            x = cuts[5](b[4](x))
            x = cuts[6](b[5](x))
            return F.cross_entropy(self.head(b[7](b[6](x))).flatten(0, 1), ids.flatten())

    broken = torch._dynamo.disable(lambda x: x)
    cuts = [broken if i in GRAPHS[parts] else (lambda x: x) for i in range(7)]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, ids = Model(), torch.randint(256, (16, 64))
    amount: Any = budget if budget.endswith("%") else int(budget)
    options = {"budget": amount, "time_limit_s": time_limit_s, "chunking": "off"}
    compiled = torch.compile(model, backend="checkmate", options=options)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        compiled(ids).backward()
    model.zero_grad(set_to_none=True)
    measured = checkmate.torch.measure_peak(lambda: compiled(ids).backward())
    result, step = coordinator().result, coordinator().step
    assert result is not None
    return {
        "graphs": 1 if step is None else len(step.graphs),
        "budget_bytes": result.budget_bytes,
        "planned_bytes": result.peak_bytes,
        "measured_bytes": measured + sum(p.nbytes for p in model.parameters()) + ids.nbytes,
        "overhead": result.overhead,
        "gap": result.gap,
        "gradients": digest(*(p.grad for p in model.parameters())),
    }


def broken_promises(rows: list[dict[str, Any]]) -> list[str]:
    """Promises that rows break, in words."""
    broken = []
    whole = {row["share"]: row for row in rows if row["parts"] == 1}
    for row in rows:
        label, one = f"{row['parts']} graphs at {row['share']}", whole[row["share"]]
        if row["graphs"] != row["parts"]:
            broken.append(f"{label}: {row['graphs']} graphs ran")
        if row["overhead"] > one["overhead"] + TOLERANCE:
            broken.append(f"{label}: overhead {row['overhead']:.4f}, in one graph {one['overhead']:.4f}")
        if row["measured_bytes"] > row["budget_bytes"]:
            broken.append(f"{label}: measured {row['measured_bytes']} of {row['budget_bytes']} bytes")
        if row["gradients"] != one["gradients"]:
            broken.append(f"{label}: gradients differ")
    return broken


if __name__ == "__main__":
    sys.exit(main())
