"""A loop over layers within a budget: a policy that saves the same values in every layer, or layers that differ."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from checkmate.core.budget import Budget
from checkmate.core.errors import GraphError, OptionError
from checkmate.core.units import Amount, format_bytes
from checkmate.frontend import progress
from checkmate.frontend.calibration import Calibration, Proportional, Trial
from checkmate.frontend.options import CostSource, parsed
from checkmate.jax._compat import is_tracer
from checkmate.jax.arguments import Arguments, FlatFunction, is_array
from checkmate.jax.calibrate import temp_bytes
from checkmate.jax.graph.trace import Pure, is_inexact, table_bytes, type_bytes, with_derivative
from checkmate.jax.profiler import cost_source
from checkmate.jax.scan.choices import Arrangement, Choices, Layers
from checkmate.jax.scan.groups import LayerGroup, Naming, run_groups

_log = logging.getLogger("checkmate.jax")

_MAXTEXT_NAMES = frozenset(
    {"context", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", "query_proj", "key_proj", "value_proj", "qkv_proj", "out_proj", "mla_q"}
    | {"mla_kv", "moe_mlpwi", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", "query_wa_proj", "kv_wa_proj"}
    | {"attention_out", "engram", "indexer_cutoff_threshold", "kv_proj"}
)
"""Values that MaxText's configuration can save, from all versions of ``configs/base.yml`` up to November 2026."""


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
        if not callable(block):
            raise OptionError(f"block={block!r} is not a function", hint="pass the body: block(carry, x) -> (carry, y)")
        if any(is_tracer(array) for array in one.arrays):
            raise GraphError(
                "the body of a loop cannot be planned inside a transformation such as jax.jit or jax.grad",
                hint="plan it outside, with jax.ShapeDtypeStruct, and use what is returned inside",
            )
        self._exact = exact
        self.naming = Naming(block, own=names is not None)

        def stacked(leaf: Any) -> Any:
            return jax.ShapeDtypeStruct((length, *leaf.shape), leaf.dtype) if is_array(leaf) else leaf

        self._arguments = Arguments.of((given[0], jax.tree.map(stacked, given[1])), {})
        arrays = self._arguments.arrays
        self._wanted = [i for i, array in enumerate(arrays) if is_inexact(array)]
        results = jax.eval_shape(self._flat((LayerGroup(layers=length, names=()),)), *arrays)  # JAX refuses what is no body
        tangents = [spec for spec in results if is_inexact(spec)]
        self._specs = [*arrays, *tangents]
        made = [*results, *(arrays[i] for i in self._wanted)]
        self.fixed_bytes = sum(map(type_bytes, (*self._specs, *made))) + table_bytes(len(made))
        offered = None if names is None or names == "own" else tuple(names)
        choices = Choices(one.arrays, FlatFunction(self.naming.with_names(None), one), cost_source(costs), offered)
        carry_bytes = sum(map(type_bytes, Arguments.of(given[:1], {}).arrays))
        self.layers = Layers(choices=choices, length=length, carry_bytes=carry_bytes, differ=differ, nested=not exact)

    def overhead(self, cost: float) -> float:
        """Cost of the loop and its derivative, divided by the cost if everything is saved; `cost` is that of recomputations."""
        return 1 + cost / (self.layers.length * self.layers.choices.total)

    def temp_bytes(self, arrangement: Arrangement) -> int:
        """Bytes of temporary values as XLA compiles the loop."""
        flat, count = self._flat(arrangement.groups), len(self._arguments.arrays)
        pair = with_derivative(flat, self._wanted)
        with progress.shown("compiling a loop"):
            return temp_bytes(lambda *arrays: pair(arrays[:count], arrays[count:]), self._specs)

    def cheapest_within(self, budget_bytes: int) -> tuple[Arrangement, int]:
        """The cheapest arrangement whose compiled bytes keep a budget, and its compiled bytes of temporary values.

        XLA needs more than the held bytes, for the derivative of one layer.
        """
        policy = Proportional(resident_bytes=self.fixed_bytes, least_cost=1, least_saving=0.005)
        trials = Calibration[Arrangement](budget_bytes, policy)
        smallest = self.layers.smallest()  # XLA may need fewer bytes for them than foreseen
        while (target := trials.next_target()) is not None:
            tried = [trial.outcome for trial in trials.trials]
            chosen = self.layers.cheapest(target - self.fixed_bytes) or next((a for a in smallest if a not in tried), None)
            if chosen is None or chosen in tried:
                break
            trials.record(self._compiled(chosen, target))
        for arrangement in smallest:
            best = trials.best()
            if best is not None and len(trials.trials) >= policy.most_trials:
                break
            untried = all(trial.outcome != arrangement for trial in trials.trials)
            if untried and (best is None or arrangement.cost < best.outcome.cost):
                trials.record(self._compiled(arrangement, budget_bytes))
        best = trials.best()
        if best is None or best.needed_bytes is None:
            raise trials.refusal()
        return best.outcome, best.needed_bytes - self.fixed_bytes

    def _compiled(self, arrangement: Arrangement, target_bytes: int) -> Trial[Arrangement]:
        planned, needed = (self.fixed_bytes + size for size in (arrangement.held_bytes, self.temp_bytes(arrangement)))
        cost = self.overhead(arrangement.cost)
        _log.info("planned %s, compiled %s, overhead %.4f", format_bytes(planned), format_bytes(needed), cost)
        figures = {"planned_bytes": planned, "needed_bytes": needed, "cost": cost, "overhead": cost}
        return Trial(target_bytes=target_bytes, **figures, outcome=arrangement)

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScanPolicy:
    """The body of a loop with names, and the policy that saves some of them; ``block, policy = found`` unpacks both.

    Attributes:
        block: The body, with names for the saved values and the same results.
        policy: The policy for `jax.checkpoint`, `nnx.remat` or `eqx.filter_checkpoint`.
        names: Names of the values that are saved.
        sources: Lines of the user's program that compute these values.
        offered: All names that could be chosen.
        saved_bytes: Bytes of the saved named values, of all iterations.
        overhead: Cost of the loop and its derivative, divided by the cost if everything is saved.
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
    """Choose the values that `jax.checkpoint` saves in the body of a `jax.lax.scan` over layers, within a budget.

    An integer program chooses the values to save, minimizing the cost of recomputations. The loop and its derivative are
    then compiled, and the choice is made again until the compiled bytes keep the budget: at most four compilations. All
    layers save the same values; `scan` runs loops whose layers differ.

    Args:
        block: The body of the loop, ``block(carry, x) -> (carry, y)``.
        carry: The carry, or `jax.ShapeDtypeStruct` in its place.
        x: The slice of one iteration, such as the parameters of one layer, or `jax.ShapeDtypeStruct` in its place.
        length: Number of iterations.
        budget: The most bytes of the loop and its derivative: the first carry, the slices of all iterations, results, gradients
            and temporary values. Not a share.
        costs: Where costs come from, as in `plan`.
        names: Names to choose among, which the body gives with `jax.ad_checkpoint.checkpoint_name`; ``"own"`` for all of
            them. None names values here.

    Raises:
        OptionError: An option cannot be used.
        GraphError: The call is inside a transformation.
        TypeError: The body is no body of a loop, as in `jax.lax.scan`.
        InfeasibleBudgetError: The loop exceeds the budget even if only the carry is saved.

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
    budget_bytes = total_bytes(budget)
    loop = Loop(block, (carry, x), length, costs=costs, names=names, differ=False)
    found, needed = loop.cheapest_within(budget_bytes)
    (group,) = found.groups
    return ScanPolicy(
        block=loop.naming.with_names(group.names),
        policy=group.policy,
        names=group.names,
        sources=group.sources,
        offered=loop.layers.choices.offered,
        saved_bytes=found.saved_bytes - length * loop.layers.carry_bytes,
        overhead=loop.overhead(found.cost),
        bound=loop.overhead(found.bound),
        budget_bytes=budget_bytes,
        temp_bytes=needed,
        peak_bytes=loop.fixed_bytes + needed,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedScan:
    """A loop over layers whose derivative keeps a budget. Create one with `checkmate.jax.scan`.

    The plan is data: for each group its number of layers, the names of the saved values, and the length of inner loops.

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
        """Run the loop; it returns the results of ``jax.lax.scan(block, carry, xs)``.

        Args:
            carry: The first carry.
            xs: The slices of all layers, stacked.

        Raises:
            OptionError: The number of layers differs from the plan's.
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
    """A loop over layers that save as much as the budget has room for.

    In contrast to `policy`, some layers save more than others, to fill the budget, and loops are nested if the carries of all
    layers take too many bytes. All arrangements are compared by one model of cost and bytes, and compiled until the bytes keep
    the budget: at most four compilations. The derivative of a loop whose layers differ is a `jax.custom_vjp`, which `jax.jvp`
    refuses.

    Args:
        block: The body of the loop, ``block(carry, x) -> (carry, y)``.
        carry: The carry, or `jax.ShapeDtypeStruct` in its place.
        x: The slice of one iteration, such as the parameters of one layer, or `jax.ShapeDtypeStruct` in its place.
        length: Number of iterations.
        budget: The most bytes of the loop and its derivative, as in `policy`.
        costs: Where costs come from, as in `plan`.
        names: Names that the body gives, as in `policy`.
        exact: Whether loss and gradients have the same bits at every budget under `jax.jit`. Every equation of the body and its
            derivative then stands alone, and XLA fuses no two of them; loops are not nested.

    Raises:
        OptionError: An option cannot be used.
        GraphError: The call is inside a transformation.
        TypeError: The body is no body of a loop, as in `jax.lax.scan`.
        InfeasibleBudgetError: The loop exceeds the budget even if it is nested and only carries are saved.

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
    budget_bytes = total_bytes(budget)
    loop = Loop(block, (carry, x), length, costs=costs, names=names, differ=True, exact=exact)
    found, needed = loop.cheapest_within(budget_bytes)
    bound = loop.layers.choices.bound(length, loop.layers.carry_bytes, found.saved_bytes)
    return PlannedScan(
        groups=found.groups,
        saved_bytes=found.saved_bytes,
        overhead=loop.overhead(found.cost),
        bound=loop.overhead(min(bound, found.cost)),
        budget_bytes=budget_bytes,
        temp_bytes=needed,
        peak_bytes=loop.fixed_bytes + needed,
        exact=exact,
        _naming=loop.naming,
    )


def maxtext_config(found: ScanPolicy) -> str:
    """A policy as lines of a configuration of MaxText: ``remat_policy: 'custom'`` and a line for each name.

    The line of a saved value is ``device``, that of a recomputed one ``remat``. Only names of the body are written, because
    older versions of MaxText refuse names that they do not know.

    Args:
        found: A policy that was chosen among the body's own names: ``policy(block, ..., names="own")``.

    Returns:
        Lines of YAML that replace ``remat_policy`` in a configuration file of MaxText.

    Raises:
        OptionError: A name is not one of MaxText's.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> from checkmate.jax import policy
        >>> def block(x, w):
        ...     hidden = checkpoint_name(x @ w["up"], "mlpwi")
        ...     return checkpoint_name(jnp.tanh(hidden) @ w["down"], "mlpwo"), None
        >>> x = jax.ShapeDtypeStruct((64, 8), jnp.float32)
        >>> w = {"up": jax.ShapeDtypeStruct((8, 32), jnp.float32), "down": jax.ShapeDtypeStruct((32, 8), jnp.float32)}
        >>> print(maxtext_config(policy(block, x, w, length=4, budget="1MiB", costs="estimated", names="own")))
        remat_policy: 'custom'
        decoder_layer_input: 'device'
        mlpwi: 'device'
        mlpwo: 'remat'
        <BLANKLINE>
    """
    carry = "decoder_layer_input"  # of every layer, which is saved anyway
    offered = [name for name in found.offered if name != carry]
    if unknown := sorted(set(offered).difference(_MAXTEXT_NAMES)):
        raise OptionError(
            f"MaxText's configuration has no value {', '.join(unknown)}",
            hint="plan the body among MaxText's own names: checkmate.jax.policy(block, ..., names='own')",
        )
    lines = {"remat_policy": "custom", carry: "device"} | {name: "device" if name in found.names else "remat" for name in offered}
    return "".join(f"{key}: '{value}'\n" for key, value in lines.items())
