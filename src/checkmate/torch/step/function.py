"""A training step as a function that takes its gradients itself, traced with all of them as one flat graph.

The function runs on tensors without data, with autograd and `torch.func`, and each op of its forwards and backwards is recorded.
Its Python code runs for a trace and never again: all that it reads besides tensors is constant. A call for which an argument, or
a module or a number in the closure or the globals of the function, has changed is traced again.

``optimizer.step()`` in the function records an update of each parameter that has a gradient.
"""

from __future__ import annotations

import dis
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import fx, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from checkmate.core.errors import OptionError
from checkmate.torch._compat.dynamo import DynamoTransparentError
from checkmate.torch._compat.flat import FlatTrace
from checkmate.torch.graph.optimizer_ops import GRADIENT_READY, Updates, has_gradient_hook, inseparable_reason

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class FlatProgram:
    """The compiled form of a function: ``program(args, kwargs)`` is ``function(*args, **kwargs)``, with detached results.

    ``told`` makes the error of a function that cannot be traced.
    """

    def __init__(self, function: Callable[..., Any], backend: Backend, told: Callable[[Exception], Exception]) -> None:
        self._function, self._backend, self._told = function, backend, told
        self._known: dict[tuple[Any, ...], _FlatGraph] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the graph for arguments like these, which is traced and compiled at its first call."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        read = list(_reads(self._function))
        for tensor in _parameters(read):
            _refuse_gradient(tensor)
        key = (str(structure), *map(_layout, leaves), *(_constant(value) for _, value in read))
        if key not in self._known:
            self._known[key] = self._traced(leaves, structure, read)
        return self._known[key]([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])

    def _traced(self, leaves: Sequence[Any], structure: Any, read: Sequence[tuple[str, Any]]) -> _FlatGraph:
        constants = {name: _constant(value) for name, value in read}
        try:
            try:
                flat = self._recorded(leaves, structure, read)
            except RuntimeError as error:
                if "meta" not in str(error):
                    raise
                flat = self._recorded(leaves, structure, read, stored_zeros=True)
        except Exception as error:
            raise self._told(error) from error
        changed = [name for name, value in _reads(self._function) if constants.get(name) != _constant(value)]
        if changed:
            raise OptionError(
                f"the function changes {changed[0].removeprefix('the function.')!r}, or a number in it, and its graph would not",
                hint="change it outside of the function, which runs once, to be traced",
            )
        with torch.no_grad():
            try:
                flat.run = self._backend(flat.module, [*(t for t in leaves if isinstance(t, torch.Tensor)), *flat.trace.further])
            except DynamoTransparentError as error:
                raise error.error from None
        return flat

    def _recorded(
        self, leaves: Sequence[Any], structure: Any, read: Sequence[tuple[str, Any]], *, stored_zeros: bool = False
    ) -> _FlatGraph:
        trace, steps = FlatTrace(_refuse_gradient, stored_zeros=stored_zeros), _Steps()
        flat = _FlatGraph(trace, steps)

        def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
            rest = iter(tensors)
            given = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(given, structure)
            return flat.outputs(self._function(*args, **kwargs))

        with _restored(_parameters(read), trace), steps.recorded():
            flat.module = trace.graph(function, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        return flat


class _FlatGraph:
    """The graph of one trace."""

    module: fx.GraphModule
    run: Callable[..., Sequence[Any]]

    def __init__(self, trace: FlatTrace, steps: _Steps) -> None:
        self.trace, self._steps = trace, steps
        self._left: list[torch.Tensor] = []  # parameters whose gradients stay, because the function does not update them

    def outputs(self, results: Any) -> list[torch.Tensor]:
        """The results of the graph: the tensors that the function returns, and gradients that stay."""
        self._leaves, self._structure = pytree.tree_flatten(results)
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in self._leaves]
        tensors = [leaf.detach() for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        updated = self._steps.updated
        self._left = [t for t in self.trace.further if t.is_leaf and t.grad is not None and id(t) not in updated]
        return [*tensors, *(t.grad.detach() for t in self._left)]  # type: ignore[union-attr]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        for tensor in self.trace.further:
            _refuse_gradient(tensor)
        with torch.no_grad():
            made = iter(self.run(*tensors, *self.trace.further))
        leaves = [next(made) if is_tensor else leaf for is_tensor, leaf in zip(self._is_tensor, self._leaves, strict=True)]
        for tensor, gradient in zip(self._left, made, strict=True):
            tensor.grad = gradient
        self._steps.ran()
        return pytree.tree_unflatten(leaves, self._structure)


class _Steps:
    """The steps of optimizers in a function."""

    def __init__(self) -> None:
        self.updated: set[int] = set()  # identities of the parameters
        self._updates: dict[optim.Optimizer, Updates] = {}
        self._options: dict[optim.Optimizer, str] = {}
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context in which a step of any optimizer records updates in the trace, and changes nothing."""
        handles = register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for optimizer, options in self._options.items():
            if options != _options(optimizer):
                raise OptionError(
                    f"the function changes options of {type(optimizer).__name__}, as a scheduler of the learning rate does",
                    hint="call scheduler.step() after the step: options may change from step to step",
                )

    def ran(self) -> None:
        """Note a step. Learning-rate schedulers warn unless the optimizer's step() was called before theirs."""
        for optimizer in self._updates:
            optimizer._opt_called = True  # type: ignore[attr-defined]

    def _before(self, optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record the updates; the step then finds no gradient and does nothing."""
        name = type(optimizer).__name__
        reason = inseparable_reason(optimizer) or (f"{name} is given a closure" if len(args) > 1 or kwargs else None)
        if reason is not None:
            raise OptionError(
                f"the step of an optimizer cannot be in the graph of a function: {reason}",
                hint="take the step after the function, without optimizer.step() in it: its gradients are then in .grad",
            )
        if optimizer not in self._updates:
            self._updates[optimizer], self._options[optimizer] = Updates(optimizer), _options(optimizer)
        updates = self._updates[optimizer]
        with torch.no_grad():
            for which, parameter in enumerate(updates.parameters):
                gradient = parameter.grad
                if gradient is not None:
                    parameter.copy_(GRADIENT_READY(parameter, gradient, updates.key, which))
                    self.updated.add(id(parameter))
                    self._gradients.append((parameter, gradient))
                    parameter.grad = None

    def _after(self, *_: Any) -> None:
        while self._gradients:
            parameter, gradient = self._gradients.pop()
            parameter.grad = gradient


@contextmanager
def _restored(parameters: Iterable[torch.Tensor], trace: FlatTrace) -> Iterator[None]:
    """Context that leaves no gradients of a trace, and restores which parameters require one."""
    before = [(p, p.requires_grad) for p in parameters]
    try:
        yield
    finally:
        for tensor in itertools.chain((p for p, _ in before), trace.further):
            tensor.grad = None if tensor.is_leaf else tensor.grad
        for parameter, required in before:
            parameter.requires_grad_(required)


def _refuse_gradient(tensor: torch.Tensor) -> None:
    if tensor.is_leaf and tensor.grad is not None:
        raise OptionError(
            "gradients of an earlier backward are there, and the step would not add to them",
            hint="call optimizer.zero_grad(set_to_none=True) before the step; in the function it is not needed",
        )


def _options(optimizer: optim.Optimizer) -> str:
    return repr([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])


def owners(function: Callable[..., Any]) -> tuple[list[nn.Module], list[optim.Optimizer]]:
    """The modules and the optimizers that a function reads."""
    values = [value for _, value in _reads(function)]
    return [v for v in values if isinstance(v, nn.Module)], [v for v in values if isinstance(v, optim.Optimizer)]


def _parameters(read: Iterable[tuple[str, Any]]) -> Iterator[torch.Tensor]:
    """The parameters of the modules and optimizers among values."""
    for _, value in read:
        if isinstance(value, nn.Module):
            yield from value.parameters()
        elif isinstance(value, optim.Optimizer):
            yield from (p for group in value.param_groups for p in group["params"])


def _layout(value: Any) -> Any:
    """The constants of an argument in a trace."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    return _constant(value)


def _constant(value: Any) -> Any:
    """The constants of a value in a trace, to compare with those in a later call."""
    if isinstance(value, torch.Tensor):
        return id(value), *_layout(value), has_gradient_hook(value)
    if isinstance(value, nn.Module):
        found = list[Any]()
        for module in value.modules():
            found += [v for v in vars(module).values() if isinstance(v, _PLAIN)]
            held = (*module._parameters.values(), *module._buffers.values())
            found += [(id(t), t.requires_grad, has_gradient_hook(t)) for t in held if t is not None]
        return tuple(found)
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)


def _reads(function: Any) -> Iterator[tuple[str, Any]]:
    """All that a function may read besides its arguments, by name: closure, globals and defaults, and those of functions in them.

    Of an object, such as a trainer of which the function is a method, the attributes that its code names.
    """
    known, stack = set[int](), [("the function", function, frozenset[str]())]
    while stack:
        name, value, attributes = stack.pop()
        if isinstance(value, _PLAIN):
            yield name, value
            continue
        if id(value) in known:
            continue
        known.add(id(value))
        inside: Iterable[tuple[Any, Any]] = ()
        owner = value if isinstance(value, (FunctionType, type)) else type(value)
        if isinstance(value, functools.partial):
            inside = [("func", value.func), *enumerate(value.args), *value.keywords.items()]
        elif isinstance(value, MethodType):
            attributes = _names(value.__func__.__code__)[1]
            inside = [("__func__", value.__func__), ("__self__", value.__self__)]
        elif isinstance(value, (list, tuple)):
            inside = enumerate(value)
        elif isinstance(value, dict):
            inside = value.items()
        elif isinstance(value, _OBJECTS) or owner.__module__.partition(".")[0] in _LIBRARIES:
            yield name, value
        elif isinstance(value, FunctionType):
            read, attributes = _names(value.__code__)
            inside = [*_closure(value), *enumerate(value.__defaults__ or ())]
            inside += [(n, value.__globals__[n]) for n in read if n in value.__globals__]
        else:
            called = vars(owner).get("__call__")
            attributes |= _names(called.__code__)[1] if isinstance(called, FunctionType) else frozenset()
            inside = [(n, v) for n, v in getattr(value, "__dict__", {}).items() if n in attributes]
            yield name, value
        stack += [(f"{name}.{n}", v, attributes) for n, v in inside]


_PLAIN = (bool, int, float, str, type(None))
_OBJECTS = (torch.Tensor, nn.Module, optim.Optimizer, ModuleType)
_LIBRARIES = ("builtins", "torch", "checkmate")


def _closure(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a variable without a value yet
            yield name, cell.cell_contents


@functools.cache
def _names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The globals and the attributes that the code of a function names, with that of functions that it defines."""
    inside = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    found = [(i.opname, str(i.argval)) for i in dis.get_instructions(code)]
    read = {name for kind, name in found if kind == "LOAD_GLOBAL"}
    attributes = {name for kind, name in found if kind in ("LOAD_ATTR", "LOAD_METHOD")}
    return frozenset(read.union(*(g for g, _ in inside))), frozenset(attributes.union(*(a for _, a in inside)))
