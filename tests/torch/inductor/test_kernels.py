"""Kernels of generated modules: built when a plan is chosen, and C++ kernels many to a file."""

from __future__ import annotations

from types import BuiltinFunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile

from checkmate.torch._compat.kernels import PendingKernels

HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"
ARGUMENTS = ["const float*", "float*", "const int64_t"]


def source(operation: str) -> str:
    """A kernel that calls a function of the same name as that of every other kernel."""
    return f"""
{HEADER}
#include <cmath>
static float helper(float x) {{ return {operation}; }}
extern "C" void kernel(const float* in_ptr, float* out_ptr, const int64_t size)
{{ for (int64_t i = 0; i < size; i++) out_ptr[i] = helper(in_ptr[i]); }}
"""


def test_kernels_of_one_file_are_the_kernels_of_single_files() -> None:
    """With their own functions beside them, and equal ones once."""
    pending, scope = PendingKernels(), {}
    operations = {"double": "2 * x", "root": "std::sqrt(x)", "twice": "2 * x"}
    with pending.collecting():
        compiler = AsyncCompile()
        for name, operation in operations.items():
            scope[name] = compiler.cpp_pybinding(ARGUMENTS, source(operation))
        compiler.wait(scope)
    pending.build()
    x, out = torch.tensor([1.0, 4.0]), torch.empty(2)
    found = {}
    for name, kernel in scope.items():
        kernel(x, out, 2)
        found[name] = out.tolist()
    assert found == {"double": [2.0, 8.0], "root": [1.0, 2.0], "twice": [2.0, 8.0]}


def test_a_kernel_that_is_called_before_it_is_built_is_built() -> None:
    """Code that was generated for a plan that was not chosen may run all the same."""
    pending, scope = PendingKernels(), {}
    with pending.collecting():
        scope["kernel"] = AsyncCompile().cpp_pybinding(ARGUMENTS, source("x + 1"))
    out = torch.empty(1)
    scope["kernel"](torch.ones(1), out, 1)
    assert out.item() == 2


def test_a_built_kernel_takes_the_place_of_its_stand_in() -> None:
    """A step calls a hundred: the generated module calls C++ itself."""
    pending, module = PendingKernels(), {"AsyncCompile": AsyncCompile, "arguments": (ARGUMENTS, source("x + 2"))}
    with pending.collecting():
        exec("kernel = AsyncCompile().cpp_pybinding(*arguments)\nalso = kernel", module)
    pending.build()
    assert isinstance(module["kernel"], BuiltinFunctionType)
    assert module["also"] is module["kernel"]


def test_kernels_outside_are_built_at_once() -> None:
    """Inductor's own functions are back."""
    with PendingKernels().collecting():
        pass
    out = torch.empty(1)
    AsyncCompile().cpp_pybinding(ARGUMENTS, source("x - 1"))(torch.ones(1), out, 1)
    assert out.item() == 0


MODULE = compile("kernel = AsyncCompile().triton('name', 'source', device_str='cuda')", "a generated module", "exec")


def test_kernels_of_triton_are_built_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generated module is loaded without them; what builds a kernel to measure it gets one at once."""
    built: list[str] = []

    def triton(self: AsyncCompile, name: str, source: str, device_str: str = "cuda") -> Any:
        built.append(source)
        return SimpleNamespace(run=lambda *args, stream: (name, *args, stream), launchers=[])

    monkeypatch.setattr(AsyncCompile, "triton", triton)
    pending, asked, early = PendingKernels(), {"AsyncCompile": AsyncCompile}, {"AsyncCompile": AsyncCompile}
    with pending.collecting():
        exec(MODULE, asked)
        AsyncCompile().triton("name", "autotuned")
    assert built == ["autotuned"]
    pending.build()
    pending.build()
    assert built == ["autotuned", "source"]
    assert asked["kernel"].run(1, stream=0) == ("name", 1, 0)
    with PendingKernels().collecting():
        exec(MODULE, early)
    assert early["kernel"].run(2, stream=0) == ("name", 2, 0)
    assert built == ["autotuned", "source", "source"]
