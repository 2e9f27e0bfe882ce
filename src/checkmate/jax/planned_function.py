"""A function whose derivative runs a plan: a transformation that composes with JAX's own."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from checkmate.core.budget import Budget
from checkmate.core.errors import GraphError, OptionError
from checkmate.core.units import Amount
from checkmate.frontend.options import TIME_LIMIT_S, CommonOptions, CostSource, PlanningOptions, takes_options
from checkmate.jax._compat import any_equation, as_function, is_differentiated, is_tracer, opened, scopes_of, trace_settings
from checkmate.jax.apply_plan import PlannedProgram
from checkmate.jax.arguments import Arguments, FlatFunction, call_with_modules, has_modules
from checkmate.jax.calibrate import Compilation, Figures, Planned, planned_within
from checkmate.jax.fusions import fusions_of
from checkmate.jax.graph.capture import KEEP_SHAPES, capture_trace, collectives_of
from checkmate.jax.graph.loops import with_bodies_alone
from checkmate.jax.graph.trace import Pure, fingerprint, is_inexact, trace_pair, with_derivative
from checkmate.jax.profiler import cost_source

_log = logging.getLogger("checkmate.jax")


class PlannedFunction(Figures):
    """A function whose derivative runs a plan. Create one with `checkmate.jax.remat`.

    A plan is made when the function is first differentiated for arguments of new shapes and types; figures describe the newest.
    """

    def __init__(
        self, function: Callable[..., Any], options: PlanningOptions, costs: CostSource | str, verify: bool, exact: bool
    ) -> None:
        self._function, self._options, self._verify, self._exact = function, options, verify, exact
        self._costs = cost_source(costs)
        self._by_key: dict[str, Planned] = {}
        self._programs: dict[Hashable, tuple[Planned, PlannedProgram]] = {}  # by what a call computes
        self._warnings = set[str]()
        functools.update_wrapper(self, function, updated=())  # attributes of a planned function are its own

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """The function as a method, if it is one."""
        return self if owner is None else functools.partial(self, owner)

    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        """Call the function; its derivative runs the plan.

        Args:
            positional: The function's arguments. Python numbers and all else that is no array are constants.
            keywords: The same.

        Raises:
            GraphError: The function cannot be planned.
            InfeasibleBudgetError: No plan keeps the budget, when the function is differentiated.
        """
        if has_modules((positional, keywords)):
            return call_with_modules(lambda pure: functools.partial(self._call, pure), self._function, positional, keywords)
        return self._call(self._function, *positional, **keywords)

    def _call(self, function: Callable[..., Any], /, *positional: Any, **keywords: Any) -> Any:
        arguments = Arguments.of(positional, keywords)
        flat = FlatFunction(function, arguments)
        with jax.disable_jit(False):  # a plan is of loops and calls, also where these run op by op
            closed, results = jax.make_jaxpr(flat, return_shape=True)(*arguments.arrays)
        _, constants = opened(closed)
        # Values that the function closes over may be tracers of an outer transformation, and differ from call to call.
        arrays = [*constants, *arguments.arrays]
        count = len(constants)

        def pure(*values: Any) -> list[Any]:
            return as_function(closed, values[:count])(*values[count:])

        return flat.results(self._differentiable(pure, opened(closed)[0], results)(*arrays))

    def _differentiable(self, pure: Pure, jaxpr: Any, results: Sequence[Any]) -> Callable[..., list[Any]]:
        """A function of flat arrays, closing over no array, with a derivative that runs a plan."""

        def alone(*values: Any) -> list[Any]:
            if any_equation(jaxpr, lambda eqn: "transpose(" in scopes_of(eqn)):
                self._warn("computes gradients, and is not differentiated itself: plan this step with checkmate.jax.plan")
            return pure(*values)

        def forward(*primals: Any) -> tuple[list[Any], Callable[..., Any]]:
            values = [primal.value for primal in primals]
            if any(map(is_differentiated, values)):
                self._warn("is differentiated twice: put checkmate.jax.remat around the function that takes the first derivative")
            wanted = tuple(i for i, primal in enumerate(primals) if primal.perturbed and is_inexact(primal.value))
            with jax.disable_jit(False):
                program = self._program(pure, jaxpr, results, values, wanted)

            def backward(saved: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
                tangents = [_instantiated(c) for c in cotangents if is_inexact(c)]
                by_argument = dict(zip(wanted, program.backward(saved, tangents), strict=True))
                return tuple(by_argument.get(i) for i in range(len(primals)))

            computed, saved = program.forward(values)
            return computed, jax.tree_util.Partial(backward, saved)

        differentiable = jax.custom_vjp(alone)
        differentiable.defvjp(forward, lambda backward, cotangents: backward(cotangents), symbolic_zeros=True)
        return differentiable

    def _warn(self, why: str) -> None:
        if why not in self._warnings:
            self._warnings.add(why)
            name = getattr(self._function, "__name__", "the function")
            _log.warning("%s runs without a plan, and may exceed its budget. It %s", name, why)

    def _program(
        self, pure: Pure, jaxpr: Any, results: Sequence[Any], values: Sequence[Any], wanted: tuple[int, ...]
    ) -> PlannedProgram:
        """The program of an earlier call that computes the same, or a new one.

        A function may depend on anything, so that each call traces it; with its tangents or gradients, if these have rules.
        """
        _refuse_effects(jaxpr)

        def pushed_forward(*primals: Any) -> Any:
            tangents = tuple(p if is_inexact(p) else np.zeros(p.shape, jax.dtypes.float0) for p in primals)
            return jax.jvp(pure, primals, tangents)

        def gradients() -> Any:
            tangents = [spec for spec in results if is_inexact(spec)]
            return jax.make_jaxpr(with_derivative(pure, wanted))(list(values), tangents)

        forms = (lambda: jaxpr, lambda: jax.make_jaxpr(pushed_forward)(*values), gradients)
        some = forms if self._planned else forms[:1]  # a first call under `jax.jit` has no second
        keys = (fingerprint(form(), differentiated=form is not forms[0]) for form in some)
        content = next(filter(None, keys), None)
        key = content and (content, wanted, trace_settings())
        found = self._programs.get(key) or self._planned_anew(pure, results, values, wanted)
        self._planned, program = found
        if key is not None and not any(map(is_tracer, program.capture.trace.constants.values())):
            self._programs[key] = found
        return program

    def _planned_anew(
        self, pure: Pure, results: Sequence[Any], values: Sequence[Any], wanted: Sequence[int]
    ) -> tuple[Planned, PlannedProgram]:
        trace, boundary = trace_pair(pure, values, wanted, results)
        trace = with_bodies_alone(trace) if self._exact else trace
        name, fusions = getattr(self._function, "__name__", "function"), fusions_of(trace, boundary)
        captured = capture_trace(trace, self._costs, name, boundary=boundary, fusions=fusions)
        axes = _sizes(collectives_of(equation.eqn for equation in trace.equations))
        compilation = Compilation(
            captured, [*values, *boundary.specs], exact=self._exact, verify=self._verify and axes is not None, axes=axes
        )
        key = compilation.key
        if key not in self._by_key:
            if self._verify and axes is None:
                _log.warning("the function has collectives over more devices than this process has: its plan is not compiled")
            self._by_key[key] = planned_within(compilation, self._options)
        else:  # the trace must be of this call, because its constants and tracers differ from those of earlier calls
            self._by_key[key] = replace(self._by_key[key], capture=compilation.of(self._by_key[key].result.plan).capture)
        planned = self._by_key[key]
        return planned, PlannedProgram(planned.capture, planned.result.plan, exact=self._exact, barriers=not planned.as_it_is)


@takes_options(CommonOptions, time_limit_s=TIME_LIMIT_S)
def remat(
    function: Callable[..., Any] | None = None,
    *,
    budget: Amount | Budget | None = None,
    costs: CostSource | str = "measured",
    verify: bool = True,
    exact: bool = False,
    **options: Unpack[CommonOptions],
) -> Callable[..., Any]:
    """A function whose derivative keeps a memory budget: a transformation, as `jax.checkpoint` is.

    It composes with `jax.jit`, `jax.grad`, `jax.value_and_grad`, `jax.vmap` and `jax.lax.scan`, and can be a decorator. The
    budget covers the function and its derivative together: arguments, results, gradients and temporary values. When the
    function is differentiated, it is traced and planned; plans are compiled, at most four, until the compiled bytes keep the
    budget.

    Args:
        function: A function of arrays and nests of arrays, like a loss.
        budget: As in `plan`. None, if there is no plan and `exact` is False, returns the function as it is.
        costs: Where costs come from, as in `plan`.
        verify: False compiles no plans.
        exact: True gives the same bits at every budget, also under `jax.jit`: every op is compiled alone, and XLA fuses no two
            ops. Without a budget everything is kept, with these bits. Second derivatives are not exact.
        options: The options below, by name.
        solver: A solver or its name; `Auto` by default.
        time_limit_s: Seconds of wall time for planning, 30 by default, or None for no limit.
        plan: A plan, or its file, to run instead of solving.

    Returns:
        A `PlannedFunction`; the decorator that makes one if ``function`` is left out.

    Raises:
        OptionError: An option cannot be used.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> def loss(w, x):
        ...     return jnp.tanh(jnp.tanh(x @ w) @ w).sum()
        >>> planned = remat(loss, budget="100%", costs="estimated")
        >>> value, gradient = jax.value_and_grad(planned)(jnp.ones((8, 8)), jnp.ones((8, 8)))
        >>> planned.result.overhead
        1.0
    """
    if function is None:
        return functools.partial(remat, budget=budget, costs=costs, verify=verify, exact=exact, **options)
    if not callable(function):
        raise OptionError(f"function={function!r} is not a function", hint="pass the function first: remat(loss, budget='8GiB')")
    planning = PlanningOptions.of(budget=budget, **options)
    if planning.budget is None and planning.plan is None and not exact:
        return function
    return PlannedFunction(function, planning, costs, verify, exact)


def _sizes(collectives: Mapping[str, set[str]]) -> dict[str, int] | None:
    """The sizes of the axes to compile collectives for, each as it is here; None if there are not enough devices.

    The examples of `jax.vmap` need no devices: if no collective changes shapes, axes of one device have the bytes of each.
    """
    sizes = {axis: int(jax.lax.axis_size(axis)) for axis in sorted(collectives)}
    if math.prod(sizes.values()) <= len(jax.devices()):
        return sizes
    same_shapes = all(kinds <= KEEP_SHAPES for kinds in collectives.values())
    return dict.fromkeys(sizes, 1) if same_shapes else None


def _instantiated(cotangent: Any) -> Any:
    """A cotangent as an array; JAX passes a symbol for one that is zero."""
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        aval: Any = cotangent.aval
        return jnp.zeros(aval.shape, aval.dtype)
    return cotangent


def _refuse_effects(jaxpr: Any) -> None:
    ordered = [str(effect) for effect in jaxpr.effects if "rdered" in type(effect).__name__ or "Ref" in str(effect)]
    if ordered:
        raise GraphError(
            f"the function has effects whose order counts ({', '.join(ordered)}), and its derivative cannot be planned",
            hint="move io_callback(ordered=True), ordered debug prints and mutable references out of the function",
        )
    if any(type(effect).__name__ == "ErrorEffect" for effect in jaxpr.effects):
        raise GraphError(
            "the function has checks, which are effects, and its derivative cannot be planned",
            hint="plan a function whose error is a result: checkmate.jax.remat(checkify.checkify(loss))",
        )
