"""Compilers that Inductor calls: a C++ compiler with the headers of Python and OpenMP, and Triton for a GPU."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Final

from checkmate.doctor.check import Check

_PROGRAM: Final = """
#include <Python.h>
#include <omp.h>
extern "C" int checkmate_threads() { return omp_get_max_threads(); }
"""

_WITHOUT: Final = "compiler='inductor' and stock torch.compile cannot be used without it; compiler='eager' can"

_MISSING: Final = {
    "Python.h": ("the headers of Python are missing", "install them: `apt-get install python3-dev`, or your system's package"),
    "omp.h": ("OpenMP is missing", "install it: `apt-get install libomp-dev` for clang, or `brew install libomp`"),
}
"""The meaning of a header that a compiler does not find, and what to do."""


def check_cxx() -> Check:
    """The C++ compiler that Inductor uses on a CPU: it compiles a small extension module.

    The choice is Inductor's: the environment variable ``CXX``, else ``g++`` (``clang++`` on macOS).
    """
    default = "clang++" if sys.platform == "darwin" else "g++"
    words = shlex.split(os.environ.get("CXX", "")) or [default]
    found = shutil.which(words[0])
    if found is None:
        chosen = f"CXX={os.environ['CXX']} names" if os.environ.get("CXX") else f"{default} is"
        return Check(
            name="C++ compiler",
            verdict="failed",
            detail=f"{chosen} not found: {_WITHOUT}" if chosen.endswith("is") else f"{chosen} no program: {_WITHOUT}",
            cure="install one: `apt-get install g++`, `conda install -c conda-forge gxx`, or set CXX to a compiler",
        )
    with tempfile.TemporaryDirectory() as folder:
        source, module = Path(folder) / "check.cpp", Path(folder) / "check.so"
        source.write_text(_PROGRAM)
        flags = ["-std=c++17", "-shared", "-fPIC", "-fopenmp", f"-I{sysconfig.get_path('include')}"]
        # On macOS, names of Python are found when the module is loaded.
        flags += ["-Xpreprocessor", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
        try:
            done = subprocess.run(
                [found, *words[1:], *flags, str(source), "-o", str(module)],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return Check(
                name="C++ compiler",
                verdict="failed",
                detail=f"{found} does not run ({error})",
                cure="install it again, or set CXX to another compiler",
            )
    if done.returncode:
        message = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        reason, cure = next(
            (text for header, text in _MISSING.items() if header in message),
            ("it does not compile an extension module", "set CXX to a compiler that knows C++17 and -fopenmp"),
        )
        return Check(
            name="C++ compiler", verdict="failed", detail=f"{found}: {reason} ({message.strip()}); {_WITHOUT}", cure=cure
        )
    return Check(name="C++ compiler", verdict="ok", detail=f"{found} compiles an extension module with OpenMP")


def check_triton() -> Check:
    """Triton, which Inductor uses on a GPU, and the C compiler with which Triton builds its launchers."""
    if importlib.util.find_spec("triton") is None:
        return Check(
            name="Triton",
            verdict="failed",
            detail=f"not installed: {_WITHOUT}",
            cure="install PyTorch with CUDA from https://pytorch.org/get-started, which brings Triton",
        )
    chosen = os.environ.get("CC", "")
    compiler = shutil.which(shlex.split(chosen)[0]) if chosen else shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return Check(
            name="Triton",
            verdict="failed",
            detail=f"it finds no C compiler: {_WITHOUT}",
            cure="install one: `apt-get install gcc`, or set CC to a compiler",
        )
    return Check(name="Triton", verdict="ok", detail=f"installed; {compiler} builds its launchers")
