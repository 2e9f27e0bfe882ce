"""Child of `torch_inductor.py`: wall seconds to the end of the first step, in a fresh process.

The clock starts before the model is compiled. Compilers that run in other processes are in wall time, and not in time of the
process. Caches are those of the environment: an empty folder for a cold start, and the same folder again for a cached one.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fresh import answer, child
from models import build
from steps import backward, compiled_by_torch, returned


def main() -> int:
    """Take one first step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs=3, metavar=("MODEL", "BUDGET", "TIME_LIMIT"), required=True)
    name, budget, time_limit_s = parser.parse_args().child
    answer(first_step(name, budget, float(time_limit_s)))
    return 0


def in_fresh_processes(name: str, budget: str, time_limit_s: float, times: int) -> list[dict[str, Any]]:
    """First steps in fresh processes one after the other: the first has empty caches, the others what it filled."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "CHECKMATE_CACHE": f"{folder}/checkmate"}
        return [child(__file__, name, budget, str(time_limit_s), **caches) for _ in range(times)]


def first_step(name: str, budget: str, time_limit_s: float) -> dict[str, Any]:
    """Seconds to the end of the first step, and for how many plans code was generated.

    The budget of ours is in bytes or a share; it is -1 for stock Inductor, 0 for keeping everything.
    """
    import torch._inductor.compile_fx  # before the clock starts

    import checkmate.torch

    logging.disable(logging.WARNING)
    case = build(name)
    if budget == "-1":
        began = time.perf_counter()
        program = torch.compile(compiled_by_torch(case.model), backend="inductor", dynamic=False)
        backward(lambda: returned(program, case))
        return {"first_s": time.perf_counter() - began, "plans": 1}
    began = time.perf_counter()
    limit = None if budget == "0" else budget if budget.endswith("%") else int(budget)
    step = checkmate.torch.compile(case.model, example=case.batch, budget=limit, time_limit_s=time_limit_s, compiler="inductor")
    step(**case.batch)
    took = time.perf_counter() - began
    plans = re.search(r"compiled by Inductor \(plan (\d+)\)", " ".join(step.result.remarks))
    return {"first_s": took, "plans": int(plans[1]) if plans else 1}


if __name__ == "__main__":
    sys.exit(main())
