"""Kernels of Inductor, built when the plan of their code is chosen; C++ kernels are compiled many to a file.

Inductor compiles each C++ kernel of a module by itself, when the module is loaded. Nearly all of that time is the same for any
kernel: starting the compiler and reading headers. 130 kernels of a GPT-2 take 118 s one by one, and 16 s in one file. The first
step of a ResNet-18, with planning and tracing, takes 69 CPU seconds with 44 files, and 52 with 8. Inductor has no option for it.
Therefore ``AsyncCompile.cpp_pybinding``, which a module calls for each kernel, is replaced while the module is generated and
loaded.

``AsyncCompile.triton`` is replaced too: a kernel of Triton takes 0.1 to 1 s, and code is generated for several plans.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.cpp_builder import is_gcc
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.utils import clear_on_fresh_cache

from checkmate.torch._compat import replaced

_INLINING = ("--param=large-unit-insns=1000000", "--param=large-function-insns=1000000", "--param=max-inline-insns-auto=1000")
"""GCC inlines less if a file is large or a function has many callers: kernels of a U-Net took up to twice as long."""

_HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"


@clear_on_fresh_cache
class _CodeCache(CppPythonBindingsCodeCache):
    """Compiles a file without precompiled headers: with them, GCC inlines none of the functions that a header defines."""

    cache: ClassVar[dict[str, Callable[[], Any]]] = {}
    cache_clear = staticmethod(cache.clear)

    @classmethod
    def _get_uncompiled_header(cls, device: str) -> str | None:
        return None


class PendingKernels:
    """The kernels of generated modules, until they are built.

    A module whose kernels are not built is otherwise complete. A kernel that is called too early is built first.
    """

    def __init__(self) -> None:
        self._kernels: list[_Kernel] = []
        self._triton: list[_TritonKernel] = []
        self._lock = threading.Lock()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the kernels of modules that this thread loads inside, instead of building them."""
        build_one, build_triton, thread = AsyncCompile.cpp_pybinding, AsyncCompile.triton, threading.get_ident()

        def cpp_pybinding(self_: AsyncCompile, argtypes: list[str], source_code: str) -> Any:
            if threading.get_ident() != thread:
                return build_one(self_, argtypes, source_code)
            self._kernels.append(_Kernel(tuple(argtypes), source_code, self, sys._getframe(1).f_globals))
            return self._kernels[-1]

        def triton(self_: AsyncCompile, *args: Any, **kwargs: Any) -> Any:
            caller, build = sys._getframe(1), functools.partial(build_triton, self_, *args, **kwargs)
            if threading.get_ident() == thread and caller.f_code.co_name == "<module>":  # a generated module, which is loaded
                self._triton.append(_TritonKernel(build, self))
                return self._triton[-1]
            # The generator of code begins to build a kernel early, and takes no result; autotuning builds its kernels.
            early = caller.f_globals["__name__"] == "torch._inductor.codegen.triton"
            return None if threading.get_ident() == thread and early else build()

        with replaced(AsyncCompile, "cpp_pybinding", cpp_pybinding), replaced(AsyncCompile, "triton", triton):
            yield

    def build(self) -> None:
        """Build the kernels."""
        with self._lock:
            if self._triton:
                built = {str(i): kernel.build() for i, kernel in enumerate(self._triton)}  # in other processes, if there are any
                AsyncCompile().wait(built)
                for kernel, ready in zip(self._triton, built.values(), strict=True):
                    vars(kernel).update(kernel=ready, run=ready.run)
                self._triton = []
            waiting, threads = self._kernels, get_compile_threads()
            if not waiting:
                return
            # The fixed time of a file is the time of about ten kernels: fewer kernels are not worth another file.
            per_file = max(8, -(-len(waiting) // threads))
            files = [waiting[at : at + per_file] for at in range(0, len(waiting), per_file)]
            pick_vec_isa()  # it probes the processor once, but once for each thread that asks at the same time
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(_build_file, files))  # compilers run in other processes: threads suffice
            self._kernels = []


@dataclass(slots=True, eq=False)
class _Kernel:
    """A kernel that stands for its function."""

    argtypes: tuple[str, ...]
    source: str  # C++ source of a function ``kernel``
    pending: PendingKernels
    module: dict[str, Any]  # the namespace of the generated module
    run: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """Build the kernel and call it: a module that was not accepted is used after all."""
        if self.run is None:
            self.pending.build()
        assert self.run is not None
        return self.run(*args)


class _TritonKernel:
    """A kernel that stands for one of Triton."""

    def __init__(self, build: Callable[[], Any], pending: PendingKernels) -> None:
        self.build, self._pending = build, pending

    def __getattr__(self, name: str) -> Any:
        """An attribute of the kernel, which is built if it is called too early."""
        if name.startswith("__"):
            raise AttributeError(name)
        if "kernel" not in vars(self):
            self._pending.build()
        return getattr(vars(self)["kernel"], name)


def _build_file(kernels: Sequence[_Kernel]) -> None:
    distinct = list(dict.fromkeys((k.argtypes, k.source) for k in kernels))
    module = _CodeCache.load_async(_source(distinct), extra_flags=_INLINING if is_gcc() else ())()
    functions = {kernel: getattr(module, f"kernel_{i}") for i, kernel in enumerate(distinct)}
    for kernel in kernels:
        kernel.run = run = functions[kernel.argtypes, kernel.source]
        kernel.module.update({name: run for name, value in kernel.module.items() if value is kernel})


def _source(kernels: Sequence[tuple[tuple[str, ...], str]]) -> str:
    """Source of a Python extension module with one function for each kernel: ``kernel_0``, ``kernel_1``, ..."""
    template = CppPythonBindingsCodeCache.suffix_template.format(
        arg_len=0, call_entry_func="Py_RETURN_NONE;", entry_func="kernel", extra_parse_arg=""
    )
    at, table = template.index("static PyObject* kernel_py"), template.index("static PyMethodDef py_methods")
    head, binding, tail = template[:at], template[at:table], template[table:]
    headers: dict[str, None] = {_HEADER: None}
    bodies, bindings, methods = [], [], []
    for i, (argtypes, source) in enumerate(kernels):
        args = ", ".join(f"parse_arg<{t.replace('const ', '')}>(args, {n})" for n, t in enumerate(argtypes))
        lines = source.splitlines()
        headers.update(dict.fromkeys(line for line in lines if line.startswith("#include")))
        body = "\n".join(line for line in lines if not line.startswith("#include"))
        # Templates define functions in addition to the kernel, with the same names in each file.
        renamed = re.sub(r"\bkernel\b", f"kernel_{i}", body)
        bodies.append(f"namespace file_{i} {{\n{renamed}\n}}")
        bindings.append(
            binding.replace("kernel_py", f"kernel_{i}_py")
            .replace("!= 0", f"!= {len(argtypes)}")
            .replace("requires 0 args", f"requires {len(argtypes)} args")
            .replace("Py_RETURN_NONE;", f"file_{i}::kernel_{i}({args}); Py_RETURN_NONE;")
        )
        methods.append(f'{{"kernel_{i}", kernel_{i}_py, METH_VARARGS, ""}},')
    tail = tail.replace('{"kernel", kernel_py, METH_VARARGS, ""},', "\n    ".join(methods))
    return "\n".join([*headers, *bodies, head, *bindings, tail])
