"""Private names of `make_fx`, which traces a function with all derivatives that it takes as one flat graph of ATen ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from traceback import StackSummary, extract_stack
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx, track_tensor_tree
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from checkmate.torch._compat import replaced
from checkmate.torch._compat.dispatch import DATA_DEPENDENT, FakeTensor, TorchDispatchMode, detect_fake_mode, no_modes
from checkmate.torch._compat.dynamo import dynamo_config

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class FlatTrace(TorchDispatchMode):
    """The trace of one function of tensors; tensors that the function finds elsewhere become further inputs of its graph.

    Nothing runs: each op sees fake tensors, even if all of its operands are parameters, as in a moving average of weights.

    Args:
        found: Called with each further input, before the function uses it.
        stored_zeros: Whether zeros that forward-mode derivatives would not store are stored. In a backward of ``vmap(hessian)``
            fake tensors take the others for tensors on the meta device, and ops refuse them.
    """

    def __init__(self, found: Callable[[torch.Tensor], None], *, stored_zeros: bool) -> None:
        super().__init__()
        self._found, self._stored_zeros = found, stored_zeros
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # a tensor with its fake one, by its identity

    @property
    def further(self) -> list[torch.Tensor]:
        """The further inputs, in the order in which the graph takes them, after the arguments."""
        return [tensor for tensor, _ in self._fakes.values()]

    def graph(self, function: Callable[..., Sequence[torch.Tensor]], arguments: Sequence[torch.Tensor]) -> fx.GraphModule:
        """The graph of the function, with its source lines and the mark of autograd on the ops of its backwards."""

        def inside(*fakes: torch.Tensor) -> Sequence[torch.Tensor]:
            with self:
                return function(*fakes)

        nested = dynamo_config.patch(error_on_nested_fx_trace=False)  # compiled modules run as they are
        with enable_python_dispatcher(), nested, _without_checkpoints():
            module = make_fx(inside, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)
        graph = module.graph
        inputs = graph.find_nodes(op="placeholder")
        for before, after in zip(inputs[len(arguments) - 1 :], inputs[len(arguments) :], strict=False):
            before.append(after)
        constants: dict[Any, fx.Node] = {}  # tensors of numbers in the code of the function
        for node in graph.find_nodes(op="get_attr"):
            tensor = getattr(module, str(node.target))
            self._fakes.setdefault(id(tensor), (tensor, tensor))
            if node.target not in constants:
                with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
                    constants[node.target] = graph.placeholder(str(node.target))
            node.replace_all_uses_with(constants[node.target])
            graph.erase_node(node)
        for node in reversed(list(graph.nodes)):
            if getattr(node.target, "namespace", "") == "profiler":  # the name of an optimizer's step in a profile
                graph.erase_node(node)
        module.recompile()
        return module

    @property
    def _tracer(self) -> Any:
        return get_proxy_mode().tracer  # type: ignore[union-attr]

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run an op on fake tensors, and tell in its nodes where it comes from."""
        if self._stored_zeros and func is torch.ops.aten._efficientzerotensor.default:
            func = torch.ops.aten.zeros.default
        if func not in _LIFTS:  # of numbers in the code, which may be read back
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._fake, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        made = pytree.tree_leaves(result)
        if any(isinstance(n, _SYMBOLS) for r in made for n in (r.shape if isinstance(r, torch.Tensor) else [r])):
            raise DATA_DEPENDENT[0](func)
        where = dict[str, Any]()
        for node in reversed(self._tracer.graph.nodes):
            if "stack_trace" in node.meta or node.op == "placeholder":
                break
            where = where or _where()
            node.meta.update(where)
        return result

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._fakes:
            self._found(tensor)
            mode: Any = detect_fake_mode()
            with no_modes():
                fake = mode.from_tensor(tensor)
            proxy = self._tracer.create_proxy("placeholder", f"found_{len(self._fakes)}", (), {})
            track_tensor_tree(fake, proxy, constant=None, tracer=self._tracer)
            self._fakes[id(tensor)] = tensor, fake
        return self._fakes[id(tensor)][1]


@contextmanager
def _without_checkpoints() -> Iterator[None]:
    """Context in which regions under `torch.utils.checkpoint` run as they are: a trace has them twice, with other dropout."""

    def plain(*_: Any, **__: Any) -> Iterator[None]:
        yield

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], _: bool, *args: Any) -> Any:
            return function(*args)

    with (
        replaced(checkpoint, "_checkpoint_without_reentrant_generator", plain),
        replaced(checkpoint, "CheckpointFunction", Plain),
    ):
        yield


def _where() -> dict[str, Any]:
    """Metadata of a node that is traced now."""
    where: dict[str, Any] = {"stack_trace": "".join(StackSummary.from_list(extract_stack()[-20:]).format())}
    if torch._C._current_autograd_node() is not None:
        where["source_fn_stack"] = [("grad", torch.autograd.grad)]
    return where
