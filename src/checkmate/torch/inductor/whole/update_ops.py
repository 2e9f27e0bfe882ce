"""A parameter's update as the ATen ops that its optimizer's own code traces to.

``checkmate::update`` is one op, which Inductor could neither compile nor fuse with the op that computes the gradient. Here it is
replaced, in a graph that already has the order of its plan: the optimizer's ``step`` is traced for one parameter, as
`torch.compile` traces it, with state and learning rate as tensors. Parameter and state are overwritten where the update was.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from checkmate.core.errors import OptionError
from checkmate.torch._compat.dispatch import detect_fake_mode, no_modes
from checkmate.torch._compat.inductor import as_if_compiling, trace_functionally
from checkmate.torch.graph.optimizer_ops import UPDATE, Updates, updates_of
from checkmate.torch.graph.storages import leaves, storage_key
from checkmate.torch.graph.traced import retraced
from checkmate.torch.inductor.whole.step_state import ParameterState, StepState, signature

_CONVERT = torch.ops.prims.convert_element_type.default
_REALIZE = "inductor_realize_to_strides"
_TRACED_AS = {"foreach": False, "fused": False, "capturable": True}
"""Options of a group while its update is traced: one parameter at a time, and nothing read back to Python."""


def expand_updates(module: fx.GraphModule) -> tuple[fx.GraphModule, StepState, list[torch.Tensor]]:
    """Replace every update of a whole step by ATen ops.

    Args:
        module: The module of a whole step, in the order of its plan; it is changed in place.

    Returns:
        The module, with more inputs at the end; what to pass for them; and fake tensors like them.

    Raises:
        OptionError: A parameter shares its storage with another input, which its update would overwrite.
    """
    graph = module.graph
    _refuse_shared_storages(graph)
    mode = detect_fake_mode(leaves([n.meta.get("val") for n in graph.nodes]))
    assert mode is not None
    writer = _Writer(graph, mode)
    for node in graph.find_nodes(op="call_function", target=UPDATE):
        writer.replace(node)
    graph.lint()
    module.recompile()
    return module, StepState(tuple(writer.learning_rates), tuple(writer.parameters)), writer.fakes


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


class _Writer:
    """Writes the ops of updates into a graph.

    Args:
        graph: The graph; changed in place.
        mode: The fake mode of its tensors.

    Attributes:
        learning_rates: Updates and groups whose learning rates are the first additional inputs.
        parameters: Parameters whose states are the others.
        fakes: Fake tensors like the additional inputs.
    """

    def __init__(self, graph: fx.Graph, mode: AbstractContextManager[Any]) -> None:
        self.learning_rates: list[tuple[int, int]] = []
        self.parameters: list[ParameterState] = []
        self.fakes: list[torch.Tensor] = []
        self._graph, self._mode = graph, mode
        self._traced: dict[Any, fx.Graph] = {}
        self._rates: dict[tuple[int, int], fx.Node] = {}
        self._last_input = graph.find_nodes(op="placeholder")[-1]
        # Learning rates come first among the inputs: one for each group.
        for node in graph.find_nodes(op="call_function", target=UPDATE):
            key, which = cast("tuple[int, int]", node.args[2:])
            at = key, updates_of(key).group_index(which)
            if at not in self._rates:
                with mode:
                    fake = torch.empty((), dtype=torch.float64)
                self._rates[at] = self._input(f"learning_rate_{len(self._rates)}", fake)
                self.learning_rates.append(at)

    def replace(self, update: fx.Node) -> None:
        """Write the ops of an update in its place.

        Args:
            update: The node of the update.
        """
        parameter, gradient, key, which = cast("tuple[fx.Node, fx.Node, int, int]", update.args)
        updates, group_index = updates_of(key), updates_of(key).group_index(which)
        with no_modes():
            like = updates.state_specification(which)
        states = []
        for name, tensor in like.items():
            with self._mode:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            states.append(self._input(f"{name}_{len(self.parameters)}", fake))
        self.parameters.append(ParameterState.of(key, which, like))
        inputs = [parameter, gradient, self._rates[key, group_index], *states]
        known = (key, group_index, tuple(like), *(signature(n.meta["val"]) for n in inputs))
        if known not in self._traced:
            self._traced[known] = self._trace(updates, which, tuple(like), [n.meta["val"] for n in inputs])
        with self._graph.inserting_before(update):
            self._copy(self._traced[known], inputs)
        self._graph.erase_node(update)

    def _input(self, name: str, fake: torch.Tensor) -> fx.Node:
        with self._graph.inserting_after(self._last_input):
            node = self._last_input = self._graph.placeholder(name)
        node.meta["val"] = fake
        self.fakes.append(fake)
        return node

    def _trace(self, updates: Updates, which: int, names: Sequence[str], like: Sequence[torch.Tensor]) -> fx.Graph:
        shadow = copy.copy(updates.optimizer)
        group = updates.group(which)
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
        # Numbers that an update computes from its step are rounded to the parameter's type, as kernels of torch do with them, and
        # stored: a loop over a large tensor would compute them with vector instructions, to other bits from loop to loop.
        for read in new.all_input_nodes:
            value = read.meta["val"]
            if made and made[0].ndim and not value.ndim and value.dtype != made[0].dtype and read.op == "call_function":
                with self._graph.inserting_before(new):
                    rounded = self._graph.call_function(_CONVERT, (read, made[0].dtype))
                rounded.meta["val"] = retraced(rounded, self._mode)
                rounded.meta[_REALIZE] = True
                new.replace_input_with(read, rounded)
            elif made and made[0].ndim and not value.ndim and read.op == "call_function":
                read.meta[_REALIZE] = True
        new.meta = {"val": retraced(new, self._mode)}
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
"""Function with a factor -> what it adds, before that is multiplied by the factor; and whether it works in place."""
