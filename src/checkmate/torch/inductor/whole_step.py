"""Whole steps under Inductor: forward, backward and updates in one graph, in the order of a plan.

``checkmate::update`` is one op, which Inductor could neither compile nor fuse with the op that computes the gradient. It is
replaced in a graph that already has the order of its plan. The optimizer's ``step`` is traced for one parameter, as in
`torch.compile`, with state and learning rate as inputs. Parameter and state are overwritten at the place of the update.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from checkmate.core.errors import OptionError
from checkmate.cost.store import OpCost
from checkmate.torch._compat import replaced
from checkmate.torch._compat.aot import BoxedRun
from checkmate.torch._compat.dispatch import detect_fake_mode, no_modes
from checkmate.torch._compat.inductor import as_if_compiling, trace_functionally
from checkmate.torch.graph.optimizer_ops import UPDATE, Updates, updates_of
from checkmate.torch.graph.storages import leaves, storage_key
from checkmate.torch.graph.traced import retraced
from checkmate.torch.inductor.repeats import IN_PLACE
from checkmate.torch.partition.split import Task, plan_whole_step

WHOLE_STEP_CONFIG: dict[str, Any] = {
    "reorder_for_locality": False,  # only done to graphs that have no separate backward; it would undo the order of the plan
    "triton.cudagraphs": False,  # learning rates are inputs on the CPU, and Inductor makes no CUDA graph with one
}
"""Decisions of Inductor on whole steps that are left to the plan."""


class WholeStep:
    """A compiled whole step, with the optimizer's state and learning rates as inputs after those of the traced graph."""

    run: BoxedRun  # what Inductor compiled

    def __init__(self) -> None:
        self._groups: Sequence[_Group] = ()
        self._parameters: Sequence[_ParameterState] = ()
        self._known: list[list[torch.Tensor]] = []  # the states at the last step, which need not be checked again
        self._trial: list[Any] | None = None

    def plan(self, module: fx.GraphModule, task: Task) -> tuple[fx.GraphModule, list[torch.Tensor]]:
        """The module that runs a plan, with all updates as ATen ops, and fake tensors for its additional inputs."""

        def costs(nodes: Sequence[fx.Node]) -> list[OpCost]:
            # Inductor computes each update in one loop, without temporary tensors.
            found = zip(nodes, task.costs(nodes), strict=True)
            return [cost._replace(workspace_bytes=0) if n.target is UPDATE else cost for n, cost in found]

        planned = plan_whole_step(module, dataclasses.replace(task, costs=costs, most_workspace_bytes=None))
        _refuse_shared_storages(planned.graph)
        writer = _UpdateWriter(planned.graph)
        for node in planned.graph.find_nodes(op="call_function", target=UPDATE):
            writer.replace(node)
        planned.graph.lint()
        planned.recompile()
        self._groups, self._parameters = writer.groups, writer.parameters
        self._known = [[] for _ in writer.parameters]
        return planned, writer.fakes

    def __call__(self, args: list[Any]) -> Any:
        """Run the step."""
        args += self._state() if self._trial is None else self._trial
        return self.run(args)

    def _state(self) -> list[torch.Tensor]:
        rates = [group.learning_rate() for group in self._groups]
        self._known = [each.tensors(known) for each, known in zip(self._parameters, self._known, strict=True)]
        return [*rates, *(t for known in self._known for t in known)]

    def on_trial(self) -> AbstractContextManager[None]:
        """Run on a state of zeros inside; the optimizer's state does not change."""
        rates = [torch.zeros((), dtype=torch.float64) for _ in self._groups]
        return replaced(self, "_trial", [*rates, *(t for each in self._parameters for t in each.zeros())])


@dataclasses.dataclass(eq=False, slots=True)
class _Group:
    """A group of parameters of an optimizer, with its options when the step was compiled."""

    key: int  # of its `Updates`
    index: int
    options: dict[str, Any]
    rate: torch.Tensor | None = None  # a real one, made at the first step

    def learning_rate(self) -> torch.Tensor:
        """The learning rate now; the other options are constants of the compiled step."""
        now = updates_of(self.key).constant_options(self.index)
        if now != self.options:
            name = next(n for n in self.options if now.get(n) != self.options[n])
            raise OptionError(
                f"{name}={self.options[name]!r} of the optimizer is a constant of the compiled step; it is now {now.get(name)!r}",
                hint="compile the step again after the change, or with compiler='eager'; the learning rate can change freely",
            )
        if self.rate is None:
            self.rate = torch.zeros((), dtype=torch.float64)
        return self.rate.fill_(float(updates_of(self.key).optimizer.param_groups[self.index]["lr"]))


