"""`RegionPolicy`: the modules to checkpoint, the ops to save in them, and the cost compared with a plan."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from checkmate.core.errors import InfeasibleBudgetError, OptionError, printable
from checkmate.core.evaluate import evaluate
from checkmate.core.graph import Graph
from checkmate.core.result import NoPlan, Result
from checkmate.core.units import format_at_least, format_bytes
from checkmate.regions.blocks import Call, Schedule, find_regions
from checkmate.regions.search import Save, choice_of, choose, units_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPolicy:
    """A policy for activation checkpointing by regions that keeps a budget.

    Attributes:
        budget_bytes: The budget.
        save: Kind of values that may be saved: ``"ops"``, ``"modules"`` or ``"nothing"``.
        saved: The checkpointed regions by module path, each with the ops that it saves: kind and number of earlier ops of that
            kind in the region.
        save_regions: Modules relative to a region that are saved in all regions; only with ``save="modules"``.
        unwrapped: Regions that are not checkpointed, because all values that their backward needs fit into memory.
        refused: Regions that cannot be checkpointed, with the reason.
        peak_bytes: Peak of the step under the policy.
        evaluated: The same step as a plan of the graph; ``overhead`` is its cost over computing each op once.
        planned: The plan within the same budget without the restriction to regions, with its proven bound; or no plan.
    """

    budget_bytes: int
    save: Save
    saved: Mapping[str, tuple[Call, ...]]
    save_regions: tuple[str, ...]
    unwrapped: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    peak_bytes: int
    evaluated: Result
    planned: Result | NoPlan

    @property
    def extra_overhead(self) -> float | None:
        """Cost in excess of the plan's, over computing each op once; None without a plan."""
        return None if isinstance(self.planned, NoPlan) else self.evaluated.overhead - self.planned.overhead

    def as_dict(self) -> dict[str, Any]:
        """The policy as one JSON object."""
        return {
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "overhead": self.evaluated.overhead,
            "save": self.save,
            "save_regions": list(self.save_regions),
            "saved": {name: [list(call) for call in calls] for name, calls in self.saved.items()},
            "unwrapped": list(self.unwrapped),
            "refused": dict(self.refused),
            "plan": None
            if isinstance(self.planned, NoPlan)
            else {"peak_bytes": self.planned.peak_bytes, "overhead": self.planned.overhead, "bound": self._bound},
        }

    def rows(self) -> list[tuple[str, str]]:
        """The policy and its price as pairs of a name and a text."""
        shown = format_bytes
        rows = [
            ("budget", shown(self.budget_bytes)),
            ("regions", f"{shown(self.peak_bytes)} at {self.evaluated.overhead:.4f}x the cost"),
        ]
        if isinstance(self.planned, NoPlan):
            rows.append(("plan", "none was found"))
        else:
            price = f"{shown(self.planned.peak_bytes)} at {self.planned.overhead:.4f}x the cost"
            rows.append(("plan", f"{price}; no plan is below {self._bound:.4f}x"))
        if self.save == "modules":
            rows.append(("save", ", ".join(self.save_regions) or "nothing"))
        groups: dict[tuple[Call, ...], list[str]] = {}
        for name, calls in self.saved.items():
            groups.setdefault(calls, []).append(name)
        for calls, names in groups.items():
            ops = [f"{kind.removeprefix('aten.').removesuffix('.default')}#{occurrence}" for kind, occurrence in calls]
            rows.append((_range(names), f"checkpointed, saves {', '.join(ops) or 'nothing'}"))
        if self.unwrapped:
            rows.append((_range(self.unwrapped), "not checkpointed"))
        return [*rows, *((printable(name), f"not checkpointed: {why}") for name, why in self.refused)]

    def render(self) -> str:
        """The rows as text."""
        rows = self.rows()
        width = max(len(name) for name, _ in rows) + 2
        return "\n".join(f"{name:<{width}}{printable(text)}" for name, text in rows)

    __str__ = render

    @property
    def _bound(self) -> float:
        """Proven lower bound on the cost of every plan, over computing each op once."""
        return self.planned.bound * self.evaluated.overhead / max(1, self.evaluated.cost)


def choose_policy(
    graph: Graph,
    budget_bytes: int,
    planned: Result | NoPlan,
    *,
    save: Save = "ops",
    regions: Sequence[str] | None = None,
    region_bytes: int = 0,
    time_limit_s: float = 30.0,
) -> RegionPolicy:
    """Choose regions of a step without its optimizer, and the ops they save; compare with a plan within the same budget.

    The policy saves single ops in each region separately, the same modules in all regions, or nothing. Regions are named by
    patterns, as in `find_regions`, and each holds some bytes in addition.

    Raises:
        InfeasibleBudgetError: Even with all regions checkpointed and nothing saved the step exceeds the budget.
        OptionError: No module matches, or no region can be checkpointed.
        GraphError: The graph has no boundary between forward and backward.
    """
    until = time.perf_counter() + time_limit_s
    found = find_regions(graph, regions)
    usable = [region for region in found if region.ops and not region.refusal]
    if not usable:
        why = found[0].refusal or "the backward reads nothing of it"
        raise OptionError(f"no region can be checkpointed: {found[0].name}: {why}", hint="name other modules as regions")
    schedule = Schedule(graph, usable, region_bytes)
    if save not in get_args(Save):
        raise OptionError(f"save={save!r} is none of 'ops', 'modules', 'nothing'", hint="choose one of the three, such as 'ops'")
    plan = planned.plan if save == "ops" else None
    taken = choose(schedule, units_of(schedule, save), budget_bytes, plan, until)
    if taken is None:
        raise _too_small(schedule, budget_bytes, planned)
    choice = choice_of(schedule, taken)
    return RegionPolicy(
        budget_bytes=budget_bytes,
        save=save,
        saved={region.name: tuple(region.calls[o] for o in sorted(saved)) for region, saved in choice.items()},
        save_regions=tuple(sorted(unit.module for unit in taken)) if save == "modules" else (),
        unwrapped=tuple(region.name for region in usable if region not in choice),
        refused=tuple((region.name, region.refusal) for region in found if region.refusal),
        peak_bytes=schedule.peak_bytes(choice),
        evaluated=evaluate(graph, schedule.plan(choice), budget_bytes - region_bytes * len(choice)),
        planned=planned,
    )


def _too_small(schedule: Schedule, budget_bytes: int, planned: Result | NoPlan) -> InfeasibleBudgetError:
    smallest = schedule.peak_bytes({region: frozenset() for region in schedule.regions})
    plan = "" if planned.plan is None else "; a plan of single ops keeps it: compile the model with the backend instead"
    return InfeasibleBudgetError(
        f"with all {len(schedule.regions)} regions checkpointed the step needs {format_bytes(smallest)}, and the budget is "
        f"{format_bytes(budget_bytes)}{plan}",
        hint=f"raise the budget to at least {format_at_least(smallest)}",
        budget_bytes=budget_bytes,
        smallest_bytes=smallest,
    )


def _range(names: Sequence[str]) -> str:
    """Names in short: the first and the last."""
    first, last = printable(names[0]), printable(names[-1])
    return first if len(names) == 1 else f"{first} .. {last} ({len(names)})"
