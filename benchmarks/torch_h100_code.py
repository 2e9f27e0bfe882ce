"""Inductor's code for an H100 that is not there: kernels, bytes and peak of ours beside stock Inductor and its memory budget.

The code is generated as on a machine with an H100, whose properties a CUDA build of torch is made to believe; no kernel is built
and nothing runs. Kernels are the launches of forward and backward, moved bytes those that the fused kernels read and write, and
the peak is counted in the code, above resident memory. The promises checked: keeping everything, ours is no worse than stock in
all three; and at the peak of each of torch's `activation_memory_budget` ours moves no more bytes, at no higher peak.

    python benchmarks/torch_h100_code.py [--models gpt2 llama]

It needs a CUDA build of torch and Triton, and no GPU: a minute or two for each model on one core.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "gpu")]
import models
import torch
from fresh import by_model
from models import Case, transformer

MODELS = ("tiny", "gpt2", "vit_l", "llama", "dit", "gpt2_12")
FRACTIONS = (0.9, 0.7, 0.5)
H100 = {
    "name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "total_memory": 85017493504, "multi_processor_count": 132,
    "warp_size": 32, "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024,
    "shared_memory_per_block": 49152, "shared_memory_per_block_optin": 232448, "shared_memory_per_multiprocessor": 233472,
    "L2_cache_size": 52428800, "gcnArchName": "", "clock_rate": 1980000, "memory_clock_rate": 2619000,
    "memory_bus_width": 5120, "is_integrated": 0, "is_multi_gpu_board": 0,
}  # fmt: skip


def main() -> int:
    """Run the benchmark, or one child of it."""
    return by_model(__file__, str(__doc__), MODELS, run=run, verdict=verdict, own_cache=True, packages=("torch", "triton"))


def run(name: str, time_limit_s: float, rounds: int) -> dict[str, Any]:
    """Child: the code of all variants of a model."""
    pretend()
    stocks = {str(fraction): stock(name, fraction) for fraction in (1.0, *(() if name == "tiny" else FRACTIONS))}
    mine = {"keep all": ours(name, None, time_limit_s)}
    for fraction, row in stocks.items():
        mine[fraction] = ours(name, mine["keep all"]["resident_bytes"] + row["peak_bytes"], time_limit_s)
    return {"stock": stocks, "ours": mine}


def verdict(name: str, row: dict[str, Any]) -> list[str]:
    """Promises that a model's rows break, in words."""
    pairs = [("keep all", row["ours"]["keep all"], row["stock"]["1.0"])]
    pairs += [(fraction, row["ours"][fraction], stock) for fraction, stock in row["stock"].items()]
    return [
        f"{name}, {label}: {key} of ours {mine[key]}, of stock {stock[key]}"
        for label, mine, stock in pairs
        for key in (("kernels",) if label == "keep all" else ()) + ("moved_bytes", "peak_bytes")
        if mine.get(key, sys.maxsize) > stock[key]
    ]


