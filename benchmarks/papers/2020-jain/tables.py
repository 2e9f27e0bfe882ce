"""The page of the paper's figures and tables."""

from __future__ import annotations

import math
from typing import Any

from reported import KNOWN, TABLE_2

from benchmarks.papers.record import markdown, ratio, said

GIGA = 1e9
_ROUNDED = 6e-5
"""What others report is known to four digits."""

_CHEN = {"sqrt(n)": ("AP sqrt(n)", "linearised sqrt(n)"), "greedy": ("AP greedy", "linearised greedy")}


def page(stored: dict[str, Any]) -> str:
    """The Markdown page."""
    effort = stored["effort"]
    lines = [
        "# Checkmate (Jain et al. 2020)",
        "",
        "Made by `python benchmarks/papers/2020-jain/run.py`; its README lists the differences from the paper. The paper's cost",
        f"and memory model and networks, one thread, {said(stored)}",
        f"At most {effort['ours']:g} s for each point of ours, {effort['program']:g} s for the paper's program on HiGHS, which",
        f"starts from a quick plan of our search, {effort['rounding']:g} s for rounding its relaxation;",
        f"{stored['seconds'] / 60:.0f} minutes in all.",
        "",
        "## Figure 5: overhead against budget",
        "",
        "Cost over the cost of computing every op once; a dash if a method has no plan within the budget. *Bound* is proven",
        "for every plan and order. *Original* is the original's program on an open engine, 600 s for each point, if it was run.",
        "",
    ]
    for figure in stored["figure_5"]:
        lines += [f"### {figure['network']}, batch {figure['batch']}", "", *_figure_5(figure), ""]
    lines += ["## Table 2: how much more expensive the others are", ""]
    lines += [
        "Geometric mean over the budgets above of a method's cost divided by ours, for budgets at which both have a plan (their",
        "number is in brackets); then the paper's figure, relative to its integer program. A method that finds plans only at",
        "large budgets looks better than it is.",
        "",
        *_table_2(stored["figure_5"]),
        "",
        "## Figure 6: the largest batch",
        "",
        "16e9 bytes with parameters and their gradients counted once, at most one extra forward pass.",
        "",
        *_figure_6(stored["figure_6"]),
        "",
        "## Unit chains",
        "",
        "Every op costs 1 and writes 1 byte; *original* is its program on an open engine.",
        "",
        *_chains(stored["chains"]),
        "",
        "## Integrality gap",
        "",
        "Cost of the best plan over the optimum of the relaxation. The paper reports 21.56 without and 1.18 with stages that",
        "advance a frontier, for the chain of 8 layers at budget 4. *Stages* is that program, with liveness by the last reader;",
        "*event cuts* is the bound of `Auto`, which holds for any order.",
        "",
        *_integrality(stored["integrality"]),
        "",
        "## Where ours is not at least as good",
        "",
        *_exceptions(stored),
    ]
    return "\n".join(lines) + "\n"


def _figure_5(figure: dict[str, Any]) -> list[str]:
    methods = list(figure["points"][0]["methods"])
    header = ["budget, GB", "share", *methods, "bound", "original"]
    spare = figure["keep_all_bytes"] - figure["floor_bytes"]
    rows: list[list[str]] = []
    for point in figure["points"]:
        budget = point["budget_bytes"]
        known = KNOWN.get((figure["network"], budget))
        row = [f"{budget / GIGA:.2f}", f"{(budget - figure['floor_bytes']) / spare:.0%}"]
        row += [ratio(point["methods"][name]["overhead"]) for name in methods]
        original = "" if known is None else f"{known[0]:.4f} ({known[1]})" if math.isfinite(known[0]) else known[1]
        rows.append([*row, ratio(point["methods"]["ours"]["bound"]), original])
    return markdown(header, rows, left=0)


def _mean(figure: dict[str, Any], names: tuple[str, ...]) -> tuple[float | None, int]:
    """Geometric mean of the best of some methods over ours, and at how many budgets there is one."""
    logs: list[float] = []
    for point in figure["points"]:
        found = [point["methods"][name]["overhead"] for name in names if name in point["methods"]]
        found = [overhead for overhead in found if overhead is not None]
        ours = point["methods"]["ours"]["overhead"]
        if found and ours is not None:
            logs.append(math.log(min(found) / ours))
    return (math.exp(sum(logs) / len(logs)) if logs else None), len(logs)


