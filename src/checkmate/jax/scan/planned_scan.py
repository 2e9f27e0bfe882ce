"""A loop over layers that save different values, within a budget: called as `jax.lax.scan` is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from checkmate.core.budget import Budget
from checkmate.core.errors import OptionError
from checkmate.core.units import Amount
from checkmate.frontend.options import CostSource
from checkmate.jax.arguments import is_array
from checkmate.jax.scan.groups import LayerGroup, run_groups
from checkmate.jax.scan.named_block import Naming
from checkmate.jax.scan.search import search


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedScan:
    """A loop over layers whose derivative keeps a budget. Create one with `checkmate.jax.scan`.

    The plan is data: for each group its number of layers, the names of the values that they save, and the length of inner loops.

    Attributes:
        groups: Groups of layers, in order.
        saved_bytes: Bytes that the forward saves for the derivative, carries included.
        overhead: Cost of the loop and its derivative over that of saving everything.
        bound: Proven lower bound on the overhead of all choices, layer by layer and with nested loops, that save no more bytes.
        budget_bytes: The budget in bytes.
        temp_bytes: Bytes of temporary values of the loop and its derivative as XLA compiled them.
        peak_bytes: The same with arguments and results.
        exact: Whether every equation stands alone.
    """

    groups: tuple[LayerGroup, ...]
    saved_bytes: int
    overhead: float
    bound: float
    budget_bytes: int
    temp_bytes: int
    peak_bytes: int
    exact: bool
    _naming: Naming

    @property
    def length(self) -> int:
        """Number of layers."""
        return sum(group.layers for group in self.groups)

    def __call__(self, carry: Any, xs: Any) -> tuple[Any, Any]:
        """Run the loop: what ``jax.lax.scan(block, carry, xs)`` returns.

        Args:
            carry: The first carry.
            xs: What each layer is given, stacked.

        Raises:
            OptionError: There is another number of layers than was planned for.
        """
        lengths = {leaf.shape[0] if leaf.shape else 0 for leaf in jax.tree.leaves(xs) if is_array(leaf)}
        if lengths - {self.length}:
            raise OptionError(
                f"the loop was planned for {self.length} layers and is given {', '.join(map(str, sorted(lengths)))}",
                hint="stack what the layers are given along the first axis, or plan again with another length",
            )
        return run_groups(self._naming, self.groups, carry, xs, exact=self.exact)


def scan(
    block: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    x: Any,
    *,
    length: int,
    budget: Amount | Budget,
    costs: CostSource | str = "measured",
    names: str | Sequence[str] | None = None,
    exact: bool = False,
) -> PlannedScan:
    """A loop over layers, each of which saves what the budget has room for.

    What `policy` cannot: some layers save more than others, so that the budget is filled, and loops are nested where saving the
    carry of every layer is too much. All arrangements are compared by one model of cost and bytes, and compiled until the bytes
    keep the budget: at most four compilations. The derivative of a loop whose layers differ is a `jax.custom_vjp`, which
    `jax.jvp` refuses.

    Args:
        block: The body of the loop, ``block(carry, x) -> (carry, y)``.
        carry: The carry, or `jax.ShapeDtypeStruct` in its place.
        x: The slice of one iteration, such as the parameters of one layer, or `jax.ShapeDtypeStruct` in its place.
        length: Number of iterations.
        budget: The most bytes of the loop and its derivative, as in `policy`.
        costs: Where costs come from, as in `plan`.
        names: Names that the body gives values itself, as in `policy`.
        exact: Whether loss and gradients have the same bits at every budget under `jax.jit`. Every equation of the body and its
            derivative then stands alone, which XLA does not fuse; loops are not nested.

    Raises:
        OptionError: An option cannot be used.
        GraphError: The body is no body of a loop.
        InfeasibleBudgetError: The loop exceeds the budget even if its loops are nested and nothing but carries is saved.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> def block(x, w):
        ...     return jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"]), None
        >>> x = jax.ShapeDtypeStruct((64, 8), jnp.float32)
        >>> w = {"up": jax.ShapeDtypeStruct((8, 32), jnp.float32), "down": jax.ShapeDtypeStruct((32, 8), jnp.float32)}
        >>> layers = scan(block, x, w, length=4, budget="1MiB", costs="estimated")
        >>> y, _ = layers(jnp.ones((64, 8)), {"up": jnp.ones((4, 8, 32)), "down": jnp.ones((4, 32, 8))})
        >>> y.shape
        (64, 8)
    """
    found = search(block, carry, x, length=length, budget=budget, costs=costs, names=names, groups=True, exact=exact)
    arrangement, layers = found.arrangement, found.layers
    bound = layers.choices.bound(length, layers.carry_bytes, arrangement.saved_bytes)
    return PlannedScan(
        groups=arrangement.groups,
        saved_bytes=arrangement.saved_bytes,
        overhead=found.overhead(arrangement.cost),
        bound=found.overhead(min(bound, arrangement.cost)),
        budget_bytes=found.budget_bytes,
        temp_bytes=found.temp_bytes,
        peak_bytes=found.peak_bytes,
        exact=exact,
        _naming=found.naming,
    )
