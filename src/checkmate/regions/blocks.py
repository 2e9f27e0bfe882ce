"""Regions of a step that activation checkpointing can recompute, and the step's plan for given regions and saved ops.

A region has the ops of one module, in the order of its forward.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from checkmate.core.errors import GraphError, OptionError
from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan, Step
from checkmate.core.simulate import simulate
from checkmate.studies.lessons import layer_of, module_of

Call = tuple[str, int]
"""Kind of an op, and number of earlier ops of that kind in the region: selective checkpointing identifies ops by these."""


@dataclass(frozen=True, eq=False)
class Region:
    """The forward ops of one module.

    When the backward needs any result of a region, ``torch.utils.checkpoint`` runs the region again, from its first op to the
    last one whose result its backward needs, needless ops between them included.
    """

    name: str  # path of the module
    forward: tuple[int, ...]  # all of its ops in the forward; it returns after the last one
    ops: tuple[int, ...]  # ops that are run again, in the order of the program
    calls: Mapping[int, Call]  # kind and occurrence of each of these
    modules: tuple[str, ...]  # path of the module of each, relative to the region; "" for the region's own ops
    backward: frozenset[int]  # ops that read results of the region; the first of them starts the recomputation
    needed: frozenset[int]  # values of the region that its backward reads
    refusal: str  # why the region cannot be recomputed; "" if it can


def find_regions(graph: Graph, patterns: Sequence[str] | None = None) -> tuple[Region, ...]:
    """The regions of a step, in the order of the program; the ops have module paths in `Op.source`.

    Patterns are paths of modules, with ``*`` and ``?``, such as ``"layers.*"``, where ``*`` does not match a dot. By default
    regions are the outermost modules with a number for a name that have siblings: the layers of a transformer.
    """
    boundary = graph.boundary
    if boundary is None:
        raise GraphError(
            "the graph has no boundary between forward and backward, as a whole step with its optimizer",
            hint="capture the step of a plain loop: checkmate capture --plain-loop, or checkmate.torch.capture(..., whole=False)",
        )
    paths = [module_of(op.source) for op in graph.ops]
    names = _numbered(paths[:boundary]) if patterns is None else _matching(paths[:boundary], patterns)
    inside = [next((name for name in names if path == name or path.startswith(f"{name}.")), "") for path in paths]
    return tuple(_region(graph, name, inside, paths, boundary) for name in names)


def _numbered(paths: Sequence[str]) -> list[str]:
    found = list(dict.fromkeys(layer for path in paths if (layer := layer_of(path))))
    siblings = Counter(name.rpartition(".")[0] for name in found)
    names = [name for name in found if siblings[name.rpartition(".")[0]] > 1]
    if not names:
        raise OptionError(
            "the model has no numbered modules with siblings, such as layers.0 and layers.1",
            hint="name the modules to checkpoint, such as regions=['encoder.*', 'decoder']",
        )
    return names


def _matching(paths: Sequence[str], patterns: Sequence[str]) -> list[str]:
    modules = dict.fromkeys(".".join(path.split(".")[: k + 1]) for path in paths for k in range(path.count(".") + 1))
    wanted = [pattern.split(".") for pattern in patterns]
    names: list[str] = []
    for module in modules:
        parts = module.split(".")
        matches = any(len(p) == len(parts) and all(map(fnmatch.fnmatchcase, parts, p)) for p in wanted)
        if matches and not any(module.startswith(f"{name}.") for name in names):
            names.append(module)
    if not names:
        known = ", ".join(list(modules)[:8])
        raise OptionError(f"no module matches {', '.join(patterns)}", hint=f"give paths of modules of the graph, such as {known}")
    return names


def _region(graph: Graph, name: str, inside: Sequence[str], paths: Sequence[str], boundary: int) -> Region:
    forward = [o for o in range(boundary) if inside[o] == name]
    made = {v: o for o in forward for v in graph.ops[o].outputs}
    # A backward op without a source may belong to any region: it starts the recomputation of the region that it reads.
    reads = {
        o: [v for v in op.inputs if v in made]
        for o, op in enumerate(graph.ops)
        if o > boundary and (inside[o] == name or not op.source) and not made.keys().isdisjoint(op.inputs)
    }
    needed = frozenset(v for values in reads.values() for v in values)
    last = max((made[v] for v in needed), default=-1)
    ops = tuple(o for o in forward if o <= last)
    seen: Counter[str] = Counter()
    calls: dict[int, Call] = {}
    for o in ops:
        kind = graph.ops[o].kind
        calls[o] = kind, seen[kind]
        seen[kind] += 1
    once = next((graph.ops[o] for o in ops if not graph.ops[o].recomputable or graph.ops[o].clobbered_by), None)
    return Region(
        name=name,
        forward=tuple(forward),
        ops=ops,
        calls=calls,
        modules=tuple(paths[o].removeprefix(name).removeprefix(".") for o in ops),
        backward=frozenset(reads),
        needed=needed,
        refusal="" if once is None else f"`{once.name}` ({once.kind}) must run once",
    )


Choice = Mapping[Region, frozenset[int]]
"""The checkpointed regions, each with the ops that it saves. For other regions autograd saves values as usual."""


class Schedule:
    """Plans, peaks and costs of choices on one graph. The random state saved for each checkpointed region takes some bytes."""

    def __init__(self, graph: Graph, regions: Sequence[Region], region_bytes: int = 0) -> None:
        self.graph, self.regions, self.region_bytes = graph, regions, region_bytes
        assert graph.boundary is not None
        self._boundary = graph.boundary
        self._region_of = {o: region for region in regions for o in region.backward}
        self._maker = {o: region for region in regions for o in region.forward}
        self._known: dict[frozenset[tuple[Region, frozenset[int]]], int] = {}

    def cost(self, choice: Choice) -> int:
        """Cost of the recomputations of a choice."""
        ops = self.graph.ops
        return sum(ops[o].cost for region, saved in choice.items() for o in region.ops if o not in saved)

    def plan(self, choice: Choice) -> Plan:
        """The plan of a choice: each region is run again before the first backward op that needs any of its values."""
        order = list(range(self._boundary + 1))
        again: dict[Region, tuple[int, int]] = {}  # first and last position of the recomputation
        for o in range(self._boundary + 1, len(self.graph.ops)):
            region = self._region_of.get(o)
            if region is not None and region in choice and region not in again:
                recomputed = [p for p in region.ops if p not in choice[region]]
                again[region] = (len(order), len(order) + len(recomputed) - 1)
                order += recomputed
            order.append(o)
        return self._with_late_frees(Plan.from_order(self.graph, order), choice, again)

    def peak_bytes(self, choice: Choice) -> int:
        """Peak of a choice."""
        key = frozenset(choice.items())
        if key not in self._known:
            peak = simulate(self.graph, self.plan(choice)).peak_bytes
            self._known[key] = peak + self.region_bytes * len(choice)
        return self._known[key]

    def _with_late_frees(self, plan: Plan, choice: Choice, again: Mapping[Region, tuple[int, int]]) -> Plan:
        """Move frees to the places at which a checkpointed region frees values that it holds after their last read.

        Results of saved ops are held until the recomputation is over, even if no recomputed op reads them. Every value of a
        region is held until the forward of the module returns, and again until the recomputation is over, because a variable
        of the forward may hold it.
        """
        saved = {o for region, ops in choice.items() if region in again for o in ops}
        late: dict[int, list[Step]] = {}
        steps: list[Step] = []
        position = -1
        for step in plan.steps:
            if isinstance(step, Compute):
                steps += late.pop(position, ())
                position += 1
                steps.append(step)
                continue
            producer = self.graph.producer[step.value]
            region = self._maker.get(producer)
            until = position
            if region is not None and position <= self._boundary:
                until = again[region][1] if producer in saved else max(position, region.forward[-1])
            elif region is not None and region in again and again[region][0] <= position:
                until = max(position, again[region][1])
            if until > position:
                late.setdefault(until, []).append(step)
            else:
                steps.append(step)
        return Plan((*steps, *(step for rest in late.values() for step in rest)), plan.graph_digest)
