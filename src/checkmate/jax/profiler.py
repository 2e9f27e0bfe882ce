"""Times of ops: measured once on the device and stored, or estimated from arithmetic and memory traffic."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
import jaxlib
import msgspec
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from checkmate.core.errors import OptionError
from checkmate.cost.device import load_device, roofline_ns
from checkmate.cost.store import MeasuredCosts, OpCost, Store, library_variables, processor, quantise
from checkmate.frontend import progress
from checkmate.frontend.options import CostSource
from checkmate.jax._compat import lowered
from checkmate.jax.graph.capture import COLLECTIVES, flops, has_effects, moved_bytes
from checkmate.jax.graph.trace import Equation, spec_of, type_bytes, types_from_outside

_log = logging.getLogger("checkmate.jax")

_NOT_ALONE = COLLECTIVES | {"shard_map", "while"}
"""Primitives that cannot run alone on arbitrary arrays: loops may not end, collectives need an axis."""

Chain = tuple[Equation, ...]
_R = TypeVar("_R")


def cost_source(costs: CostSource | str) -> Callable[[Sequence[Chain]], list[OpCost]]:
    """The function that gives the costs of ops: measured, estimated, or estimated for a device such as ``"H100"``."""
    if costs == "measured":
        here = environment()
        return MeasuredCosts[Chain](
            signature=lambda chain: f"{signature(chain)} {here} within a program" if all(map(_runs_alone, chain)) else None,
            measure=lambda chains, known: _measure_all(chains),
            estimate=estimate,
        )
    if costs in get_args(CostSource):
        return lambda chains: list(map(estimate, chains))
    try:
        load_device(costs)
    except OptionError as error:
        raise OptionError(
            f"costs={costs!r} is neither 'measured' nor 'estimated', and {error.message}",
            hint="pass costs='measured', costs='estimated', or the name of a device, such as costs='H100'",
        ) from None
    return lambda chains: [estimate(chain, costs) for chain in chains]


def estimate(chain: Chain, device: str = "CPU") -> OpCost:
    """Cost of an op by its estimated time, with the workspace that XLA allocates for a loop or a branch."""
    loops = any(len(body.eqns) > 1 for body in jaxprs_in_params(chain[-1].eqn.params))
    return OpCost(estimated_ns(chain, device), workspace_bytes(chain) if loops else 0)


def estimated_ns(chain: Chain, device: str = "CPU") -> int:
    """Time of an op from its arithmetic and the bytes that it reads and writes, on a device with a profile."""
    last = chain[-1].eqn
    read = types_from_outside(chain).values()
    moved = moved_bytes(last)
    if len(chain) > 1:
        loops = [moved_bytes(equation.eqn) for equation in chain if any(jaxprs_in_params(equation.eqn.params))]
        moved = max(sum(map(type_bytes, [*read, *(v.aval for v in last.outvars)])), *loops, 0)
    kind = str(getattr(last.outvars[0].aval, "dtype", "float32")) if last.outvars else "float32"
    total = sum(flops(equation.eqn) for equation in chain)
    found = load_device(device)
    if found.kind == "cpu":  # the profile has the time of a PyTorch call, which an op of a compiled program does not take
        found = msgspec.structs.replace(found, launch_ns=0)
    return quantise(roofline_ns(found, flop=total, dtype=kind, moved_bytes=moved))


def environment() -> str:
    """Device, versions and settings on which the time of an op depends."""
    device = jax.devices()[0]
    kind = processor() if device.platform == "cpu" else device.device_kind
    precision: Any = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    flags = f"flags={os.environ.get('XLA_FLAGS', '')} {precision} {library_variables()}"
    return f"{device.platform} {kind} jax={jax.__version__} {jaxlib.__version__} {flags}"


def signature(chain: Chain) -> str:
    """Text that identifies the computation of an op: primitives, shapes, types, parameters, and which equation reads which."""
    number: dict[int, int] = {}
    lines: list[str] = []
    for equation in chain:
        inputs = [
            f"{v.aval.str_short()}" + (f"={s.val}" if isinstance(s, Literal) else f"@{number.setdefault(s, len(number))}")
            for v, s in zip(equation.eqn.invars, equation.inputs, strict=True)
        ]
        outputs = [f"@{number.setdefault(v, len(number))}" for v in equation.outputs]
        ignored = ("name", "sharding", "out_sharding")
        parameters = [f"{k}={v}" for k, v in sorted(equation.eqn.params.items()) if k not in ignored]
        lines.append(f"{','.join(outputs)}={equation.kind}({','.join(inputs)}){','.join(parameters)}")
    return ";".join(lines)


def _runs_alone(equation: Equation) -> bool:
    avals = [v.aval for v in (*equation.eqn.invars, *equation.eqn.outvars)]
    arrays = all(hasattr(a, "dtype") and not jnp.issubdtype(a.dtype, jax.dtypes.extended) for a in avals)
    return arrays and equation.kind not in _NOT_ALONE and not has_effects(equation)


def _measure_all(chains: Mapping[str, Chain]) -> dict[str, OpCost]:
    """Time every op alone. All are compiled first, several at once, so nothing else runs while an op is timed."""
    with progress.shown("compiling ops to measure"), ThreadPoolExecutor(os.cpu_count()) as pool:
        # Settings of JAX like `jax.enable_x64` belong to a thread, so programs are traced in this one.
        programs = {key: _tried(chain, _lowered, chain) for key, chain in chains.items()}
        waiting = {key: pool.submit(program.compile) for key, program in programs.items() if program is not None}
    with jax.ensure_compile_time_eval():
        empty = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((), jnp.float32)).compile()
        call_ns = _time_ns(functools.partial(empty, jnp.float32(0)), repeats=50)  # each takes a few microseconds
    found: dict[str, OpCost] = {}
    for key in progress.counted(list(waiting), "measuring costs"):
        cost = _tried(chains[key], _measure, chains[key], waiting.pop(key), call_ns)
        if cost is not None:
            found[key] = cost
    return found


def _tried(chain: Chain, function: Callable[..., _R], *arguments: Any) -> _R | None:
    """The answer of a function for an op; None if it fails."""
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001 - whatever JAX or a backend raises for an op that cannot run alone
        _log.info("%s could not be measured; its time is estimated: %s", chain[-1].kind, str(error).split("\n", 1)[0])
        return None


def _lowered(chain: Chain) -> Any:
    """The program of one op, not compiled."""
    types = types_from_outside(chain)

    def run(*values: Any) -> list[Any]:
        known: dict[int, Any] = dict(zip(types, values, strict=True))
        for equation in chain:
            known.update(equation.computed(known))
        return [known[v] for v in chain[-1].outputs]

    return lowered(run, list(map(spec_of, types.values())))


def _measure(chain: Chain, compiled: Future[Any], call_ns: int) -> OpCost:
    """Cost of an op, without the time of a call, which a compiled step does not make. No op is faster than its estimate.

    The workspace of an op is the bytes that XLA allocates for it alone, like transposed copies of a convolution's inputs.
    """
    program = compiled.result()
    with jax.ensure_compile_time_eval():  # these must be arrays even if the caller is traced, as `remat` is
        values = [jnp.asarray(_synthetic(aval)) for aval in types_from_outside(chain).values()]
    took_ns = _time_ns(functools.partial(program, *values)) - call_ns
    workspace_bytes = int(program.memory_analysis().temp_size_in_bytes)
    return OpCost(quantise(max(took_ns, estimated_ns(chain))), workspace_bytes)


def workspace_bytes(chain: Chain) -> int:
    """Bytes that XLA allocates for an op alone; 0 if it does not compile alone."""

    def made() -> int:
        program = _tried(chain, lambda: _lowered(chain).compile(compiler_options=quickly()))
        return 0 if program is None else int(program.memory_analysis().temp_size_in_bytes)

    return known_or_made(Store("workspaces", int, "loops are compiled in every process"), signature(chain), made)


def known_or_made(store: Store[_R], program: str, make: Callable[[], _R]) -> _R:
    """The stored value of a program on this device, or else a new one, which is stored."""
    key = hashlib.sha256(f"{program} {environment()}".encode()).hexdigest()
    known = store.get([key]).get(key)
    if known is None:
        known = make()
        store.add({key: known})
    return known


def quickly() -> dict[str, Any]:
    """Options for a program that is not to run: LLVM takes half of the time, and comes after XLA has allocated buffers."""
    return {"xla_backend_optimization_level": "0"} if jax.default_backend() == "cpu" else {}


def _synthetic(aval: Any) -> np.ndarray[Any, Any]:
    """An input for measurements: floats away from 0 and 1; for other types zeros, which are valid indices."""
    if jnp.issubdtype(aval.dtype, jnp.floating):
        flat = np.resize(np.linspace(0.1, 0.9, min(math.prod(aval.shape), 1021) or 1), aval.shape)
        return flat.astype(aval.dtype)
    return np.zeros(aval.shape, aval.dtype)


def _time_ns(run: Callable[[], Any], repeats: int = 5) -> int:
    """Time of the fastest run; 40 ms of runs are enough, because the relative error of a slow op is small."""
    jax.block_until_ready(run())
    took: list[int] = []
    while len(took) < repeats and sum(took) <= 40_000_000:
        began = time.perf_counter_ns()
        jax.block_until_ready(run())
        took.append(time.perf_counter_ns() - began)
    return min(took)