@dataclasses.dataclass(frozen=True, slots=True)
class _ParameterState:
    """The state of one parameter."""

    key: int  # of its `Updates`
    index: int
    like: dict[str, tuple[Any, ...]]  # name of each tensor to shape, strides, type and device

    def tensors(self, known: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The present state, created if there is none yet; tensors that are known already are not checked again."""
        state = updates_of(self.key).state(self.index)
        tensors = [state.get(name) for name in self.like]
        if len(known) == len(tensors) and all(a is b for a, b in zip(tensors, known, strict=True)):
            return list(known)
        for tensor, (name, like) in zip(tensors, self.like.items(), strict=True):
            if tensor is None or _signature(tensor) != like:
                found = "missing" if tensor is None else f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
                raise OptionError(
                    f"the optimizer's state {name!r} is {found}; the step was compiled for {list(like[0])} {like[2]} on "
                    f"{like[3]}",
                    hint="compile the step again after loading a state of another type or layout, or on another device",
                )
        return tensors  # type: ignore[return-value]

    def zeros(self) -> list[torch.Tensor]:
        """New tensors like the state."""
        return [torch.empty_strided(s, d, dtype=t, device=v).zero_() for s, d, t, v in self.like.values()]


def _signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, strides, type and device of a tensor."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


_CONVERT = torch.ops.prims.convert_element_type.default
_REALIZE = "inductor_realize_to_strides"
_TRACED_AS = {"foreach": False, "fused": False, "capturable": True}
"""Options of a group while its update is traced: one parameter at a time, and nothing read back to Python."""


def _refuse_shared_storages(graph: fx.Graph) -> None:
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    shared = Counter(key for n in inputs for key in {storage_key(t) for t in leaves(n.meta.get("val"))})
    for update in graph.find_nodes(op="call_function", target=UPDATE):
        parameter = update.args[0]
        if any(shared[storage_key(t)] > 1 for t in leaves(parameter.meta["val"])):
            raise OptionError(
                f"the parameter {parameter.name!r} shares its storage with another input of the step, and Inductor orders reads "
                "and writes of inputs as if they were separate",
                hint="use compiler='eager', or give every parameter a separate storage",
            )


class _UpdateWriter:
    """Writes the ops of updates into a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.groups: list[_Group] = []
        self.parameters: list[_ParameterState] = []
        self.fakes: list[torch.Tensor] = []  # like the additional inputs: learning rates, and then states
        mode = detect_fake_mode(leaves([n.meta.get("val") for n in graph.nodes]))
        assert mode is not None
        self._graph, self._mode = graph, mode
        self._traced: dict[Any, fx.Graph] = {}
        self._rates: dict[tuple[int, int], fx.Node] = {}
        self._last_input = graph.find_nodes(op="placeholder")[-1]
        for node in graph.find_nodes(op="call_function", target=UPDATE):
            key, index = cast("tuple[int, int]", node.args[2:])
            group = updates_of(key).group_index(index)
            if (key, group) not in self._rates:
                like = torch.empty((), dtype=torch.float64)
                self._rates[key, group] = self._input(f"learning_rate_{len(self._rates)}", like)
                self.groups.append(_Group(key, group, updates_of(key).constant_options(group)))

    def replace(self, update: fx.Node) -> None:
        """Write the ops of an update in its place."""
        parameter, gradient, key, index = cast("tuple[fx.Node, fx.Node, int, int]", update.args)
        updates, group_index = updates_of(key), updates_of(key).group_index(index)
        with no_modes():
            like = updates.state_specification(index)
        states = [self._input(f"{name}_{len(self.parameters)}", tensor) for name, tensor in like.items()]
        self.parameters.append(_ParameterState(key, index, {name: _signature(t) for name, t in like.items()}))
        inputs = [parameter, gradient, self._rates[key, group_index], *states]
        known = (key, group_index, tuple(like), *(_signature(n.meta["val"]) for n in inputs))
        if known not in self._traced:
            self._traced[known] = self._trace(updates, index, tuple(like), [n.meta["val"] for n in inputs])
        with self._graph.inserting_before(update):
            self._copy(self._traced[known], inputs)
        self._graph.erase_node(update)

    def _input(self, name: str, like: torch.Tensor) -> fx.Node:
        with self._mode:
            fake = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        with self._graph.inserting_after(self._last_input):
            node = self._last_input = self._graph.placeholder(name)
        node.meta["val"] = fake
        self.fakes.append(fake)
        return node

    def _trace(self, updates: Updates, index: int, names: Sequence[str], like: Sequence[torch.Tensor]) -> fx.Graph:
        shadow = copy.copy(updates.optimizer)
        group = updates.group(index)
        options = {**group, **{k: v for k, v in _TRACED_AS.items() if k in group}}

        def step(parameter: torch.Tensor, gradient: torch.Tensor, rate: torch.Tensor, *states: torch.Tensor) -> None:
            parameter.grad = gradient
            shadow.param_groups = [{**options, "lr": rate, "params": [parameter]}]
            shadow.state = defaultdict(dict, {parameter: dict(zip(names, states, strict=True))})
            with as_if_compiling(), TensorFactors():
                updates.step(shadow)
            parameter.grad = None

        with self._mode, torch.no_grad():
            new = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in like]
            return trace_functionally(step, new)

    def _copy(self, traced: fx.Graph, inputs: Sequence[fx.Node]) -> None:
        env: dict[fx.Node, fx.Node] = {}
        rest = iter(inputs)
        for node in traced.nodes:
            if node.op == "placeholder":
                env[node] = next(rest)
            elif node.op == "call_function":
                env[node] = self._written(node, env)

    def _written(self, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
        new = self._graph.node_copy(node, env.__getitem__)
        made = leaves(node.meta.get("val"))
        # An update computes numbers from its step. They are rounded to the parameter's type, as in torch's kernels, and stored: a
        # loop over a large tensor would compute them with vector instructions, to other bits from loop to loop.
        for read in new.all_input_nodes if made and made[0].ndim else ():
            value = read.meta["val"]
            if value.ndim or read.op != "call_function":
                continue
            if value.is_floating_point() and value.dtype != made[0].dtype:  # a predicate, for one, stays
                with self._graph.inserting_before(new):
                    rounded = self._graph.call_function(_CONVERT, (read, made[0].dtype))
                rounded.meta["val"] = retraced(rounded, self._mode)
                rounded.meta[_REALIZE] = True
                new.replace_input_with(read, rounded)
            else:
                read.meta[_REALIZE] = True
        new.meta = {"val": retraced(new, self._mode), IN_PLACE: True}
        return new


class TensorFactors(TorchFunctionMode):
    """Takes tensors for the factors ``alpha`` and ``value``, as `torch.compile` does; torch itself takes only numbers there."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call a function of torch; a factor that is a tensor is multiplied separately."""
        kwargs = dict(kwargs or {})
        name = "alpha" if "alpha" in kwargs else "value"
        factor = kwargs.get(name)
        if isinstance(factor, torch.Tensor) and func in _WITH_FACTOR:
            del kwargs[name]
            added, in_place = _WITH_FACTOR[func]
            return (torch.Tensor.add_ if in_place else torch.Tensor.add)(args[0], added(*args[1:]) * factor)
        return func(*args, **kwargs)


_WITH_FACTOR: dict[Any, tuple[Callable[..., Any], bool]] = {
    torch.Tensor.add: (lambda other: other, False),
    torch.Tensor.add_: (lambda other: other, True),
    torch.Tensor.addcmul: (torch.mul, False),
    torch.Tensor.addcmul_: (torch.mul, True),
    torch.Tensor.addcdiv: (torch.div, False),
    torch.Tensor.addcdiv_: (torch.div, True),
}
"""Function with a factor -> the value that it adds, before the multiplication by the factor; and whether it works in place."""