def _table_2(figures: list[dict[str, Any]]) -> list[str]:
    rows: list[list[str]] = []
    groups = {"LP rounding": ("LP rounding",), **_CHEN, "Griewank log n": ("Griewank log n",), "program": ("program",)}
    for figure in figures:
        row = [figure["network"]]
        for name, members in groups.items():
            mean, count = _mean(figure, members)
            paper = TABLE_2.get(figure["network"], {}).get(name)
            row.append(f"{ratio(mean, 3)} ({count}/{len(figure['points'])})" + ("" if paper is None else f"; {paper:.2f}"))
        rows.append(row)
    return markdown(["network", *groups], rows)


def _figure_6(rows: list[dict[str, Any]]) -> list[str]:
    header = ["network", "keep all", *rows[0]["simple"], "original", "ours", "proven limit", "overhead", "seconds"]
    return markdown(
        header,
        [
            [
                row["network"],
                row["keep_all"],
                *row["simple"].values(),
                f"{row['known']} ({row['note']})",
                row["ours"],
                row["upper_bound"],
                ratio(row["overhead"]),
                f"{row['seconds']:.1f}",
            ]
            for row in rows
        ],
    )


def _chains(rows: list[dict[str, Any]]) -> list[str]:
    header = ["layers", "budget", "original", "ours", "bound", "seconds"]
    cells = [
        [
            row["layers"],
            row["budget"],
            f"{row['known']} ({row['ended']})",
            _cost(row),
            f"{row['ours']['bound'] * row['ops']:.0f}",
            row["ours"]["seconds"],
        ]
        for row in rows
    ]
    return markdown(header, cells, left=0)


def _cost(row: dict[str, Any]) -> int | str:
    overhead = row["ours"]["overhead"]
    return "-" if overhead is None else round(overhead * row["ops"])


def _integrality(rows: list[dict[str, Any]]) -> list[str]:
    header = ["layers", "budget", "best plan", "stages, relaxed", "gap", "event cuts", "gap", "seconds of the relaxation"]
    cells = [
        [
            row["layers"],
            row["budget"],
            f"{row['cost']} ({row['status']})",
            ratio(row["relaxation"], 2),
            ratio(row["cost"] / row["relaxation"], 3),
            f"{row['bound']:.0f}",
            ratio(row["cost"] / row["bound"], 3),
            row["relaxation_s"],
        ]
        for row in rows
    ]
    return markdown(header, cells, left=0)


def _exceptions(stored: dict[str, Any]) -> list[str]:
    """Every point at which another method, here or reported, is better than ours."""
    found: list[str] = []
    for figure in stored["figure_5"]:
        for point in figure["points"]:
            ours = point["methods"]["ours"]["overhead"] or math.inf
            others = {name: m["overhead"] for name, m in point["methods"].items() if name != "ours" and m["overhead"]}
            known = KNOWN.get((figure["network"], point["budget_bytes"]))
            if known is not None:
                others["the original"] = known[0] + _ROUNDED
            better = {name: overhead for name, overhead in others.items() if overhead < ours - 1e-6}
            if better:
                name = min(better, key=lambda n: better[n])
                bound = point["methods"]["ours"]["bound"]
                at = f"{figure['network']} at {point['budget_bytes'] / GIGA:.2f} GB"
                found.append(f"- {at}: {name} has {better[name]:.6f}, ours {ours:.6f}; nothing is below {bound:.6f}.")
    for row in stored["figure_6"]:
        best = max(row["known"], *row["simple"].values())
        if row["ours"] < best:
            found.append(f"- {row['network']}: the largest batch known is {best}, ours {row['ours']}.")
    for row in stored["chains"]:
        cost = _cost(row)
        if cost == "-" or int(cost) > row["known"]:
            found.append(f"- Chain of {row['layers']} layers at budget {row['budget']}: {row['known']} is known, ours is {cost}.")
    return found or ["Nowhere: at every point ours costs no more, or trains no smaller batch, than any of the others."]
