"""Private names of AOTAutograd and functorch."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd import autograd_cache
from torch._functorch.compile_utils import fx_graph_cse as equal_nodes_merged
from torch._functorch.partitioners import default_partition, get_default_op_list, min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import PythonCode, _BoxedCodeGen

from checkmate.torch._compat import replaced

__all__ = ["aot_autograd", "default_partition", "equal_nodes_merged", "functorch_config"]


def fusible_packets() -> Iterable[Any]:
    """Overload packets of the ops that torch's own min-cut partitioner expects Inductor to fuse."""
    return get_default_op_list().fusible_ops


def min_cut_partition(
    joint: torch.fx.GraphModule, budget: float, num_fwd_outputs: int
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Forward and backward of a joint module, as stock Inductor partitions it for a given ``activation_memory_budget``."""
    static = [i for i, node in enumerate(joint.graph.find_nodes(op="placeholder")) if node.meta.get("checkmate_static")]
    options = {"num_fwd_outputs": num_fwd_outputs, "static_lifetime_input_indices": static}
    with functorch_config.patch(activation_memory_budget=budget):
        return min_cut_rematerialization_partition(joint, (), **options)


def mark_static(joint: torch.fx.GraphModule, positions: Iterable[int]) -> None:
    """Mark the inputs that live longer than a step, such as parameters, for `min_cut_partition`."""
    inputs = joint.graph.find_nodes(op="placeholder")  # tangents come last
    for position in positions:
        inputs[position].meta["checkmate_static"] = True


def tell_parameters(gm: torch.fx.GraphModule, copy: torch.fx.GraphModule) -> None:
    """Tell AOTAutograd which inputs of a copy of a Dynamo graph are parameters, as Dynamo tells it of the graph."""
    copy._param_name_to_source = gm._param_name_to_source  # type: ignore[assignment]
    inputs = (module.graph.find_nodes(op="placeholder") for module in (gm, copy))
    for node, copied in zip(*inputs, strict=True):
        copied._dynamo_source = node._dynamo_source


def overwritten_inputs(count: int) -> frozenset[int] | None:
    """Positions of the inputs that the most recently compiled graph overwrites; None if its metadata does not say."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None or len(metadata.input_info) != count:  # AOTAutograd merged inputs that alias
        return None
    return frozenset(i for i, known in enumerate(metadata.input_info) if known.mutates_data or known.mutates_metadata)


def save_any_number() -> None:
    """Let forwards in place of the compiled one save any tensors; PyTorch 2.14 lists which of the saved ones are inputs."""
    metadata: Any = getattr(TracingContext.try_get(), "fw_metadata", None)
    if hasattr(metadata, "saved_tensor_is_graph_input"):
        metadata.saved_tensor_is_graph_input = defaultdict(bool)  # of any number, and none is one, as before 2.14


def regions_as_hints() -> AbstractContextManager[Any]:
    """Context in which AOTAutograd recomputes no region under ``torch.utils.checkpoint`` by itself.

    In a graph with a backward in it, a whole step, it would do this before the graph is planned, and refuse regions with dropout.
    """
    return functorch_config.patch(remat_using_tags_for_fwd_loss_bwd_graph=False)


BoxedRun = Callable[[list[Any]], Any]
"""A callable in AOTAutograd's boxed calling convention: it takes one list of arguments and clears it.

An argument can be freed before the call returns only in this way: the caller's list holds no reference any more.
"""


class _BoundOps(_BoxedCodeGen):
    """Code in the boxed calling convention, with the functions of the dispatcher as globals.

    ``torch.ops.aten.add.Tensor(a, b)`` looks up four attributes and calls a Python function that calls the dispatcher's: half a
    microsecond of each call.
    """

    def _gen_python_code(self, *args: Any, **kwargs: Any) -> PythonCode:
        code = super()._gen_python_code(*args, **kwargs)

        def bound(call: re.Match[str]) -> str:
            namespace, packet, overload = call.groups()
            op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
            if type(op) is not OpOverload:
                return call.group()
            code.globals[name := f"op_{namespace}_{packet}_{overload}"] = op._op
            return f"{name}("

        code.src = re.sub(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(", bound, code.src)
        for function in (run_and_save_rng_state, run_with_rng_state):
            code.globals[name := f"op_{function.__name__}"] = function  # a variable has the name itself
            code.src = code.src.replace(f"torch.ops.higher_order.{function.__name__}(", f"{name}(")
        return code


def run_and_save_rng_state(op: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """The state before a random op, and its result, as of torch's op of this name without its dispatch in Python."""
    save = getattr(_RANDOM_STATES, "save", torch.Generator.get_state)
    return save(_generator(args, kwargs)), op(*args, **kwargs)


def run_with_rng_state(state: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a random op from a saved state, a tensor or a generator that has it; the generator is left as it was."""
    generator = _generator(args, kwargs)
    if generator.device.type == "cpu":
        before = generator.get_state()
        generator.set_state(state)
        result = op(*args, **kwargs)
        generator.set_state(before)
        return result
    # Pointers to states are swapped, as by ``graphsafe_run_with_rng_state``.
    before, replayed = generator.graphsafe_get_state(), state
    if isinstance(state, torch.Tensor):
        replayed = torch.Generator(generator.device)
        replayed.set_state(state)
    generator.graphsafe_set_state(replayed)
    result = op(*args, **kwargs)
    generator.graphsafe_set_state(before)
    return result


_RANDOM_STATES = threading.local()
"""Of a thread that measures or captures a step: ``save``, which saves the state of a generator."""


class GraphSafeStates:
    """The random states from which a step in a CUDA graph computes random ops again, with the bits of a step without the graph.

    No state can be read in a capture. But Philox counts: each state is the one before the step and an offset, equal in all steps.
    Each has a generator that is registered with the graph, and is set before the graph runs.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self._offsets = generator, list[int]()
        self.generators: list[torch.Generator] = []

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Context of a step without the graph, which tells the offsets."""
        (_, first), saved = self._counts(), list[int]()

        def save(generator: torch.Generator) -> torch.Tensor:
            saved.append(self._counts()[1] - first)
            return generator.get_state()

        with replaced(_RANDOM_STATES, "save", save):
            yield
        self._offsets, self.generators = saved, [torch.Generator(self._generator.device) for _ in saved]

    def capturing(self) -> AbstractContextManager[None]:
        """Context of the capture of the graph."""
        rest = iter(self.generators)
        return replaced(_RANDOM_STATES, "save", lambda _: next(rest))

    def set(self) -> None:
        """Set the generators for the next step."""
        seed, first = self._counts() if self.generators else (0, 0)
        for generator, offset in zip(self.generators, self._offsets, strict=True):
            generator.set_state(torch.tensor([seed, first + offset], device="cpu").view(torch.uint8))

    def _counts(self) -> list[int]:
        """Seed and offset of the generator of a CUDA device."""
        return self._generator.get_state().view(torch.int64).tolist()


def default_generator(device: torch.device) -> torch.Generator:
    """The generator of a device from which random ops draw."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _generator(args: Iterable[Any], kwargs: Mapping[str, Any]) -> torch.Generator:
    """The default generator of the device that a random op runs on."""
    device = next((a.device for a in args if isinstance(a, torch.Tensor)), None) or torch.device(kwargs.get("device") or "cpu")
    return default_generator(device)


def boxed(module: torch.fx.GraphModule) -> BoxedRun:
    """The module in the boxed calling convention; its code frees every tensor after the tensor's last use."""
    module.graph.set_codegen(_BoundOps())
    module.recompile()
    _LazyGraphModule.force_recompile(module)  # otherwise each call looks whether the code is there
    return as_boxed(module.forward)


def as_boxed(function: BoxedRun) -> BoxedRun:
    """Mark a callable as boxed, with the mark that AOTAutograd looks for."""

    def run(args: list[Any]) -> Any:
        return function(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def is_tangent(node: torch.fx.Node) -> bool:
    """Whether a node is a tangent of a joint graph: a placeholder for the gradient of a forward output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def gradient_positions(joint: torch.fx.GraphModule, count: int) -> list[int]:
    """The position of each input's gradient among ``count`` gradients of a joint graph: one for all parts of a subclass."""
    inputs = [node for node in joint.graph.find_nodes(op="placeholder") if not is_tangent(node)]
    if len(inputs) == count:
        return list(range(count))
    wholes = [node.meta.get("desc", node) for node in inputs]
    while any(hasattr(whole, "base") for whole in wholes):
        wholes = [getattr(whole, "base", whole) for whole in wholes]
    position = {whole: k for k, whole in enumerate(dict.fromkeys(wholes))}
    return [position[whole] for whole in wholes]


def in_backward(node: torch.fx.Node) -> bool:
    """Whether autograd made a node; before PyTorch 2.13 nodes of a whole step tell only the call in the traced program."""
    return "autograd_backward" in node.meta or (node.meta.get("source_fn_stack") or [(None,)])[-1][-1] is torch.autograd.grad


def saved_symbols(forward: torch.fx.GraphModule, num_outputs: int) -> int:
    """Number of symbolic sizes that a forward module returns last, for its backward, which reads them first."""
    saved = list(forward.graph.output_node().args[0])[num_outputs:]  # type: ignore[arg-type]
    return sum(isinstance(n.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)) for n in saved)


def keep_undefined(outputs: Iterable[Any]) -> None:
    """Have autograd pass None to a compiled backward for the gradients of outputs into which no gradient flows.

    By default it allocates zeros for them (``ctx.set_materialize_grads``). The node of a compiled function is its ``ctx``.
    """
    for output in outputs:
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        if node is not None and not hasattr(node, "set_materialize_grads"):  # the output is a view, made after the function
            node = node.next_functions[0][0] if node.next_functions else None
        if hasattr(node, "set_materialize_grads"):
            node.set_materialize_grads(False)  # type: ignore[union-attr]


def aot_cache_disabled() -> AbstractContextManager[Any]:
    """Context in which AOTAutograd neither looks into its cache nor saves anything there."""
    return functorch_config.patch(enable_autograd_cache=False)


def cached_attributes(run: Callable[..., Any]) -> dict[str, Any]:
    """Attributes of compiled code through which an entry of AOTAutograd's cache refers to it."""
    names = ("_fx_graph_cache_key", "_fx_graph_cache_debug_lines", "guards_expr", "_time_taken_ns")
    return {name: getattr(run, name) for name in names if hasattr(run, name)}


_Cache: Any = autograd_cache.AOTAutogradCache


class CachedCompilation:
    """A compilation that may be found in AOTAutograd's cache.

    AOTAutograd looks into its cache before it traces a graph, and saves an entry as soon as it has compiled one. This class holds
    an entry until it is known which of several compilations runs, and replaces a loaded forward and backward before AOTAutograd
    wraps them.
    """

    def __init__(self) -> None:
        self.note: Any = None  # the note of the entry that was found; None if there is none
        # Each saves an entry that AOTAutograd would have saved, with a note that can be pickled; empty if its cache had one.
        self.entries: list[Callable[[Any], None]] = []

    @contextmanager
    def looking_up(self, replace: Callable[[str, Any], Any]) -> Iterator[None]:
        """Context in which one graph is compiled, or taken from the cache.

        AOTAutograd calls the result of ``replace``, given ``"forward"`` or ``"backward"`` and the loaded code.
        """
        if functorch_config.bundled_autograd_cache:
            with aot_cache_disabled():
                yield
            return
        thread = threading.get_ident()  # backwards of other models may be compiled on other threads meanwhile
        save, look_up = _Cache.save, _Cache._lookup

        def hold(key: str, content: Any, remote: bool) -> None:
            def save_with(note: Any) -> None:
                content._checkmate_note = note
                _Cache.save(key, content, remote)

            if threading.get_ident() != thread:
                save(key, content, remote)
            else:
                self.entries.append(save_with)

        def found(*args: Any, **kwargs: Any) -> Any:
            result = look_up(*args, **kwargs)
            if result is None or threading.get_ident() != thread:
                return result
            entry = result[0]
            self.note = getattr(entry, "_checkmate_note", None)
            if self.note is None or entry.compiled_bw is None:
                return None
            for which, saved in (("forward", entry.compiled_fw), ("backward", entry.compiled_bw)):
                saved.post_compile = _then(saved.post_compile, which, replace)
            return result

        with replaced(_Cache, "save", staticmethod(hold)), replaced(_Cache, "_lookup", staticmethod(found)):
            yield


def _then(post_compile: Callable[..., Any], which: str, replace: Callable[[str, Any], Any]) -> Callable[..., Any]:
    """AOTAutograd's last change of loaded code, followed by a replacement of the code."""
    return lambda *args, **kwargs: replace(which, post_compile(*args, **kwargs))
