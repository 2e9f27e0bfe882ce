"""The body of a loop over layers, and the policy that saves some of its values within a budget, the same in every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from checkmate.core.budget import Budget
from checkmate.core.units import Amount
from checkmate.frontend.options import CostSource
from checkmate.jax.scan.search import search


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScanPolicy:
    """The body of a loop with names, and the policy that saves some of them; ``block, policy = found`` unpacks both.

    Attributes:
        block: The body. It names those values that are saved, and computes the same.
        policy: The policy for `jax.checkpoint`, `nnx.remat` or `eqx.filter_checkpoint`.
        names: Names of the values that are saved.
        sources: Where in the user's program each of them is computed.
        offered: All names among which was chosen.
        saved_bytes: Bytes of named values that are saved, of all iterations.
        overhead: Cost of the loop and its derivative over that of saving everything.
        bound: Proven lower bound on the overhead of all policies that save no more bytes of named values.
        budget_bytes: The budget in bytes.
        temp_bytes: Bytes of temporary values of the loop and its derivative as XLA compiled them.
        peak_bytes: The same with arguments and results.
    """

    block: Callable[..., Any]
    policy: Any
    names: tuple[str, ...]
    sources: tuple[str, ...]
    offered: tuple[str, ...]
    saved_bytes: int
    overhead: float
    bound: float
    budget_bytes: int
    temp_bytes: int
    peak_bytes: int

    def __iter__(self) -> Iterator[Any]:
        """The block and the policy."""
        return iter((self.block, self.policy))


def policy(
    block: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    x: Any,
    *,
    length: int,
    budget: Amount | Budget,
    costs: CostSource | str = "measured",
    names: str | Sequence[str] | None = None,
) -> ScanPolicy:
    """Choose what `jax.checkpoint` saves in the body of a `jax.lax.scan` over layers, within a budget.

    The values to save are chosen by an integer program that minimizes the cost of what is computed again. The loop and its
    derivative are then compiled, and the choice is made again until the compiled bytes keep the budget: at most four
    compilations. All layers save the same values; `scan` runs loops whose layers differ.

    Args:
        block: The body of the loop, ``block(carry, x) -> (carry, y)``.
        carry: The carry, or `jax.ShapeDtypeStruct` in its place.
        x: The slice of one iteration, such as the parameters of one layer, or `jax.ShapeDtypeStruct` in its place.
        length: Number of iterations.
        budget: The most bytes of the loop and its derivative: the first carry, the slices of all iterations, results, gradients
            and temporary values. Not a share.
        costs: Where costs come from, as in `plan`.
        names: Names that the body gives values itself with `jax.ad_checkpoint.checkpoint_name`, to choose among; ``"own"`` for
            all of them. None names values here.

    Raises:
        OptionError: An option cannot be used.
        GraphError: The body is no body of a loop.
        InfeasibleBudgetError: The loop exceeds the budget if nothing but the carry is saved.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> def block(x, w):
        ...     return jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"]), None
        >>> x = jax.ShapeDtypeStruct((64, 8), jnp.float32)
        >>> w = {"up": jax.ShapeDtypeStruct((8, 32), jnp.float32), "down": jax.ShapeDtypeStruct((32, 8), jnp.float32)}
        >>> found = policy(block, x, w, length=4, budget="1MiB", costs="estimated")
        >>> named, save = found
        >>> loop = lambda x, stacked: jax.lax.scan(jax.checkpoint(named, policy=save), x, stacked)
    """
    found = search(block, carry, x, length=length, budget=budget, costs=costs, names=names, groups=False)
    arrangement = found.arrangement
    (group,) = arrangement.groups
    return ScanPolicy(
        block=found.naming.with_names(group.names),
        policy=group.policy,
        names=group.names,
        sources=group.sources,
        offered=found.layers.choices.offered,
        saved_bytes=arrangement.saved_bytes - length * found.layers.carry_bytes,
        overhead=found.overhead(arrangement.cost),
        bound=found.overhead(arrangement.bound),
        budget_bytes=found.budget_bytes,
        temp_bytes=found.temp_bytes,
        peak_bytes=found.peak_bytes,
    )
