"""The Dynamo backend: ``torch.compile(model, backend="checkmate", options={"budget": "8GiB"})``."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from checkmate.core.errors import CheckmateError, GraphError, OptionError, WrongGraphError
from checkmate.frontend import progress
from checkmate.torch._compat.aot import BoxedRun, aot_autograd, aot_cache_disabled, boxed, functorch_config, regions_as_hints
from checkmate.torch._compat.dynamo import DynamoTransparentError, enter_around_calls
from checkmate.torch.compilation.call import NO_GRADIENT, NO_GRADIENT_HINT, CompiledCalls, counted
from checkmate.torch.compilation.compilation import Compilation
from checkmate.torch.compilation.resident_account import Hooks
from checkmate.torch.distributed.consensus import broadcasting_failures
from checkmate.torch.graph.symbolic import bound_dynamic_shapes, has_dynamic_sizes
from checkmate.torch.options import Options
from checkmate.torch.partition.split import partition, plan_whole_step
from checkmate.torch.passes.prepare import inline_regions

_log = logging.getLogger("checkmate.torch")


def checkmate(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Backend for ``torch.compile`` that keeps a memory budget.

    Args:
        gm: The graph that Dynamo traced.
        example_inputs: Its inputs, as Dynamo traced them.
        mode: The ``mode`` of ``torch.compile``, like the option of that name.
        options: The options, by name; see `Options`.
        kwargs: Options as keywords.

    Returns:
        The compiled graph.

    Raises:
        CheckmateError: An option is wrong, or no plan keeps the budget; the model is unchanged.
    """
    try:
        parsed = _parsed(mode, options, kwargs)
    except CheckmateError as error:
        raise DynamoTransparentError(error) from error
    if parsed.budget is None and parsed.plan is None:
        _warn_without_budget()
    return counted(compile_graph(gm, example_inputs, parsed))


@functools.cache
def _warn_without_budget() -> None:
    _log.warning('the backend was given no budget and keeps everything; give it one: options={"budget": "8GiB"}')


def _parsed(
    mode: str | None = None, options: Mapping[str, Any] | None = None, keywords: Mapping[str, Any] | None = None
) -> Options:
    """The options of a call of ``torch.compile``; parsed once for all its calls and graphs."""
    if options is not None and not isinstance(options, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(f"options={options!r} is not a mapping", hint='give options={"budget": "8GiB"}')
    given = {**(options or {}), **(keywords or {}), **({} if mode is None else {"mode": mode})}
    known = [p for o, copy, p in _PARSED if o is options and copy == given]
    parsed = known[0] if known else Options.of(given)
    if not known and options is not None:
        _PARSED.append((options, given, parsed))
    return parsed


_PARSED: deque[tuple[Mapping[str, Any], dict[str, Any], Options]] = deque(maxlen=16)
"""Mappings of options from users, with a copy of their content and the parsed options."""


def _calls_of(given: Mapping[str, Any]) -> CompiledCalls | None:
    """Context for calls of a function compiled with this backend; None without a budget or a plan to keep."""
    keywords = {name: value for name, value in given.items() if name not in ("mode", "options")}
    options = _parsed(given.get("mode"), given.get("options"), keywords)
    return None if options.budget is None and options.plan is None else CompiledCalls(options)


enter_around_calls(checkmate, _calls_of)


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    hooks: Hooks | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo."""
    hooks = Hooks() if hooks is None else hooks
    bound_dynamic_shapes(example_inputs)
    inline_regions(gm)
    try:
        compilation = Compilation(gm.graph, example_inputs, options, hooks)
        with progress.shown("capturing"), broadcasting_failures(compilation.ranks):
            if hooks.target is not None:
                hooks.target.lower(gm)
            run = None if options.compiler == "eager" else _by_inductor(gm, example_inputs, compilation)
            if run is None:
                if options.compiler != "eager":  # op by op, other regions may run in pieces
                    options = dataclasses.replace(options, compiler="eager", mode="default", inductor_options={})
                    compilation = Compilation(gm.graph, example_inputs, options, hooks)
                run = _as_planned(gm, example_inputs, compilation)
            compilation.agree_to_run()
            return run
    except WrongGraphError as error:
        raise DynamoTransparentError(_with_command(error, hooks)) from error
    except CheckmateError as error:
        raise DynamoTransparentError(error) from error


def _with_command(error: WrongGraphError, hooks: Hooks) -> WrongGraphError:
    """The error for a plan of another graph, with the command that captures this graph."""
    kind = " --optimizer adamw" if hooks.whole else " --plain-loop" if hooks.inference else ""
    return WrongGraphError(
        error.message,
        hint=f"plan the graph that is compiled here, as `checkmate capture FILE.py:build{kind}` captures it; or give a budget",
    )


def _as_planned(gm: fx.GraphModule, example_inputs: Sequence[Any], compilation: Compilation) -> Callable[..., Any]:
    """Compile the graph op by op, to run in the exact order of its plan."""
    task = compilation.task
    compile_with_aot = aot_autograd(
        fw_compiler=lambda module, inputs: compilation.executable.forward(boxed(module), module),
        bw_compiler=lambda module, inputs: compilation.executable.backward(boxed(module)),
        inference_compiler=lambda module, inputs: _without_backward(module, compilation),
        partition_fn=functools.partial(partition, task=task),
        keep_inference_input_mutations=True,
    )
    # Another plan, with other buffers, may replace this one. No buffer is reused anyway.
    with functorch_config.patch(donated_buffer=False), regions_as_hints(), aot_cache_disabled():
        return compilation.executable.differentiable(compile_with_aot(gm, example_inputs))


def _without_backward(module: fx.GraphModule, compilation: Compilation) -> BoxedRun:
    """Compile a graph without a backward in AOTAutograd: a whole step, or a graph in which nothing requires a gradient."""
    if compilation.hooks.whole:
        return compilation.executable.forward(boxed(plan_whole_step(module, compilation.task)))
    _refuse_inference(compilation.hooks)
    task = compilation.task_without_backward
    return boxed(module) if task is None else compilation.executable.forward(boxed(plan_whole_step(module, task)))


def _refuse_inference(hooks: Hooks) -> None:
    if not hooks.inference:
        raise GraphError(NO_GRADIENT, hint=NO_GRADIENT_HINT)


def _by_inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], compilation: Compilation) -> Callable[..., Any] | None:
    """Compile the graph by Inductor; None if its sizes vary, or the measured peak of every compilation exceeds the budget."""
    if has_dynamic_sizes(example_inputs):
        _log.warning(
            "Inductor plans fixed sizes only, and sizes of this graph are dynamic: compiled by 'eager'; with dynamic=False "
            "Inductor compiles every new size"
        )
        return None
    # These imports take a second, and eager does not need them.
    from checkmate.torch.inductor.compile import compile_if_it_fits

    compiled = compile_if_it_fits(gm, example_inputs, compilation)
    if compiled is None:
        return None
    if compiled.planned is None:
        _refuse_inference(compilation.hooks)
        return compiled.run
    interface, result = compiled.planned
    if compiled.memory is not None and compiled.whole is None:
        compilation.executable.guard(interface, compiled.joint, result, compiled.memory, replaceable=False)
    compiled.forward.run = compilation.executable.forward(compiled.forward.run)
    compiled.backward.run = compilation.executable.backward(compiled.backward.run)
    compilation.hooks.planned(interface, result)
    return compiled.run
