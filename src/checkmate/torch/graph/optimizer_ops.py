"""An optimizer's step as ops of a graph, one per parameter.

``checkmate::gradient_ready`` marks a gradient in the traced program, and stands for the parameter after its update. It has no
side effect: AOTAutograd therefore leaves it in place. The pass `apply_optimizer_in_backward` replaces it by
``checkmate::update``, which overwrites the parameter by calling the optimizer's own code: arithmetic, state and ``state_dict``
are the optimizer's. In a module that runs a plan, one call of `update_parameters` may take the place of several updates.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, optim

from checkmate.torch._compat.dispatch import no_modes
from checkmate.torch.graph.storages import leaves

# The `(a!)` in the schema of `update` tells every graph pass and the planner that it overwrites the parameter.
_library = torch.library.Library("checkmate", "DEF")
_library.define("gradient_ready(Tensor parameter, Tensor gradient, int optimizer, int which) -> Tensor")
_library.define("update(Tensor(a!) parameter, Tensor gradient, int optimizer, int which) -> ()")
_library.define("unscaling(Tensor scale, Tensor norms, int optimizer) -> Tensor", tags=(torch.Tag.data_dependent_output,))

GRADIENT_READY = torch.ops.checkmate.gradient_ready.default
UPDATE = torch.ops.checkmate.update.default
UNSCALING = torch.ops.checkmate.unscaling.default

_TRACED_OPTIMIZERS = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop)
"""Optimizers whose updates are traced to ATen ops."""

_NOT_COST = ("params", "lr", "initial_lr")
"""Options of a parameter group on which the time of an update does not depend."""


class Updates:
    """An optimizer's step split into one update per parameter; ``which`` is an index into `parameters`."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.key = next(_KEYS)  # identifies it in graphs
        self.places = [
            (g, i) for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"]) if p.requires_grad
        ]
        self.step = _step_of(optimizer)
        self.skipped = False  # whether the updates of the step do nothing, since a scaled gradient has overflowed
        _LIVE[self.key] = self

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Parameters that require a gradient, in the order of their updates."""
        return [self.parameter(which) for which in range(len(self.places))]

    def parameter(self, which: int) -> torch.Tensor:
        """A parameter."""
        g, i = self.places[which]
        return self.optimizer.param_groups[g]["params"][i]

    def clone_for_measurement(self, which: int, parameter: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """The update of a parameter, on a copy of the parameter and with new state: for measuring time and workspace."""
        dummy = torch.nn.Parameter(parameter)
        shadow = _alike(self.optimizer, self.group(which), [dummy])

        def update(_: torch.Tensor, gradient: torch.Tensor) -> None:
            dummy.grad = gradient
            self.step(shadow)
            dummy.grad = None

        return update

    def group_index(self, which: int) -> int:
        """Index of the group of a parameter."""
        return self.places[which][0]

    def group(self, which: int) -> dict[str, Any]:
        """The group of a parameter."""
        return self.optimizer.param_groups[self.group_index(which)]

    def constant_options(self, group_index: int) -> dict[str, Any]:
        """Options of a group besides its learning rate and its parameters."""
        return {k: v for k, v in self.optimizer.param_groups[group_index].items() if k not in _NOT_COST}

    def state(self, which: int) -> dict[str, Any]:
        """The state of a parameter; it is created if there is none yet, as the optimizer's first step would."""
        parameter = self.parameter(which)
        return self.optimizer.state.get(parameter) or _initialise(self.optimizer, self.group(which), parameter)

    def state_specification(self, which: int) -> dict[str, torch.Tensor]:
        """Tensors like the state of a parameter, existing or not; they may be on the meta device."""
        parameter = self.parameter(which)
        known = self.optimizer.state.get(parameter) or initial_state(self.optimizer, self.group(which), parameter)
        return {name: tensor for name, tensor in known.items() if isinstance(tensor, torch.Tensor)}

    def describe(self, which: int) -> str:
        """Text of all options on which the cost of an update depends besides shape and type."""
        kind = type(self.optimizer)
        return f"{kind.__module__}.{kind.__qualname__}{sorted(self.constant_options(self.group_index(which)).items())}"


def _step_of(optimizer: optim.Optimizer) -> Callable[[optim.Optimizer], object]:
    """The step of a kind of optimizers.

    `Optimizer.profile_hook_step` wraps it; the wrapper would run hooks and a profiler range per parameter. The function inside
    keeps `_use_grad_for_differentiable`, which disables gradients.
    """
    step = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def _is_of_torch(optimizer: optim.Optimizer) -> bool:
    return getattr(optim, type(optimizer).__name__, None) is type(optimizer)


