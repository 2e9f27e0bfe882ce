"""The search for what a loop over layers saves: choose by the model, compile, correct the model, and choose again."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax

from checkmate.core.budget import Budget
from checkmate.core.errors import GraphError, InfeasibleBudgetError, OptionError
from checkmate.core.units import Amount, format_at_least, format_bytes
from checkmate.frontend import progress
from checkmate.frontend.options import CostSource, parsed
from checkmate.jax._compat import is_tracer, without_dead_code
from checkmate.jax.arguments import Arguments, FlatFunction, is_array
from checkmate.jax.graph.op_properties import peak_bytes
from checkmate.jax.graph.pair import Pure, is_inexact, with_derivative
from checkmate.jax.graph.trace import type_bytes
from checkmate.jax.measure.compiled import MOST_COMPILATIONS, temp_bytes
from checkmate.jax.measure.profiler import cost_source
from checkmate.jax.scan.arrangements import Arrangement, Family, Layers, cheapest
from checkmate.jax.scan.choices import Choices
from checkmate.jax.scan.groups import LayerGroup, run_groups
from checkmate.jax.scan.named_block import Naming

_log = logging.getLogger("checkmate.jax")

_CORRECTIONS: Final = 6
_ABOVE: Final = 0.04
"""Share of the room that XLA needs above the planned bytes, before it is known."""

_UNSURE: Final = 0.01
"""Share of the room by which the least arrangement of a kind may be foreseen to exceed it, and is compiled all the same."""

_WORTH: Final = 0.005
"""Share of the cost by which an arrangement must be cheaper than one that fits to be compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The arrangement that was found for a loop.

    Attributes:
        arrangement: The cheapest arrangement whose compiled bytes keep the budget.
        layers: The layers.
        naming: The body and its names.
        budget_bytes: The budget in bytes.
        temp_bytes: Bytes of temporary values of the loop and its derivative as XLA compiled them.
        peak_bytes: The same with arguments and results.
    """

    arrangement: Arrangement
    layers: Layers
    naming: Naming
    budget_bytes: int
    temp_bytes: int
    peak_bytes: int

    def overhead(self, cost: float) -> float:
        """Cost of the loop and its derivative over that of saving everything.

        Args:
            cost: Cost of what is computed again.
        """
        return 1 + cost / (self.layers.length * self.layers.choices.total)


class Loop:
    """The loop and its derivative, compiled in several arrangements.

    Args:
        naming: The body and its names.
        carry: Shapes and types of the carry.
        x: Shapes and types of what one layer is given.
        length: Number of layers.
        exact: Whether every equation stands alone.

    Attributes:
        fixed_bytes: Bytes of arguments, tangents, results and gradients.
    """

    def __init__(self, naming: Naming, carry: Any, x: Any, length: int, *, exact: bool = False) -> None:
        self._naming, self._exact = naming, exact

        def stacked(leaf: Any) -> Any:
            return jax.ShapeDtypeStruct((length, *leaf.shape), leaf.dtype) if is_array(leaf) else leaf

        self._arguments = Arguments.of((carry, jax.tree.map(stacked, x)), {})
        arrays = self._arguments.arrays
        self._wanted = [i for i, array in enumerate(arrays) if is_inexact(array)]
        results = jax.eval_shape(self._flat((LayerGroup(layers=length, names=()),)), *arrays)
        self._tangents = [spec for spec in results if is_inexact(spec)]
        gradients = [arrays[i] for i in self._wanted]
        self.fixed_bytes = sum(map(type_bytes, (*arrays, *self._tangents, *results, *gradients)))

    def planned_bytes(self, arrangement: Arrangement) -> int:
        """Bytes of temporary values of an arrangement by what is traced, each value freed after its last reader.

        Args:
            arrangement: The arrangement.
        """
        jaxpr = without_dead_code(jax.make_jaxpr(self._pair(arrangement))(*self._specs))
        return peak_bytes(jaxpr) - sum(type_bytes(v.aval) for v in jaxpr.outvars)

    def temp_bytes(self, arrangement: Arrangement) -> int:
        """Bytes of temporary values of an arrangement as XLA compiles it.

        Args:
            arrangement: The arrangement.
        """
        with progress.shown("compiling a loop"):
            return temp_bytes(self._pair(arrangement), self._specs)

    @property
    def _specs(self) -> list[Any]:
        return [*self._arguments.arrays, *self._tangents]

    def _pair(self, arrangement: Arrangement) -> Callable[..., list[Any]]:
        pair, count = with_derivative(self._flat(arrangement.groups), self._wanted), len(self._arguments.arrays)
        return lambda *flat: pair(flat[:count], flat[count:])

    def _flat(self, groups: Sequence[LayerGroup]) -> Pure:
        return FlatFunction(functools.partial(run_groups, self._naming, groups, exact=self._exact), self._arguments)


def search(
    block: Callable[..., Any],
    carry: Any,
    x: Any,
    *,
    length: int,
    budget: Amount | Budget,
    costs: CostSource | str,
    names: str | Sequence[str] | None,
    groups: bool,
    exact: bool = False,
) -> Found:
    """The cheapest arrangement of a loop over layers whose compiled bytes keep a budget, with at most four compilations.

    Args:
        block: The body of the loop.
        carry: Shapes and types of the carry.
        x: Shapes and types of what one layer is given.
        length: Number of layers.
        budget: The most bytes of the loop and its derivative.
        costs: Where costs come from.
        names: Names that the body gives itself, to choose among; ``"own"`` for all of them; None to name values here.
        groups: Whether layers may save different values, or be nested.
        exact: Whether every equation stands alone; loops are not nested then.

    Raises:
        OptionError: An option cannot be used.
        GraphError: The body is no body of a loop.
        InfeasibleBudgetError: No arrangement keeps the budget.
    """
    total = parsed(budget)
    if total is None or total.total_bytes is None:
        raise OptionError(
            f"budget={budget!r} is not an amount of memory, which the body of a loop needs",
            hint="give the bytes of the whole loop and its derivative, such as budget='8GiB'",
        )
    if not isinstance(length, int) or length < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(f"length={length!r} is not a number of iterations", hint="pass the number of layers as length")
    arguments = Arguments.of((carry, x), {})
    _refuse_what_is_no_body(block, arguments)
    naming = Naming(block, own=names is not None)
    offered = None if names is None or names == "own" else tuple(names)
    choices = Choices(arguments.arrays, FlatFunction(naming.with_names(None), arguments), cost_source(costs), offered)
    loop = Loop(naming, carry, x, length, exact=exact)
    carry_bytes = sum(map(type_bytes, Arguments.of((carry,), {}).arrays))
    layers = Layers(choices=choices, length=length, carry_bytes=carry_bytes, nested=not exact)
    name = getattr(block, "__name__", "block")
    arrangement, needed = cheapest_compiled(loop, layers, total.total_bytes, groups=groups, name=name)
    return Found(
        arrangement=arrangement,
        layers=layers,
        naming=naming,
        budget_bytes=total.total_bytes,
        temp_bytes=needed,
        peak_bytes=loop.fixed_bytes + needed,
    )


@dataclass(frozen=True, slots=True)
class _Compiled:
    """An arrangement that was compiled.

    Attributes:
        kind: Its kind.
        planned_bytes: Bytes of temporary values by what is traced.
        needed_bytes: The same as XLA compiled it.
    """

    kind: str
    planned_bytes: int
    needed_bytes: int


def cheapest_compiled(loop: Loop, layers: Layers, budget_bytes: int, *, groups: bool, name: str) -> tuple[Arrangement, int]:
    """The cheapest arrangement whose compiled bytes keep a budget, and its compiled bytes of temporary values.

    Args:
        loop: Compiles arrangements.
        layers: The layers.
        budget_bytes: The budget, with the fixed bytes of the loop.
        groups: Whether layers may save different values, or be nested.
        name: Name of the body, for errors.

    Raises:
        InfeasibleBudgetError: No arrangement keeps the budget.
    """
    room = budget_bytes - loop.fixed_bytes
    families, least = layers.families(groups=groups), layers.least(groups=groups)
    planned = functools.cache(loop.planned_bytes)
    compiled: dict[Arrangement, _Compiled] = {}
    while len(compiled) < MOST_COMPILATIONS:
        best = min((a.cost for a, c in compiled.items() if c.needed_bytes <= room), default=math.inf)
        last = len(compiled) == MOST_COMPILATIONS - 1 and best == math.inf
        # Loops with one body first, whose bytes are foreseen best: layers that differ must be cheaper than they are.
        kinds = [] if last else families if compiled else [kind for kind in ("uniform", "everything") if kind in families]
        found = _within(families, kinds, planned, compiled.values(), room)
        if not compiled and not found:
            found = _within(families, families, planned, (), room)
        for kind in [kind for kind in kinds if kind in least and kind not in found.values()]:
            if planned(least[kind]) <= _target(kind, compiled.values(), room) + _UNSURE * room:
                found[least[kind]] = kind
        chosen = cheapest(a for a in found if a not in compiled and a.cost < (1 - _WORTH) * best)
        if chosen is None and best == math.inf:
            # Nothing fits by what is known. What needs least decides whether the budget is refused.
            found = {arrangement: kind for kind, arrangement in least.items()}
            chosen = min((a for a in found if a not in compiled), key=planned, default=None)
        if chosen is None:
            break
        compiled[chosen] = _Compiled(found[chosen], planned(chosen), loop.temp_bytes(chosen))
        amounts = (chosen.saved_bytes, planned(chosen), compiled[chosen].needed_bytes, room)
        _log.info("saved %s, planned %s, compiled %s of %s, cost %.4g", *map(format_bytes, amounts), chosen.cost)
    fitting = {a: c.needed_bytes for a, c in compiled.items() if c.needed_bytes <= room}
    if not fitting:
        raise _refusal(loop.fixed_bytes + min(c.needed_bytes for c in compiled.values()), budget_bytes, name)
    return min(fitting.items(), key=lambda item: item[0].cost)


def _within(
    families: Mapping[str, Family],
    kinds: Iterable[str],
    planned: Callable[[Arrangement], int],
    compiled: Collection[_Compiled],
    room: int,
) -> dict[Arrangement, str]:
    """The cheapest arrangement of each kind that is foreseen to fit, with its kind."""
    found = ((_largest_within(families[kind], planned, _target(kind, compiled, room)), kind) for kind in kinds)
    return {arrangement: kind for arrangement, kind in found if arrangement is not None}


def _target(kind: str, compiled: Collection[_Compiled], room: int) -> int:
    """Planned bytes at which an arrangement of a kind is foreseen to fill the room.

    XLA needs more than the planned bytes, by an amount that is nearly the same for arrangements of one kind.
    """
    alike = [c for c in compiled if c.kind == kind]
    known = alike or list(compiled)
    if not known:
        return room - int(_ABOVE * room)
    within = [c.planned_bytes for c in alike if c.needed_bytes <= room]
    over = [c.planned_bytes for c in alike if c.needed_bytes > room]
    if within and over:
        return (max(within) + min(over)) // 2
    return room - (known[-1].needed_bytes - known[-1].planned_bytes)


def _largest_within(family: Family, planned: Callable[[Arrangement], int], most_bytes: int) -> Arrangement | None:
    """The cheapest arrangement of a kind that takes no more bytes as it is traced, above what the model counts."""
    limit = most_bytes
    for _ in range(_CORRECTIONS):
        arrangement = family(limit)
        if arrangement is None:
            return None
        excess = planned(arrangement) - most_bytes
        if excess <= 0:
            return arrangement
        limit = min(limit, arrangement.held_bytes) - excess
    return None


def _refuse_what_is_no_body(block: Callable[..., Any], arguments: Arguments) -> None:
    if not callable(block):
        raise OptionError(f"block={block!r} is not a function", hint="pass the body of the loop: block(carry, x) -> (carry, y)")
    if any(is_tracer(array) for array in arguments.arrays):
        raise GraphError(
            "the body of a loop cannot be planned inside a transformation such as jax.jit or jax.grad",
            hint="plan it outside, with jax.ShapeDtypeStruct, and use what is returned inside",
        )
    (given, _), _ = arguments.called_with(arguments.arrays)
    answer = jax.eval_shape(lambda *arrays: block(*arguments.called_with(arrays)[0]), *arguments.arrays)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise GraphError(
            f"the body of a loop returns {'an array' if is_array(answer) else type(answer).__name__}, not a pair of carry and y",
            hint="return (carry, None) where a layer has no other result",
        )
    before, after = (jax.tree.map(_type, nest) for nest in (given, answer[0]))
    if before != after:
        raise GraphError(
            f"the body of a loop is given a carry of {before} and returns one of {after}",
            hint="return a carry of the same structure, shapes and types, as jax.lax.scan asks for",
        )


def _type(leaf: Any) -> Any:
    return f"{leaf.dtype}{list(leaf.shape)}" if is_array(leaf) else leaf


def _refusal(needed_bytes: int, budget_bytes: int, name: str) -> InfeasibleBudgetError:
    return InfeasibleBudgetError(
        f"the loop needs {format_bytes(needed_bytes)} if it saves as little as it can, and the budget is "
        f"{format_bytes(budget_bytes)}",
        hint=f"raise the budget to at least {format_at_least(needed_bytes)}, or lower the batch size",
        budget_bytes=budget_bytes,
        smallest_bytes=needed_bytes,
        binding_op=name,
    )
