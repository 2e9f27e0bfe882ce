"""The body of a loop over layers: which of its values `jax.checkpoint` saves within a budget, chosen by an integer program."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from checkmate.core.budget import Budget
from checkmate.core.errors import InfeasibleBudgetError, OptionError, SolverError
from checkmate.core.units import Amount, format_at_least, format_bytes
from checkmate.cost.store import OpCost
from checkmate.frontend import progress
from checkmate.frontend.options import CostSource, parsed
from checkmate.jax._compat import as_array, bind, source_of, traced_as
from checkmate.jax.arguments import Arguments, FlatFunction, is_array
from checkmate.jax.graph.capture import phases_of_pair
from checkmate.jax.graph.pair import Pure, is_inexact, trace_pair, with_derivative
from checkmate.jax.graph.trace import flattened, type_bytes
from checkmate.jax.measure.compiled import temp_bytes
from checkmate.jax.measure.profiler import cost_source

_log = logging.getLogger("checkmate.jax")

_COMPILATIONS: Final = 4
_LEAST_ROOM: Final = 0.02
"""Share of the room for temporary values that is not worth another compilation."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScanPolicy:
    """The body of a loop with names, and the policy that saves some of them; ``block, policy = found`` unpacks both.

    Attributes:
        block: The body. It names those values that are saved, and computes the same.
        policy: The policy for `jax.checkpoint`, `nnx.remat` or `eqx.filter_checkpoint`.
        names: Names of the values that are saved.
        sources: Where in the user's program each of them is computed.
        saved_bytes: Bytes that are saved, of all iterations.
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
) -> ScanPolicy:
    """Choose what `jax.checkpoint` saves in the body of a `jax.lax.scan` over layers, within a budget.

    The values to save are chosen by an integer program that minimizes the cost of what is computed again. The loop and its
    derivative are then compiled, and the choice is made again until the compiled bytes keep the budget: at most four
    compilations.

    Args:
        block: The body of the loop, ``block(carry, x) -> (carry, y)``.
        carry: The carry, or `jax.ShapeDtypeStruct` in its place.
        x: The slice of one iteration, such as the parameters of one layer, or `jax.ShapeDtypeStruct` in its place.
        length: Number of iterations.
        budget: The most bytes of the loop and its derivative: the first carry, the slices of all iterations, results, gradients
            and temporary values. Not a share.
        costs: Where costs come from, as in `plan`.

    Raises:
        OptionError: An option cannot be used.
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
    total = parsed(budget)
    if total is None or total.total_bytes is None:
        raise OptionError(
            f"budget={budget!r} is not an amount of memory, which the body of a loop needs",
            hint="give the bytes of the whole loop and its derivative, such as budget='8GiB'",
        )
    if not isinstance(length, int) or length < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(f"length={length!r} is not a number of iterations", hint="pass the number of layers as length")
    return _search(block, carry, x, length, total.total_bytes, costs)


class NamedBlock:
    """The body of a loop, in which chosen values have names.

    Args:
        block: The body.
        chosen: Numbers of the values to name, by the order in which they are traced; None names all that can be saved.
    """

    def __init__(self, block: Callable[..., Any], chosen: frozenset[int] | None) -> None:
        self._block, self._chosen = block, chosen
        functools.update_wrapper(self, block)

    def __call__(self, carry: Any, x: Any) -> Any:
        """Call the body.

        Args:
            carry: The carry.
            x: The slice of this iteration.
        """
        arguments = Arguments.of((carry, x), {})
        flat = FlatFunction(self._block, arguments)
        # Calls with derivatives of the user's stay calls: this is differentiated later.
        trace = flattened(jax.make_jaxpr(flat)(*arguments.arrays), differentiable=True)
        values = dict(zip(trace.arguments, arguments.arrays, strict=True)) | dict(trace.constants)
        for equation in trace.equations:
            inputs = [values[v] if isinstance(v, int) else v.val for v in equation.inputs]
            for v, value in zip(equation.outputs, bind(equation.eqn, inputs), strict=True):
                with traced_as(equation.eqn):
                    values[v] = checkpoint_name(value, self._name_of(v)) if self._has_name(v, value) else value
        return flat.results([values[v] if isinstance(v, int) else as_array(v.val, v.aval) for v in trace.results])

    def _name_of(self, number: int) -> str:
        return f"{getattr(self._block, '__name__', 'block')}.{number}"

    def _has_name(self, number: int, value: Any) -> bool:
        return is_inexact(value) if self._chosen is None else number in self._chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """Values to save in one iteration.

    Attributes:
        names: Their names.
        sources: Where in the user's program they are computed.
        saved_bytes: Their bytes.
        overhead: Cost of an iteration and its derivative over that of computing nothing again.
        bound: Proven lower bound on the overhead within as many bytes.
    """

    names: tuple[str, ...]
    sources: tuple[str, ...]
    saved_bytes: int
    overhead: float
    bound: float


