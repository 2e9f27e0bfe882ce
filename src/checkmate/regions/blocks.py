"""Regions of a step that activation checkpointing can recompute: the ops of one module, as its forward runs them."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from checkmate.core.errors import GraphError, OptionError
from checkmate.core.graph import BOUNDARY, Graph
from checkmate.studies.explain import module_of

_NUMBERED = re.compile(r"^(?:[^.]*[^.\d][^.]*\.)*?\d+(?=\.|$)")  # a path up to its first part that is a number

Call = tuple[str, int]
"""Kind of an op, and how many ops of that kind the region ran before it: how selective checkpointing tells them apart."""


@dataclass(frozen=True, eq=False)
class Region:
    """The forward ops of one module.

    ``torch.utils.checkpoint`` runs a region again from its first op to the last one whose result its backward needs, as soon as
    the backward needs any of them. Ops that are not needed on the way are run again too.

    Attributes:
        name: Path of the module.
        forward: All of its ops in the forward.
        ops: The ops that are run again, in the order of the program.
        calls: Kind and occurrence of each of these.
        modules: Path of the module of each, relative to the region; ``""`` for the region's own ops.
        backward: Ops of the backward that read results of the region; the first of them starts the recomputation.
        needed: Values of the region that its backward reads.
        refusal: Why the region cannot be recomputed; ``""`` if it can.
    """

    name: str
    forward: tuple[int, ...]
    ops: tuple[int, ...]
    calls: tuple[Call, ...]
    modules: tuple[str, ...]
    backward: frozenset[int]
    needed: frozenset[int]
    refusal: str

    @property
    def last(self) -> int:
        """The op after which the forward of the module returns."""
        return self.forward[-1]

    @cached_property
    def call_of(self) -> dict[int, Call]:
        """Kind and occurrence by op."""
        return dict(zip(self.ops, self.calls, strict=True))


def find_regions(graph: Graph, patterns: Sequence[str] | None = None) -> tuple[Region, ...]:
    """The regions of a step, in the order of the program.

    Args:
        graph: A step whose ops have module paths in `Op.source` and whose optimizer is not part of it.
        patterns: Paths of modules, with ``*`` and ``?``, such as ``"layers.*"``, where ``*`` does not match a dot. By default the
            outermost modules with a number for a name that have siblings: the layers of a transformer.

    Raises:
        OptionError: No module has such a path.
        GraphError: The graph has no boundary between forward and backward.
    """
    boundary = next((o for o, op in enumerate(graph.ops) if op.kind == BOUNDARY), None)
    if boundary is None:
        raise GraphError(
            "the graph has no boundary between forward and backward, as a whole step with its optimizer",
            hint="capture the step with whole=False",
        )
    paths = [module_of(op.source) for op in graph.ops]
    names = _numbered(paths[:boundary]) if patterns is None else _matching(paths[:boundary], patterns)
    inside = [next((name for name in names if path == name or path.startswith(f"{name}.")), "") for path in paths]
    return tuple(_region(graph, name, inside, paths, boundary) for name in names)


def _numbered(paths: Sequence[str]) -> list[str]:
    found = list(dict.fromkeys(match[0] for path in paths if (match := _NUMBERED.match(path))))
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
    names: list[str] = []
    for module in modules:
        parts = module.split(".")
        for pattern in patterns:
            wanted = pattern.split(".")
            if len(wanted) == len(parts) and all(map(fnmatch.fnmatchcase, parts, wanted)):
                if not any(module.startswith(f"{name}.") for name in names):
                    names.append(module)
                break
    if not names:
        known = ", ".join(list(modules)[:8])
        raise OptionError(f"no module matches {', '.join(patterns)}", hint=f"give paths of modules of the graph, such as {known}")
    return names


def _region(graph: Graph, name: str, inside: Sequence[str], paths: Sequence[str], boundary: int) -> Region:
    forward = [o for o in range(boundary) if inside[o] == name]
    made = {v: o for o in forward for v in graph.ops[o].outputs}
    # A backward op without a source may belong to any region: it starts the recomputation of the one that it reads.
    reads = {
        o: [v for v in op.inputs if v in made]
        for o, op in enumerate(graph.ops)
        if o > boundary and (inside[o] == name or not op.source) and not made.keys().isdisjoint(op.inputs)
    }
    needed = frozenset(v for values in reads.values() for v in values)
    last = max((made[v] for v in needed), default=-1)
    ops = tuple(o for o in forward if o <= last)
    seen: Counter[str] = Counter()
    calls: list[Call] = []
    for o in forward:
        calls.append((graph.ops[o].kind, seen[graph.ops[o].kind]))
        seen[graph.ops[o].kind] += 1
    once = next((graph.ops[o] for o in ops if not graph.ops[o].recomputable or graph.ops[o].clobbered_by), None)
    return Region(
        name=name,
        forward=tuple(forward),
        ops=ops,
        calls=tuple(calls[: len(ops)]),
        modules=tuple(paths[o].removeprefix(name).removeprefix(".") for o in ops),
        backward=frozenset(reads),
        needed=needed,
        refusal="" if once is None else f"`{once.name}` ({once.kind}) must run once",
    )