def case(name: str) -> Case:
    """A model without memory, with few layers, in bfloat16."""
    import cases
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.set_default_dtype(torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        if name == "tiny":
            made = models.gpt2(1, 256, 1000, 4, 256, n_head=4)
        elif name.startswith("gpt2"):
            others = {"n_head": 12, "n_positions": 1024, "activation_function": "gelu"}
            made = models.gpt2(12 if name == "gpt2_12" else 4, 768, 50257, 16, 1024, **others)
        elif name == "vit_l":
            made = models.vit(64, transformer(4, 1024, 16, 4096, image_size=224))
        elif name == "llama":
            made = models.llama(4, 2048, {**cases.LLAMA_1B, "num_hidden_layers": 4})
        else:
            latents, noise = torch.randn(2, 64, 4, 32, 32)
            batch = {"latents": latents, "noise": noise, "time": torch.rand(64)}
            made = Case(cases.Diffusion(32, 1024, 16, 4), batch, ())
    torch.set_default_dtype(torch.float32)
    return Case(made.model.train(), made.batch, ())


def stock(name: str, fraction: float) -> dict[str, Any]:
    """Stock Inductor's code, with ``activation_memory_budget`` as given."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    from checkmate.torch._compat.aot import functorch_config
    from checkmate.torch._compat.inductor import CustomPartitionerFn, compile_fx

    class Stock(CustomPartitionerFn):
        """The partitioner of torch, on a graph that is moved to the H100 as ours is."""

        def __call__(self, gm: Any, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
            target().relabel(gm.graph)
            with functorch_config.patch(activation_memory_budget=fraction):
                return min_cut_rematerialization_partition(gm, joint_inputs, **{"compiler": "inductor", **kwargs})

        def uuid(self) -> None:
            return None

    def compile_stock(gm: Any, inputs: Sequence[Any]) -> None:
        patches = {"custom_partitioner_fn": Stock()}
        compile_fx(gm, list(inputs), inner_compile=on_device(compile_fx_inner()), config_patches=patches)

    return counted_code(name, compile_stock, lambda modules: len(modules) - 2)


def ours(name: str, budget_bytes: int | None, time_limit_s: float) -> dict[str, Any]:
    """Our code, within a budget if one is given."""
    from checkmate.torch.compilation.compilation import Compilation, Hooks
    from checkmate.torch.inductor import compile as ours_
    from checkmate.torch.inductor import generate
    from checkmate.torch.options import Options

    prefers = generate.prefers_channels_last
    generate.prefers_channels_last = lambda gm: (target().relabel(gm.graph), prefers(gm))[1]  # type: ignore[attr-defined]
    generate.compile_fx_inner, ours_.FakeTensor = on_device(compile_fx_inner()), ()  # type: ignore[attr-defined, misc]
    chosen, resident = [0], [0]

    def compile_ours(gm: Any, inputs: Sequence[Any]) -> None:
        options = Options(budget=budget_bytes, compiler="inductor", costs="estimated", time_limit_s=time_limit_s)
        trials = ours_._Trials(gm, inputs, Compilation(gm.graph, inputs, options, Hooks(target=target())))
        peaks, costs = (lambda at: trials.compiled[at].counted), (lambda at: trials.compiled[at].cost_ns)
        found = trials.search.choose(trials.compile().counted, lambda: trials.compile().counted, peaks, costs)
        chosen[0] = -1 if found is None else found
        resident[0] = trials.search.chains.contracted.resident_bytes

    return {**counted_code(name, compile_ours, lambda modules: 2 * chosen[0]), "resident_bytes": resident[0]}


def counted_code(name: str, compiler: Callable[[Any, Sequence[Any]], None], at: Callable[[Sequence[Any]], int]) -> dict[str, Any]:
    """Kernels, bytes and peak of the forward and backward that a compiler generates at a position."""
    from checkmate.torch._compat.generated_code import LibraryCall, Loop, watch_generated_modules
    from checkmate.torch._compat.kernels import PendingKernels
    from checkmate.torch.emulate.device import fake_inputs
    from checkmate.torch.inductor.account import Account

    made, modules, account = case(name), [], Account(lambda node: target().costs([node])[0])

    def backend(gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        target().lower(gm)
        with watch_generated_modules(modules.append), PendingKernels().collecting():
            compiler(gm, inputs)
        raise StopCompilingError

    torch._dynamo.reset()
    with fake_inputs(made.batch, made.model) as batch, contextlib.suppress(StopCompilingError):
        torch.compile(made.model, backend=backend, fullgraph=True, dynamic=False)(**batch)
    first = at(modules)
    if first < 0:
        return {}
    account._modules = modules[first : first + 2]
    events = [event for module in account._modules for event in module.events]
    memory = account.memory(num_outputs=1, hold_outputs=True)
    assert memory is not None
    return {
        "kernels": sum(isinstance(event, (Loop, LibraryCall)) for event in events),
        "moved_bytes": sum(event.size_bytes for event in events if isinstance(event, Loop)),
        "peak_bytes": memory.peak_bytes,
    }


class StopCompilingError(BaseException):
    """Code was generated, and nothing is to run."""


@functools.cache
def target() -> Any:
    """The H100 that steps are planned for."""
    from checkmate.cost.device import load_device
    from checkmate.torch.emulate.device import EmulatedDevice

    return EmulatedDevice(load_device("H100"), cpu_costs=lambda nodes: [])


def compile_fx_inner() -> Callable[..., Any]:
    """Inductor's compiler of a forward or a backward."""
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner


def on_device(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler of modules that takes their fake inputs for tensors on the H100."""
    from checkmate.torch._compat.dispatch import FakeTensor, fake_tensor_on

    def moved(module: Any, inputs: Sequence[Any], **kwargs: Any) -> Any:
        there = [fake_tensor_on(t, torch.device("cuda", 0)) if isinstance(t, FakeTensor) else t for t in inputs]
        with there_is_cuda():
            return compiler(module, there, **kwargs)

    return moved


PRESENT = [False]


@contextlib.contextmanager
def there_is_cuda() -> Iterator[None]:
    """A context in which torch finds the H100; outside, tracing takes place on the CPU."""
    PRESENT[0] = True
    try:
        yield
    finally:
        PRESENT[0] = False


def pretend() -> None:
    """Have Inductor and Triton find an H100; called before they are imported."""
    import torch.utils._triton
    import triton.runtime.driver
    from triton.backends.compiler import GPUTarget

    properties = types.SimpleNamespace(**H100)
    nothing = contextlib.nullcontext
    for name, value in {
        "get_device_properties": properties, "get_device_capability": (9, 0), "get_device_name": H100["name"], "device_count": 1,
        "current_device": 0, "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None, "_lazy_init": None,
        "synchronize": None, "set_device": None, "_exchange_device": 0, "_maybe_exchange_device": 0, "memory_allocated": 0,
        "mem_get_info": (80 << 30, 80 << 30), "current_stream": types.SimpleNamespace(cuda_stream=0),
    }.items():  # fmt: skip
        setattr(torch.cuda, name, lambda *args, value=value, **kwargs: value)
    torch.cuda.is_available = lambda: PRESENT[0]
    torch.cuda.device = torch.cuda._DeviceGuard = lambda *args: nothing()  # type: ignore[assignment, misc]
    torch.utils._triton.has_triton = lambda *args: True  # type: ignore[assignment]
    import torch._dynamo.device_interface
    import torch._subclasses.fake_tensor

    torch._subclasses.fake_tensor.init_gpu_context = lambda *args: None
    cuda: Any = torch._dynamo.device_interface.CudaInterface
    cuda.Worker.get_device_properties = staticmethod(lambda *args: properties)
    for name, value in {
        "get_compute_capability": 90, "is_triton_capable": True, "raise_if_triton_unavailable": None, "is_available": True,
        "get_raw_stream": 0, "synchronize": None, "memory_allocated": 0,
    }.items():  # fmt: skip
        setattr(cuda, name, staticmethod(lambda *args, value=value, **kwargs: value))
    cuda.device = lambda *args: nothing()

    class Driver:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: 0)
        get_device_capability = staticmethod(lambda *args: (9, 0))
        get_current_stream = staticmethod(lambda *args: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("cuda", 0))

    triton.runtime.driver.set_active(Driver())
    import torch._inductor.config
    import torch._inductor.fx_passes.joint_graph
    import torch._inductor.fx_passes.pad_mm
    import torch._inductor.fx_passes.post_grad

    torch._inductor.config.fx_graph_cache = False
    torch._inductor.config.compile_threads = 1
    torch._functorch.config.enable_autograd_cache = False
    torch._functorch.config.force_non_lazy_backward_lowering = True
    torch._inductor.fx_passes.pad_mm._should_pad = lambda *args, **kwargs: False


if __name__ == "__main__":
    sys.exit(main())
