"""The search for the values that a loop over layers saves: choose by the model, compile, correct the model, choose again."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from checkmate.core.budget import Budget
from checkmate.core.errors import GraphError, InfeasibleBudgetError, OptionError
from checkmate.core.units import Amount, format_at_least, format_bytes
from checkmate.frontend import progress
from checkmate.frontend.options import CostSource, parsed
from checkmate.jax._compat import is_tracer, without_dead_code
from checkmate.jax.arguments import Arguments, FlatFunction, is_array
from checkmate.jax.calibrate import temp_bytes
from checkmate.jax.graph.op_properties import peak_bytes
from checkmate.jax.graph.trace import Pure, is_inexact, type_bytes, with_derivative
from checkmate.jax.profiler import cost_source
from checkmate.jax.scan.choices import Arrangement, Choices, Layers, cheapest
from checkmate.jax.scan.groups import LayerGroup, Naming, run_groups

_log = logging.getLogger("checkmate.jax")


class Loop:
    """A loop over layers and its derivative, from the shapes and types of its carry and of the slice for one layer.

    Only layers that may differ can save different values or be nested; exact loops, whose equations stand alone, are not nested.
    ``fixed_bytes`` are the bytes of arguments, tangents, results and gradients.
    """

    def __init__(
        self,
        block: Callable[..., Any],
        given: tuple[Any, Any],
        length: int,
        *,
        costs: CostSource | str,
        names: str | Sequence[str] | None,
        differ: bool,
        exact: bool = False,
    ) -> None:
        if not isinstance(length, int) or length < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError(f"length={length!r} is not a number of iterations", hint="pass the number of layers as length")
        one = Arguments.of(given, {})
        _refuse_what_is_no_body(block, one)
        self._exact = exact
        self.naming = Naming(block, own=names is not None)
        offered = None if names is None or names == "own" else tuple(names)
        choices = Choices(one.arrays, FlatFunction(self.naming.with_names(None), one), cost_source(costs), offered)
        carry_bytes = sum(map(type_bytes, Arguments.of(given[:1], {}).arrays))
        self.layers = Layers(choices=choices, length=length, carry_bytes=carry_bytes, differ=differ, nested=not exact)

        def stacked(leaf: Any) -> Any:
            return jax.ShapeDtypeStruct((length, *leaf.shape), leaf.dtype) if is_array(leaf) else leaf

        self._arguments = Arguments.of((given[0], jax.tree.map(stacked, given[1])), {})
        arrays = self._arguments.arrays
        self._wanted = [i for i, array in enumerate(arrays) if is_inexact(array)]
        results = jax.eval_shape(self._flat((LayerGroup(layers=length, names=()),)), *arrays)
        tangents = [spec for spec in results if is_inexact(spec)]
        self._specs = [*arrays, *tangents]
        self.fixed_bytes = sum(map(type_bytes, (*self._specs, *results, *(arrays[i] for i in self._wanted))))

    def overhead(self, cost: float) -> float:
        """Cost of the loop and its derivative, divided by the cost if everything is saved; `cost` is that of recomputations."""
        return 1 + cost / (self.layers.length * self.layers.choices.total)

    def planned_bytes(self, arrangement: Arrangement) -> int:
        """Bytes of temporary values in the traced loop, each value freed after its last reader."""
        jaxpr = without_dead_code(jax.make_jaxpr(self._pair(arrangement))(*self._specs))
        return peak_bytes(jaxpr) - sum(type_bytes(v.aval) for v in jaxpr.outvars)

    def temp_bytes(self, arrangement: Arrangement) -> int:
        """Bytes of temporary values as XLA compiles the loop."""
        with progress.shown("compiling a loop"):
            return temp_bytes(self._pair(arrangement), self._specs)

    def cheapest_within(self, budget_bytes: int) -> tuple[Arrangement, int]:
        """The cheapest arrangement whose compiled bytes keep a budget, and its compiled bytes of temporary values."""
        room = budget_bytes - self.fixed_bytes
        planned = functools.cache(self.planned_bytes)
        compiled: dict[Arrangement, int] = {}
        for left in range(4, 0, -1):  # each compilation takes seconds
            best = min((a.cost for a, needed in compiled.items() if needed <= room), default=math.inf)
            found: list[Arrangement | None] = []
            if left > 1 or best < math.inf:
                targets = [(within, _target(kind, compiled, planned, room)) for kind, within in self.layers.kinds.items()]
                found = [_largest_within(within, planned, target) for within, target in targets]
            chosen = cheapest((a for a in found if a is not None and a not in compiled), best)
            if chosen is None and best == math.inf:
                # No arrangement is expected to fit. The one that needs the fewest bytes decides whether the budget is refused.
                chosen = min((a for a in self.layers.least() if a not in compiled), key=planned, default=None)
            if chosen is None:
                break
            compiled[chosen] = self.temp_bytes(chosen)
            amounts = (chosen.saved_bytes, planned(chosen), compiled[chosen], room)
            _log.info("saved %s, planned %s, compiled %s of %s, cost %.4g", *map(format_bytes, amounts), chosen.cost)
        fitting = {a: needed for a, needed in compiled.items() if needed <= room}
        if fitting:
            return min(fitting.items(), key=lambda item: item[0].cost)
        smallest, budget = self.fixed_bytes + min(compiled.values()), format_bytes(budget_bytes)
        raise InfeasibleBudgetError(
            f"the loop needs {format_bytes(smallest)} if it saves as little as it can, and the budget is {budget}",
            hint=f"raise the budget to at least {format_at_least(smallest)}, or lower the batch size",
            budget_bytes=budget_bytes,
            smallest_bytes=smallest,
            binding_op=getattr(self.naming.block, "__name__", "block"),
        )

    def _pair(self, arrangement: Arrangement) -> Callable[..., list[Any]]:
        pair, count = with_derivative(self._flat(arrangement.groups), self._wanted), len(self._arguments.arrays)
        return lambda *flat: pair(flat[:count], flat[count:])

    def _flat(self, groups: Sequence[LayerGroup]) -> Pure:
        return FlatFunction(functools.partial(run_groups, self.naming, groups, exact=self._exact), self._arguments)


def total_bytes(budget: Amount | Budget) -> int:
    """The bytes of a budget for a loop; the budget must not be a share."""
    total = parsed(budget)
    if total is None or total.total_bytes is None:
        raise OptionError(
            f"budget={budget!r} is not an amount of memory, which the body of a loop needs",
            hint="give the bytes of the whole loop and its derivative, such as budget='8GiB'",
        )
    return total.total_bytes


def _target(kind: str, compiled: Mapping[Arrangement, int], planned: Callable[[Arrangement], int], room: int) -> int:
    """Planned bytes at which an arrangement of a kind is expected to fill the room.

    XLA needs more than the planned bytes. The difference is nearly the same for arrangements of one kind; before the first
    compilation it is estimated as a 25th.
    """
    alike = [a for a in compiled if a.kind == kind]
    known = alike or list(compiled)
    if not known:
        return room - room // 25
    within = [planned(a) for a in alike if compiled[a] <= room]
    over = [planned(a) for a in alike if compiled[a] > room]
    if within and over:
        return (max(within) + min(over)) // 2
    return room - (compiled[known[-1]] - planned(known[-1]))


def _largest_within(
    within: Callable[[int], Arrangement | None], planned: Callable[[Arrangement], int], most_bytes: int
) -> Arrangement | None:
    """The cheapest arrangement of a kind within some planned bytes, which are more than the model counts."""
    limit = most_bytes
    for _ in range(6):  # each removes nearly all of the excess
        arrangement = within(limit)
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
