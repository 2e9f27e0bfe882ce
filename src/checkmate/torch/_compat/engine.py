"""Private names of the autograd engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from checkmate.solvers.walks import reached
from checkmate.torch._compat.dynamo import untraced


def queue_after_backward(function: Callable[[], None]) -> None:
    """Have the autograd engine call a function when the present backward is over."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]


def saved_tensors_packer() -> Callable[[torch.Tensor], Any] | None:
    """The function of `torch.autograd.graph.saved_tensors_hooks` that packs saved tensors now; None without hooks."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    return None if hooks is None else hooks[0]


def saved_by_autograd(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that autograd has saved for the backwards of some tensors, except those that hooks have packed."""
    found = list[torch.Tensor]()
    starts = (t.grad_fn for t in tensors if t.grad_fn is not None)
    for node in reached(starts, lambda node: (n for n, _ in node.next_functions if n is not None)):
        for name in _saved_names(type(node)):
            try:
                saved = getattr(node, name)
            except RuntimeError:  # freed by a backward
                continue
            for one in saved if isinstance(saved, (list, tuple)) else (saved,):
                data = getattr(one, "data", None)
                if isinstance(data, torch.Tensor):
                    found.append(data)
    return found


@functools.cache
def _saved_names(node_type: type) -> tuple[str, ...]:
    return tuple(name for name in dir(node_type) if name.startswith("_raw_saved"))


def keeps_graph() -> bool:
    """Whether the present backward was called with ``retain_graph=True``; False outside of any."""
    return current_backward() >= 0 and torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]


def current_backward() -> int:
    """The number of the present backward, which no other backward has; -1 outside of any."""
    return torch._C._current_graph_task_id()


def grad_accumulators() -> dict[int, Any]:
    """Nodes that will add gradients of the running node to ``.grad`` of leaves, by the identity of the leaf.

    There are none for leaves outside of this backward, for example in ``torch.autograd.grad`` and ``backward(inputs=...)``,
    and none under compiled autograd, which runs no nodes.
    """
    node = torch._C._current_autograd_node()
    following = () if node is None else node.next_functions
    leaves = {id(variable): n for n, _ in following if (variable := getattr(n, "variable", None)) is not None}
    return {leaf: n for leaf, n in leaves.items() if _runs(n)}


def _runs(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined]
    except RuntimeError:  # a leaf whose gradient is a result of torch.autograd.grad
        return False


def before_accumulation(node: Any, function: Callable[[torch.Tensor | None], None]) -> None:
    """Call a function right before a node adds a gradient to the gradient of its leaf, in the present backward."""
    backward = current_backward()

    def hook(gradients: tuple[torch.Tensor | None, ...]) -> None:
        handle.remove()
        if current_backward() == backward:  # an earlier backward failed before it came here
            function(gradients[0])

    handle = node.register_prehook(untraced(hook))  # a compiled function may call the backward