def _alike(optimizer: optim.Optimizer, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> optim.Optimizer:
    """A new optimizer of the same kind for other parameters, with the options of a group."""
    if _is_of_torch(optimizer):
        alike = type(optimizer)(parameters)  # type: ignore[call-arg]  # Adagrad makes its state here, in PyTorch 2.11 only here
    else:
        alike = object.__new__(type(optimizer))
        known: dict[int, Any] = {id(p): p.new_empty(0) for g in optimizer.param_groups for p in g["params"]}
        own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups")}
        vars(alike).update(copy.deepcopy(own, known), state=defaultdict(dict))  # no copy has the weights
    alike.param_groups = [{**group, "params": [*parameters]}]
    return alike


def initial_state(optimizer: optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """The state that an optimizer's first step would create for a parameter; the optimizer is not changed."""
    if not _is_of_torch(optimizer):
        parameter = torch.empty_like(parameter, device="meta")
        parameter.grad = torch.empty_like(parameter)
        shadow = _alike(optimizer, group, [parameter])
        _step_of(optimizer)(shadow)
        return shadow.state[parameter]
    shadow = _alike(optimizer, group, [parameter])
    if parameter.is_meta and group.get("fused"):  # a fused one refuses meta; its step counter is on the device of the parameter
        group = {**group, "fused": False, "capturable": True}
    return _initialise(shadow, group, parameter)


def _initialise(optimizer: optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Create the state of a parameter as the optimizer's first step would, and return it.

    SGD makes its momentum in the first step, equal to the gradient: zeros become the gradient too, without dampening.
    """
    if type(optimizer) is optim.SGD:
        if group["momentum"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return optimizer.state[parameter]
    initialise = optimizer._init_group  # type: ignore[attr-defined]
    lists = [[] for _ in list(inspect.signature(initialise).parameters)[1:]]
    before = parameter.grad
    parameter.grad = parameter.new_zeros(()).expand(parameter.shape)
    try:
        initialise({**group, "params": [parameter]}, *lists)
    finally:
        parameter.grad = before
    return optimizer.state[parameter]


_KEYS = itertools.count()
_LIVE: weakref.WeakValueDictionary[int, Updates] = weakref.WeakValueDictionary()


def updates_of(key: int) -> Updates:
    """The `Updates` with a key by which nodes of a graph refer to it."""
    return _LIVE[key]


def in_loops(graph: fx.Graph) -> bool:
    """Whether an optimizer of a graph updates one parameter after the other in each call, as it does by default on a CPU."""
    groups = [updates_of(n.args[2]).group(n.args[3]) for n in graph.find_nodes(op="call_function", target=UPDATE)]
    return any(not g.get("fused") and not g.get("foreach", False) and g["params"][0].device.type == "cpu" for g in groups)


@torch.library.register_fake("checkmate::gradient_ready", lib=_library)
def _gradient_ready_fake(parameter: torch.Tensor, gradient: torch.Tensor, optimizer: int, which: int) -> torch.Tensor:
    return torch.empty_like(parameter)


@torch.library.register_fake("checkmate::unscaling", lib=_library)
def _unscaling_fake(scale: torch.Tensor, norms: torch.Tensor, optimizer: int) -> torch.Tensor:
    return torch.empty_like(scale)


@torch.library.impl("checkmate::unscaling", "CompositeExplicitAutograd", lib=_library)
def _unscaling(scale: torch.Tensor, norms: torch.Tensor, optimizer: int) -> torch.Tensor:
    """The factor that undoes a scale. The updates that follow are skipped if the norm of a gradient is not finite."""
    _LIVE[optimizer].skipped = not bool(norms.isfinite().all())
    return scale.double().reciprocal().float()


def update_parameters(gradients: Sequence[torch.Tensor], optimizer: int, which: Sequence[int]) -> None:
    """Update some parameters of an optimizer in one call of its step, on copies of their groups that have only them."""
    updates = _LIVE[optimizer]
    if updates.skipped:
        return
    groups, chosen = updates.optimizer.param_groups, dict[int, list[torch.Tensor]]()
    for (g, i), gradient in zip([updates.places[k] for k in which], gradients, strict=True):
        parameter = groups[g]["params"][i]
        parameter.grad = gradient
        chosen.setdefault(g, []).append(parameter)
    updates.optimizer.param_groups = [{**groups[g], "params": parameters} for g, parameters in chosen.items()]
    try:
        updates.step(updates.optimizer)
    finally:
        updates.optimizer.param_groups = groups
        for parameter in itertools.chain(*chosen.values()):
            parameter.grad = None


def updates_parameters_separately(optimizer: optim.Optimizer) -> bool:
    """Whether the update of a parameter does not depend on other parameters, and its state is known before the first step.

    Optimizers of torch with a method ``_init_group`` prepare each parameter by it. Others are tried, on small parameters.
    """
    if _is_of_torch(optimizer):
        return hasattr(optimizer, "_init_group")
    groups = [group for group in optimizer.param_groups if group["params"]]
    options = [repr([type(optimizer), *((k, v) for k, v in g.items() if k not in _NOT_COST)]) for g in groups]
    if _TRIED.get(optimizer, ([], False))[0] != options:
        with no_modes(), torch.enable_grad():
            _TRIED[optimizer] = options, all(_updates_separately(optimizer, group) for group in groups)
    return _TRIED[optimizer][1]


_TRIED: weakref.WeakKeyDictionary[optim.Optimizer, tuple[list[str], bool]] = weakref.WeakKeyDictionary()
"""Optimizers that were tried, with the options of their groups, and whether they update each parameter separately."""


def _updates_separately(optimizer: optim.Optimizer, group: dict[str, Any]) -> bool:
    """Try a group: three steps of all parameters in one call, and the same in a call for each; and one on the meta device.

    There is one parameter of each number of dimensions, and two at least. The calls for each are on copies of the group, as in
    `update_parameters`: an optimizer that counts its steps in the group has other results.
    """
    kinds = [*{p.ndim: p for p in group["params"]}.values()]
    tried = kinds if len(kinds) > 1 else 2 * kinds
    random = torch.Generator().manual_seed(0)

    def like(p: torch.Tensor) -> torch.Tensor:
        made = torch.randn([min(n, 64) for n in p.shape], generator=random, device="cpu")
        return made.to("cpu" if p.is_meta else p.device, p.dtype)

    values, gradients = [*map(like, tried)], [[*map(like, tried)] for _ in range(3)]
    before, outcomes = torch.get_rng_state(), list[list[torch.Tensor]]()
    try:
        for calls in ([[*range(len(tried))]], [[k] for k in reversed(range(len(tried)))]):
            parameters = [torch.nn.Parameter(value.clone()) for value in values]
            alike = _alike(optimizer, group, parameters)
            for given in gradients:
                for call in calls:
                    if len(calls) > 1:
                        alike.param_groups = [{**group, "params": [parameters[k] for k in call]}]
                    for k in call:
                        parameters[k].grad = given[k].clone()
                    _step_of(optimizer)(alike)
            outcomes.append([*parameters, *(t for p in parameters for t in leaves(alike.state[p]))])
            elsewhere = [value for name, value in vars(alike).items() if name not in ("state", "param_groups", "defaults")]
            if leaves([elsewhere, *map(vars, parameters)]):
                return False  # the bytes of this state would not be known
        expected = [t.nbytes for value in values for t in leaves(initial_state(optimizer, group, value))]
        equal = all(map(torch.equal, *outcomes)) and torch.equal(before, torch.get_rng_state())
        return equal and expected == [t.nbytes for t in outcomes[0][len(tried) :]]
    except Exception:  # noqa: BLE001 - whatever the code of an optimizer raises if it is called in another way
        return False


def inseparable_reason(optimizer: optim.Optimizer) -> str | None:
    """Why an optimizer's step cannot be split into one update per parameter, whatever has a gradient; None if it can."""
    name = type(optimizer).__name__
    if not updates_parameters_separately(optimizer):
        return f"{name} was not found to update each parameter independently of the others"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} has differentiable=True"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{name} has hooks on its step, which would run once for every parameter"
    return None


def unsupported_reason(optimizer: optim.Optimizer, model: torch.nn.Module) -> str | None:
    """Why the step of a model cannot have its optimizer's updates in it, or None if it can."""
    if (reason := inseparable_reason(optimizer)) is not None:
        return reason
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in mine]
    if others:
        return f"{type(optimizer).__name__} does not update {others[0]!r}, whose gradient must therefore be kept"
    if hooked := [n for n, p in model.named_parameters() if has_gradient_hook(p)]:
        return f"{hooked[0]!r} has a hook that is called with its gradient"
    return None


def has_gradient_hook(parameter: torch.Tensor) -> bool:
    """Whether a parameter has a hook on its gradient: autograd calls it, and a graph with the backward does not."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def uncompiled_reason(optimizer: optim.Optimizer) -> str | None:
    """Why an optimizer's updates cannot be traced to ATen ops for a compiler, or None if they can."""
    name = type(optimizer).__name__
    if type(optimizer) not in _TRACED_OPTIMIZERS:
        known = ", ".join(kind.__name__ for kind in _TRACED_OPTIMIZERS)
        return f"{name} is not among the optimizers whose updates are compiled: {known}"
    if any(group.get("dampening") for group in optimizer.param_groups):
        return f"{name} has dampening, so that its first step is another one than all that follow"
    for group in optimizer.param_groups:
        if tensors := [k for k, v in group.items() if k not in _NOT_COST and leaves(v)]:
            return f"{tensors[0]!r} of {name} is a tensor, and would be a constant of the compiled step"
    return None


def temporary_count(optimizer: optim.Optimizer, group: dict[str, Any]) -> int | None:
    """Temporary tensors of a parameter's size that an update allocates on a CUDA device; None if unknown.

    Read from ``torch/optim/sgd.py`` and ``adam.py``, ``foreach`` implementation: each of weight decay, Nesterov momentum
    and ``maximize`` makes a new gradient; Adam makes a denominator. AdamW decays the parameter in place.
    """
    decays = bool(group.get("weight_decay")) and not isinstance(optimizer, optim.AdamW)
    if type(optimizer) is optim.SGD:
        return decays + bool(group["nesterov"]) + bool(group["maximize"])
    if type(optimizer) in (optim.Adam, optim.AdamW):
        return 1 + decays + bool(group["maximize"])
    return None