class _Choices:
    """Which named values to save: `jax.checkpoint` computes again what the derivative needs and cannot be computed from them.

    An equation is computed again if the derivative, or another equation that is computed again, reads one of its outputs that is
    not saved. That is a cut of the graph; with a limit of bytes it is an integer program.

    Args:
        arrays: Shapes and types of its flat arguments.
        pure: The body with all names, as a function of flat arrays.
        costs: Gives the costs of equations.
    """

    def __init__(self, arrays: Sequence[Any], pure: Pure, costs: Callable[..., Sequence[OpCost]]) -> None:
        wanted = [i for i, array in enumerate(arrays) if is_inexact(array)]
        trace, boundary = trace_pair(pure, arrays, wanted)
        phases = phases_of_pair(trace, boundary)
        cost = [c.cost_ns for c in costs([(equation,) for equation in trace.equations], trace)]
        ahead = [i for i, equation in enumerate(trace.equations) if phases[id(equation)] == "forward"]
        maker = {v: i for i in ahead for v in trace.equations[i].outputs}
        self._equations = [trace.equations[i] for i in ahead]
        self._cost = np.array([0 if self._equations[k].kind == "name" else cost[i] for k, i in enumerate(ahead)], dtype=float)
        self._total = sum(c for c, equation in zip(cost, trace.equations, strict=True) if equation.kind != "name")
        index = {i: k for k, i in enumerate(ahead)}
        self._named = [k for k, equation in enumerate(self._equations) if equation.kind == "name"]
        self._bytes = np.array([trace.size_bytes(self._equations[k].outputs[0]) for k in self._named], dtype=float)
        saves = {k: j for j, k in enumerate(self._named)}
        gradients = {v for v in trace.results[boundary.results :] if isinstance(v, int)}
        read = {v for e in trace.equations if phases[id(e)] == "backward" for v in e.read} | gradients
        # Rows: what the derivative reads is computed again or saved; so is what is read by an equation that is computed again.
        rows: list[tuple[int | None, int]] = [(None, index[maker[v]]) for v in sorted(read) if v in maker]
        rows += [(k, index[maker[v]]) for k, equation in enumerate(self._equations) for v in equation.read if v in maker]
        least: Any = np.array([1.0 if k is None else 0.0 for k, _ in rows])
        self._rows = LinearConstraint(self._matrix(rows, saves), least, np.inf)

    def cheapest(self, most_bytes: int) -> _Choice:
        """The choice with the least cost of what is computed again.

        Args:
            most_bytes: The most bytes to save in one iteration.
        """
        count, saved = len(self._equations), len(self._named)
        within = LinearConstraint(csr_array([[0.0] * count + list(self._bytes)]), -np.inf, max(0, most_bytes))
        weights = np.concatenate([self._cost, 1e-12 * self._bytes])
        found = milp(weights, constraints=[self._rows, within], integrality=np.ones(count + saved), bounds=Bounds(0, 1))
        if found.x is None:
            raise SolverError(f"the integer program for the saved values of a loop has no solution: {found.message}")
        again, chosen = found.x[:count] > 0.5, [k for j, k in enumerate(self._named) if found.x[count + j] > 0.5]
        proven = min(float(self._cost @ again), max(0.0, float(found.mip_dual_bound)))
        return _Choice(
            names=tuple(self._equations[k].eqn.params["name"] for k in chosen),
            sources=tuple(source_of(self._equations[k].eqn) for k in chosen),
            saved_bytes=int(sum(self._bytes[self._named.index(k)] for k in chosen)),
            overhead=1 + float(self._cost @ again) / self._total,
            bound=1 + proven / self._total,
        )

    def _matrix(self, rows: Sequence[tuple[int | None, int]], saves: Mapping[int, int]) -> csr_array:
        """A row for each value that is read: its equation is computed again, or it is saved, if its reader is."""
        count = len(self._equations)
        entries: list[tuple[int, int, float]] = []
        for row, (reader, maker) in enumerate(rows):
            entries.append((row, maker, 1.0))
            if maker in saves:
                entries.append((row, count + saves[maker], 1.0))
            if reader is not None:
                entries.append((row, reader, -1.0))
        positions, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
        return csr_array((values, (positions, columns)), shape=(len(rows), count + len(saves)))


