"""The loops into which XLA fuses a program, and the outputs that it stores, read from one compilation of the program."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import jax

from checkmate.cost.store import Store
from checkmate.frontend import progress
from checkmate.frontend.plan_store import sources_digest
from checkmate.jax._compat import lowered
from checkmate.jax.graph.capture import Fusions, collectives_of
from checkmate.jax.graph.trace import Boundary, Trace, as_called, given_bytes, result
from checkmate.jax.profiler import known_or_made, quickly, signature

_SCOPE = "checkmate.equation."  # around each equation, before its position in the program; XLA keeps it with each instruction
_EQUATION = re.compile(rf"{re.escape(_SCOPE)}(\d+)")
_MADE = re.compile(r" = (\(.*?\)|\S+) (?!bitcast|constant|get-tuple|parameter|tuple)[\w-]+\(.*?\)(?:.* calls=%?([\w.\-]+))?")
_MOVED = re.compile(r" (bitcast|copy)\(")  # what another loop computed, under its name
_ARRAY = re.compile(r"\b[a-z]+(\d*)\[([\d,]*)\]")


def fusions_of(trace: Trace, boundary: Boundary | None = None) -> Fusions | None:
    """The fusions of a program; None for programs with collectives or loops over layers, and for those that do not compile."""
    equations = [equation.eqn for equation in trace.equations]
    if collectives_of(equations) or any(eqn.primitive.name == "scan" for eqn in equations):
        return None
    store = Store("fusions", Fusions, "programs are compiled in every process to read what XLA stores")
    program = f"{sources_digest()} {signature(trace.equations)} {trace.results}"
    try:
        return known_or_made(store, program, lambda: _compiled(trace, boundary))
    except jax.errors.JaxRuntimeError:  # it has parts for other devices
        return None


def _compiled(trace: Trace, boundary: Boundary | None) -> Fusions:
    def run(arguments: Sequence[Any]) -> list[Any]:
        values = dict(zip(trace.arguments, arguments, strict=True)) | dict(trace.constants)
        for position, equation in enumerate(trace.equations):
            with jax.named_scope(f"{_SCOPE}{position}"):
                values.update(equation.computed(values))
        return [result(values, v) for v in trace.results]

    function, specs = as_called(run, trace, boundary)
    with progress.shown("compiling the program"):
        compiled: Any = lowered(function, specs).compile(compiler_options=quickly())
    temp_bytes = int(compiled.memory_analysis().temp_size_in_bytes)
    return _read(compiled.as_text() or "", temp_bytes + given_bytes(boundary))


def _read(text: str, temp_bytes: int) -> Fusions:
    """The fusions of a compiled program, from its instructions and those of the computations that they call."""
    inside, made_bytes, members = defaultdict[str, list[int]](list), Counter[int](), defaultdict[int, set[int]](set)
    where = ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            where = line.split(" ", 1)[0]
        if (named := _EQUATION.search(line)) and not _MOVED.search(line):
            inside[where.lstrip("%")].append(int(named[1]))
        if where == "ENTRY" and (made := _MADE.search(line)):
            fused = inside.get(made[2] or "", [])
            # A copy in another layout has no name: it belongs to the last equation that is fused with it.
            for last in [int(named[1])] if named else fused[-1:]:
                members[last].update((last, *fused))
                for bits, sizes in _ARRAY.findall(made[1]):  # as in f32[8,16] or pred[8]
                    made_bytes[last] += math.prod(int(n) for n in sizes.split(",") if n) * max(8, int(bits or 8)) // 8
    return Fusions(temp_bytes, {last: tuple(sorted(some)) for last, some in members.items()}, dict(made_bytes))
