"""A whole step (loss, gradients, an Optax update), planned from shapes: no array is needed and nothing runs."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax

from checkmate.core.budget import Budget
from checkmate.core.errors import GraphError, OptionError
from checkmate.core.graph import Graph
from checkmate.core.units import Amount
from checkmate.frontend import progress
from checkmate.frontend.options import TIME_LIMIT_S, CommonOptions, CostSource, PlanningOptions, takes_options
from checkmate.jax._compat import is_tracer
from checkmate.jax.apply_plan import PlannedProgram
from checkmate.jax.arguments import Arguments, FlatFunction, has_modules, has_numbers
from checkmate.jax.calibrate import Compilation, Figures, Planned, planned_within
from checkmate.jax.fusions import fusions_of
from checkmate.jax.graph.capture import Capture, capture_trace
from checkmate.jax.graph.loops import with_bodies_alone
from checkmate.jax.graph.trace import Trace, trace_flat
from checkmate.jax.profiler import cost_source

_ANOTHER = "plan another step for these arguments with checkmate.jax.plan"


class PlannedStep(Figures):
    """A step that runs its plan. Create one with `checkmate.jax.plan`, and pass it to `jax.jit` in place of the step."""

    def __init__(
        self, step: Callable[..., Any], arguments: Arguments, flat: FlatFunction, planned: Planned, program: PlannedProgram
    ) -> None:
        self._arguments, self._flat, self._planned, self._program = arguments, flat, planned, program
        self._step, self._settings = step, _settings()
        self._weak = {arguments.weak}  # combinations of weak types for which the step computes the same
        functools.update_wrapper(self, step, updated=())

    @property
    def peak_bytes(self) -> int | None:
        """Bytes of arguments, results and temporary values as XLA compiled the plan; None if it was not compiled."""
        return self._newest.needed_bytes

    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        """Run the step by its plan.

        Args:
            positional: Arguments of the shapes and types that were planned. As in `jax.jit`, Python numbers are arrays.
            keywords: The same.

        Raises:
            OptionError: An argument has another structure, shape or type, or another value if it is neither array nor number; or
                a setting of JAX has another value, such as ``jax_enable_x64``.
        """
        for name, value in _settings().items():
            if value != self._settings[name]:
                before = f"{name} is {value!r}, and was {self._settings[name]!r} while the step was planned"
                raise OptionError(before, hint="call it with the settings it was planned with, or plan it again with these")
        arguments, planned = Arguments.of(positional, keywords, trace_numbers=True), self._arguments
        if arguments.tree != planned.tree or _types(arguments.arrays) != _types(planned.arrays):
            raise OptionError("the step was planned for arguments of another structure, shape or type", hint=_ANOTHER)
        for mine, theirs in zip(planned.rest, arguments.rest, strict=True):
            if mine is not theirs and mine != theirs:
                raise OptionError(f"the step was planned for the argument {mine!r}, and is called with {theirs!r}", hint=_ANOTHER)
        if arguments.weak not in self._weak:
            if _computed_types(self._step, arguments) != _computed_types(self._step, planned):
                raise OptionError("the step was planned with a Python number in place of an array, or the reverse", hint=_ANOTHER)
            self._weak.add(arguments.weak)
        results = self._program(arguments.arrays)
        if has_numbers((positional, keywords)) and not any(map(is_tracer, results)):
            # Outside of jax.jit the step returns a Python number for a Python number, such as the next value of a counter.
            results = [r.item() if r.aval.weak_type and not r.shape else r for r in results]
        return self._flat.results(results)


@takes_options(CommonOptions, time_limit_s=TIME_LIMIT_S)
def plan(
    step: Callable[..., Any],
    *specs: Any,
    budget: Amount | Budget | None = None,
    costs: CostSource | str = "measured",
    donate_argnums: int | Sequence[int] = (),
    verify: bool = True,
    exact: bool = False,
    **options: Unpack[CommonOptions],
) -> PlannedStep:
    """Plan a whole step from the shapes of its arguments; the step does not run.

    The plan is compiled to read the bytes of its temporary values. A new plan with a lower or higher target follows until the
    bytes keep the budget: at most four compilations.

    Args:
        step: A function of arrays and nests of arrays, like loss, gradients and an Optax update.
        specs: Its arguments: arrays, or `jax.ShapeDtypeStruct` in their place. Python numbers are traced, as in `jax.jit`.
            Strings, functions and the like are constants of the plan.
        budget: The most bytes of arguments, results and temporary values together: ``"8GiB"``, a number of bytes, or a share
            like ``"70%"``: the fixed bytes plus 70 % of the further bytes that keeping everything needs as XLA compiles it. None
            keeps everything.
        costs: ``"measured"`` runs every distinct op alone a few times, once per machine; ``"estimated"`` runs nothing; the name
            of a device, like ``"H100"``, estimates for that device.
        donate_argnums: Positions of arguments whose buffers the results may reuse, as in `jax.jit`.
        verify: False compiles no plans; `PlannedStep.temp_bytes` is then None.
        exact: True gives the same bits at every budget, as in `remat`.
        options: The options below, by name.
        solver: A solver or its name; `Auto` by default.
        time_limit_s: Seconds of wall time for planning, 30 by default, or None for no limit.
        plan: A plan, or its file, to run instead of solving.

    Returns:
        The planned step, a traceable function.

    Raises:
        OptionError: An option cannot be used.
        GraphError: The step cannot be captured.
        InfeasibleBudgetError: No plan keeps the budget.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> def step(w, x):
        ...     loss, gradient = jax.value_and_grad(lambda w: jnp.tanh(jnp.tanh(x @ w) @ w).sum())(w)
        ...     return w - 0.1 * gradient, loss
        >>> spec = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        >>> planned = plan(step, spec, spec, budget="100%", costs="estimated")
        >>> planned.result.overhead, planned.peak_bytes <= planned.budget_bytes
        (1.0, True)
        >>> new_w, loss = jax.jit(planned)(jnp.ones((8, 8)), jnp.ones((8, 8)))
    """
    planning = PlanningOptions.of(budget=budget, **options)
    arguments, flat, captured, positions = _captured(step, specs, donate_argnums, costs, exact=exact)
    compilation = Compilation(captured, arguments.arrays, positions, exact=exact, verify=verify)
    planned = planned_within(compilation, planning)
    program = PlannedProgram(planned.capture, planned.result.plan, exact=exact, barriers=not planned.as_it_is)
    return PlannedStep(step, arguments, flat, planned, program)


def capture(
    step: Callable[..., Any], *specs: Any, costs: CostSource | str = "measured", donate_argnums: int | Sequence[int] = ()
) -> Graph:
    """The graph of a whole step; `checkmate.write` writes it to a file. The step does not run.

    Args:
        step: A function of arrays and nests of arrays, as in `plan`.
        specs: Its arguments, as in `plan`.
        costs: Where costs come from, as in `plan`.
        donate_argnums: Positions of donated arguments, as in `plan`.

    Raises:
        OptionError: An option cannot be used.
        GraphError: The step cannot be captured.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> spec = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        >>> graph = capture(lambda w, x: jnp.tanh(x @ w).sum(), spec, spec, costs="estimated")
        >>> [op.kind for op in graph.ops]
        ['dot_general', 'reduce_sum']
    """
    return _captured(step, specs, donate_argnums, costs, exact=False)[2].graph


def _captured(
    step: Callable[..., Any],
    specs: Sequence[Any],
    donate_argnums: int | Sequence[int],
    costs: CostSource | str,
    *,
    exact: bool,
) -> tuple[Arguments, FlatFunction, Capture, tuple[int, ...]]:
    """The arguments, the flat function, the captured step, and the positions of donated arrays."""
    if not callable(step):
        raise OptionError(f"step={step!r} is not a function", hint="pass the function that computes a step, then its arguments")
    donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    if any(not 0 <= number < len(specs) for number in donated):
        raise OptionError(
            f"donate_argnums={donated} names an argument that is not there; there are {len(specs)}",
            hint="name positional arguments by their positions, counted from 0",
        )
    if has_modules(specs):
        raise GraphError(
            "a module of Flax NNX is among the arguments, which a step changes in place",
            hint="plan a function of its state (nnx.split, nnx.merge), or plan the loss alone with checkmate.jax.remat",
        )
    source = cost_source(costs)
    with progress.shown("tracing the step"):
        arguments = Arguments.of(specs, {}, trace_numbers=True)
        flat = FlatFunction(step, arguments)
        if any(map(is_tracer, arguments.arrays)):
            raise GraphError(
                "a whole step cannot be planned inside a transformation such as jax.jit or jax.grad",
                hint="call checkmate.jax.plan outside, with jax.ShapeDtypeStruct; "
                "inside a transformation use checkmate.jax.remat",
            )
        trace = _traced(flat, arguments)
        trace = with_bodies_alone(trace) if exact else trace
        ends = list(
            itertools.accumulate((len(Arguments.of((spec,), {}, trace_numbers=True).arrays) for spec in specs), initial=0)
        )
        positions = tuple(p for number in donated for p in range(ends[number], ends[number + 1]))
        # A result reuses a donated buffer of the same shape and type.
        results = [trace.types[v] for v in trace.results if isinstance(v, int)]
        reused = Counter(_types(results)) & Counter(_types([trace.types[trace.arguments[p]] for p in positions]))
        donated_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in reused.elements())
        name = getattr(step, "__name__", "step")
        captured = capture_trace(trace, source, name, donated_bytes=donated_bytes, fusions=fusions_of(trace))
        return arguments, flat, captured, positions


def _traced(flat: FlatFunction, arguments: Arguments) -> Trace:
    try:
        return trace_flat(flat, *arguments.arrays)
    except jax.errors.ConcretizationTypeError as error:
        raise GraphError(
            f"the step needs the value of an argument while it is traced: {str(error).splitlines()[0]}",
            hint="pass functools.partial(step, train=True) as the step if this number decides the program",
        ) from error


def _computed_types(step: Callable[..., Any], arguments: Arguments) -> Counter[Any]:
    """The primitives of a step's equations, with the types of their results; conversions to the same type are left out."""
    found = Counter[Any]()
    for equation in trace_flat(FlatFunction(step, arguments), *arguments.arrays).equations:
        made = [(v.aval.shape, v.aval.dtype) for v in equation.eqn.outvars]
        if equation.kind != "convert_element_type" or made[0][1] != equation.eqn.invars[0].aval.dtype:
            found[equation.kind, tuple(made)] += 1
    return found


def _settings() -> dict[str, Any]:
    """The settings of JAX that decide what a step computes, and its explicit mesh; the plan has them in it."""
    names = ("enable_x64", "default_matmul_precision", "default_prng_impl", "threefry_partitionable")
    mesh = jax.sharding.get_abstract_mesh()
    found = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    return found | {"the mesh": mesh if jax.sharding.AxisType.Explicit in mesh.axis_types else None}


def _types(arrays: Sequence[Any]) -> list[tuple[Any, Any]]:
    return [(array.shape, array.dtype) for array in arrays]
