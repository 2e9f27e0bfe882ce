"""A policy for `jax.checkpoint` around the body of a loop over layers, within a budget."""

from __future__ import annotations

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
from checkmate.jax._compat import compiler_options, is_tracer
from checkmate.jax.arguments import Arguments, FlatFunction, is_array
from checkmate.jax.calibrate import temp_bytes
from checkmate.jax.graph.trace import Pure, is_inexact, table_bytes, type_bytes, with_derivative
from checkmate.jax.names import Choice, Choices, Naming
from checkmate.jax.profiler import cost_source

_log = logging.getLogger("checkmate.jax")

_MAXTEXT_NAMES = frozenset(
    {"context", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", "query_proj", "key_proj", "value_proj", "qkv_proj", "out_proj", "mla_q"}
    | {"mla_kv", "moe_mlpwi", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", "query_wa_proj", "kv_wa_proj"}
    | {"attention_out", "engram", "indexer_cutoff_threshold", "kv_proj"}
)
"""Values that MaxText's configuration can save, from all versions of ``configs/base.yml`` up to November 2026."""


class _Loop:
    """A loop and its derivative, from the shapes and types of its carry and of the slice for one iteration.

    ``fixed_bytes`` are the bytes of arguments, tangents, results and gradients.
    """

    def __init__(
        self,
        block: Callable[..., Any],
        given: tuple[Any, Any],
        length: int,
        costs: CostSource | str,
        names: str | Sequence[str] | None,
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
        self.naming, self._length = Naming(block, own=names is not None), length

        def stacked(leaf: Any) -> Any:
            return jax.ShapeDtypeStruct((length, *leaf.shape), leaf.dtype) if is_array(leaf) else leaf

        self._arguments = Arguments.of((given[0], jax.tree.map(stacked, given[1])), {})
        arrays = self._arguments.arrays
        self._wanted = [i for i, array in enumerate(arrays) if is_inexact(array)]
        results = jax.eval_shape(self._flat(()), *arrays)  # JAX refuses what is no body
        tangents = [spec for spec in results if is_inexact(spec)]
        self._specs = [*arrays, *tangents]
        made = [*results, *(arrays[i] for i in self._wanted)]
        self.fixed_bytes = sum(map(type_bytes, (*self._specs, *made))) + table_bytes(len(made))
        offered = None if names is None or names == "own" else tuple(names)
        self.choices = Choices(one.arrays, FlatFunction(self.naming.with_names(None), one), cost_source(costs), offered)
        self._carry_bytes = sum(map(type_bytes, Arguments.of(given[:1], {}).arrays))

    def overhead(self, cost: float) -> float:
        """Cost of the loop and its derivative over that of saving everything, from the cost of an iteration's recomputations."""
        return 1 + cost / self.choices.total

    def cheapest_within(self, budget_bytes: int) -> tuple[Choice, int]:
        """The cheapest choice whose compiled bytes keep a budget, and its compiled bytes of temporary values.

        XLA needs more than the saved bytes, for the derivative of one iteration.
        """
        policy = Proportional(resident_bytes=self.fixed_bytes, least_cost=1, least_saving=0.005)
        trials = Calibration[Choice](budget_bytes, policy)
        while (target := trials.next_target()) is not None:
            chosen = self.choices.cheapest((target - self.fixed_bytes) // self._length - self._carry_bytes)
            if any(trial.outcome == chosen for trial in trials.trials):
                break
            trials.record(self._compiled(chosen, target))
        if trials.best() is None and all(trial.outcome.names for trial in trials.trials):
            trials.record(self._compiled(self.choices.cheapest(0), budget_bytes))
        best = trials.best()
        if best is None or best.needed_bytes is None:
            raise trials.refusal()
        return best.outcome, best.needed_bytes - self.fixed_bytes

    def _compiled(self, choice: Choice, target_bytes: int) -> Trial[Choice]:
        flat, count = self._flat(choice.names), len(self._arguments.arrays)
        pair = with_derivative(flat, self._wanted)
        with progress.shown("compiling a loop"):
            compiled = temp_bytes(lambda *arrays: pair(arrays[:count], arrays[count:]), self._specs, options=compiler_options())
        planned, needed = self._length * (self._carry_bytes + choice.saved_bytes), self.fixed_bytes + compiled
        cost = self.overhead(choice.cost)
        _log.info("planned %s, compiled %s, overhead %.4f", *map(format_bytes, (self.fixed_bytes + planned, needed)), cost)
        figures = {"planned_bytes": self.fixed_bytes + planned, "needed_bytes": needed, "cost": cost, "overhead": cost}
        return Trial(target_bytes=target_bytes, **figures, outcome=choice)

    def _flat(self, names: Sequence[str]) -> Pure:
        body = jax.checkpoint(self.naming.with_names(names), policy=jax.checkpoint_policies.save_only_these_names(*names))
        return FlatFunction(lambda carry, xs: jax.lax.scan(body, carry, xs, length=self._length), self._arguments)


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
        temp_bytes: Bytes of temporary values of the loop and its derivative as XLA compiles them with `compiler_options`.
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
    layers save the same values, and each saves its carry; in `remat` and `plan` loops can also be nested.

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
    total = parsed(budget)
    if total is None or total.total_bytes is None:
        raise OptionError(
            f"budget={budget!r} is not an amount of memory, which the body of a loop needs",
            hint="give the bytes of the whole loop and its derivative, such as budget='8GiB'",
        )
    loop = _Loop(block, (carry, x), length, costs, names)
    found, needed = loop.cheapest_within(total.total_bytes)
    return ScanPolicy(
        block=loop.naming.with_names(found.names),
        policy=jax.checkpoint_policies.save_only_these_names(*found.names),
        names=found.names,
        sources=found.sources,
        offered=loop.choices.offered,
        saved_bytes=length * found.saved_bytes,
        overhead=loop.overhead(found.cost),
        bound=loop.overhead(found.bound),
        budget_bytes=total.total_bytes,
        temp_bytes=needed,
        peak_bytes=loop.fixed_bytes + needed,
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