class _Loop:
    """The loop and its derivative, compiled with several choices.

    Args:
        block: The body.
        carry: Shapes and types of the carry.
        x: Shapes and types of the slice of one iteration.
        length: Number of iterations.
    """

    def __init__(self, block: Callable[..., Any], carry: Any, x: Any, length: int) -> None:
        self._block, self._length = block, length

        def stacked(leaf: Any) -> Any:
            return jax.ShapeDtypeStruct((length, *leaf.shape), leaf.dtype) if is_array(leaf) else leaf

        self._arguments = Arguments.of((carry, jax.tree.map(stacked, x)), {})
        arrays = self._arguments.arrays
        self._wanted = [i for i, array in enumerate(arrays) if is_inexact(array)]
        results = jax.eval_shape(self._flat(()), *arrays)
        self._tangents = [spec for spec in results if is_inexact(spec)]
        gradients = [arrays[i] for i in self._wanted]
        self.fixed_bytes = sum(map(type_bytes, (*arrays, *self._tangents, *results, *gradients)))

    def temp_bytes(self, names: tuple[str, ...]) -> int:
        """Bytes of temporary values if values of some names are saved.

        Args:
            names: The names.
        """
        pair, count = with_derivative(self._flat(names), self._wanted), len(self._arguments.arrays)
        with progress.shown("compiling a loop"):
            return temp_bytes(lambda *flat: pair(flat[:count], flat[count:]), [*self._arguments.arrays, *self._tangents])

    def _flat(self, names: tuple[str, ...]) -> Pure:
        body = jax.checkpoint(_chosen(self._block, names), policy=jax.checkpoint_policies.save_only_these_names(*names))
        return FlatFunction(functools.partial(jax.lax.scan, body, length=self._length), self._arguments)


def _search(block: Callable[..., Any], carry: Any, x: Any, length: int, budget_bytes: int, costs: CostSource | str) -> ScanPolicy:
    """The cheapest choice found whose compiled bytes keep the budget."""
    arguments = Arguments.of((carry, x), {})
    choices = _Choices(arguments.arrays, FlatFunction(NamedBlock(block, None), arguments), cost_source(costs))
    loop = _Loop(block, carry, x, length)
    room = budget_bytes - loop.fixed_bytes
    least = loop.temp_bytes(())
    if least > room:
        raise _refusal(loop.fixed_bytes + least, budget_bytes, getattr(block, "__name__", "block"))
    best, needs = choices.cheapest(0), least
    target = room - least  # bytes to save
    tried = {best.names}
    for _ in range(_COMPILATIONS - 1):
        choice = choices.cheapest(target // length)
        if choice.names in tried:
            break
        tried.add(choice.names)
        needed = loop.temp_bytes(choice.names)
        saved = length * choice.saved_bytes
        _log.info("saved %s, compiled %s of %s, overhead %.4f", *map(format_bytes, (saved, needed, room)), choice.overhead)
        if needed <= room and choice.overhead < best.overhead:
            best, needs = choice, needed
        if 0 <= room - needed <= _LEAST_ROOM * room:
            break
        target = min(target, saved) + room - needed
    return ScanPolicy(
        block=_chosen(block, best.names),
        policy=jax.checkpoint_policies.save_only_these_names(*best.names),
        names=best.names,
        sources=best.sources,
        saved_bytes=length * best.saved_bytes,
        overhead=best.overhead,
        bound=best.bound,
        budget_bytes=budget_bytes,
        temp_bytes=needs,
        peak_bytes=loop.fixed_bytes + needs,
    )


def _chosen(block: Callable[..., Any], names: Sequence[str]) -> NamedBlock:
    """The body with some names only."""
    return NamedBlock(block, frozenset(int(name.rpartition(".")[2]) for name in names))


def _refusal(needed_bytes: int, budget_bytes: int, name: str) -> InfeasibleBudgetError:
    return InfeasibleBudgetError(
        f"the loop needs {format_bytes(needed_bytes)} if only its carry is saved, and the budget is {format_bytes(budget_bytes)}",
        hint=f"raise the budget to at least {format_at_least(needed_bytes)}, or lower the batch size",
        budget_bytes=budget_bytes,
        smallest_bytes=needed_bytes,
        binding_op=name,
    )
