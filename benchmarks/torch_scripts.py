"""Public training scripts with one line changed, under a budget: the peak of every step, of everything in the process.

    pip install ninja trl peft datasets accelerate lightning transformers    # and a C++ compiler
    python benchmarks/torch_scripts.py [--scripts mnist nanogpt] [--time-limit 5]

For every script in `benchmarks/scripts`: eager, "100%", "60%" and a budget in bytes of 80 % of the highest peak of eager, each in
a fresh process with an empty cache, six steps. Such a process is forked from one that has imported the packages and has run
nothing. An allocator counts every byte that PyTorch allocates on the CPU from before the model is built: tracing, measuring and
planning are in the peak of the step that they are in, as are the optimizer, an evaluation and everything else of the loop. The
outcomes of a run with a budget are

- holds: no step exceeds the budget; every loss and the final parameters are those of "100%" to the bit, the losses are those of
  eager;
- announced: as before, but a step exceeds the budget by no more than a warning said before it;
- refused: no plan keeps the budget or none was found, said before the second step with batches of these sizes is over; the
  smallest budget that the error names, or that the next such error names, is kept in another run and is no more than eager
  takes. Or nothing of the script can be planned, as an error says that names the place and a cure, and eager takes more than the
  budget;
- not compiled: PyTorch's own `aot_eager` raises the same error, as it does for gradients of gradients. Not counted below;
- silent, understated, false refusal, late refusal, wrong bits, crash, hang: all others.

The promises are that at least 19 of 20 scripts hold, are announced or are refused at both budgets, and none is silent or hangs.
Exit status 1 if one breaks.  Scripts that are not named keep their rows of the last run.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fresh import digest, earlier, mib, parser, pass_warnings_to, ran, save, without_folders

SHARE = 0.8
BUDGETS = ("60%", "80% of eager")
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "lightning")
KEPT = ("holds", "announced", "refused")
UNPLANNABLE = ("NothingPlannedError", "GraphError")  # which name the place and a cure
RETRIES = 3  # a graph is known before its step, and a step before another kind of step
KNOWN_BY = 2  # a step of several graphs has been seen when its kind begins for the second time
TOLERANCE = 1e-3  # of losses between eager code and the graphs of AOTAutograd, which sum in another order


def main() -> int:
    """Run the benchmark."""
    command = parser(__doc__)
    command.add_argument("--scripts", nargs="+", default=None)
    command.add_argument("--time-limit", type=float, default=5.0, help="seconds that planning may take")
    command.add_argument("--timeout", type=float, default=300.0, help="seconds after which a run counts as hung")
    command.add_argument("--print-only", action="store_true", help="keep no results")
    options = command.parse_args()
    import transformers  # noqa: F401 - once, before the processes are forked
    from counting_allocator import counting_allocator
    from generate import chain
    from scripts import SCRIPTS

    import checkmate.torch  # noqa: F401
    from checkmate import Limits, Problem, solve

    counting_allocator()
    solve(Problem(chain(12), "45%"), limits=Limits(time_s=2, gap=0.0))  # compiles the solver's kernels, once on a machine
    rows = {} if options.print_only else earlier(__file__)
    for row in rows.values():
        classify(row)
    for name in options.scripts or SCRIPTS:
        rows[name] = measured(name, options.time_limit, options.timeout)
        classify(rows[name])
        print("\n".join(lines(name, rows[name])), flush=True)
        if not options.print_only:
            report = {
                **ran(*PACKAGES),
                "time_limit_s": options.time_limit,
                "models": {n: rows[n] for n in SCRIPTS if n in rows},
            }
            save(__file__, report)
    broken = [f"{n}: not run" for n in SCRIPTS if n not in rows and not options.scripts]
    broken += broken_promises({n: rows[n] for n in SCRIPTS if n in rows})
    print("\n".join(broken) or "all promises hold")
    return bool(broken)


def measured(name: str, limit: float, timeout: float) -> dict[str, Any]:
    """All runs of a script, and the outcome of each budget."""

    def once(mode: str) -> dict[str, Any]:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        with tempfile.TemporaryDirectory() as cache:
            process = context.Process(target=_child, args=(sender, cache, name, mode, limit))
            process.start()
            sender.close()
            try:
                return receiver.recv() if receiver.poll(timeout) else {"hang": timeout}
            except EOFError:
                return {"error": "the process ended without an answer"}
            finally:
                process.kill()
                process.join()

    row: dict[str, Any] = {"eager": once("eager"), "100%": once("100%")}
    if "error" in row["100%"]:
        row["aot_eager"] = once("aot_eager")
    if not row["eager"].get("steps") or "error" in row["eager"]:
        return row
    for label in BUDGETS:
        found = once(budget_of(label, row["eager"]))
        found["retries"], last = [], found
        while "refused" in last and last["refused"]["enough"] and len(found["retries"]) < RETRIES:
            enough = last["refused"]["enough"]
            last = {**once(enough), "asked": enough}
            found["retries"].append(last)
        row[label] = found
    return row


def _child(sender: Connection, cache: str, name: str, mode: str, time_limit_s: float) -> None:
    """Run a script in a separate process."""
    os.environ["CHECKMATE_CACHE"] = cache
    warnings.simplefilter("ignore")
    os.dup2(2, 1)  # what trainers print
    sender.send(run(name, mode, time_limit_s))


def run(name: str, mode: str, time_limit_s: float) -> dict[str, Any]:
    """A script, and what it took. It changes the allocator of this process for good."""
    import random

    import numpy
    import torch
    from counting_allocator import counting_allocator, mapped_bytes
    from scripts import SCRIPTS
    from scripts.loop import WATCH
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    counter = counting_allocator()
    torch.set_num_threads(1)
    for seed in (torch.manual_seed, numpy.random.seed, random.seed):
        seed(0)
    row: dict[str, Any] = {"steps": [], "losses": [], "warnings": []}
    marks: list[float] = [time.perf_counter()]

    def budget() -> None:
        if mode != "eager" and (found := _budget()) and row["steps"]:
            now = row["steps"][-1].setdefault("budgets", [])
            if found not in now:
                now.append(found)

    def begin_step(batch: Any) -> None:
        end_step()
        row["steps"].append({"live_bytes": counter.live(), "mapped_bytes": mapped_bytes(counter), "kind": shapes(batch)})

    def end_step() -> None:
        budget()
        where = row["steps"][-1] if row["steps"] else row
        where["peak_bytes"] = counter.peak() + where.get("mapped_bytes", 0)
        where["time_s"] = time.perf_counter() - marks[-1]
        marks.append(time.perf_counter())
        counter.reset()

    collect = pass_warnings_to(lambda text: row["warnings"].append([len(row["steps"]), text[:600]]))
    hook = register_optimizer_step_pre_hook(lambda *_: budget())
    WATCH.begin_step = begin_step
    WATCH.loss = lambda loss: row["losses"].append([len(row["steps"]), float(loss)])
    if mode != "eager":
        options = {"budget": int(mode) if mode.isdigit() else mode, "time_limit_s": time_limit_s}
        torch._functorch.config.donated_buffer = False  # as our backend, or it refuses gradients of gradients for another reason
        settings = {"backend": mode} if mode == "aot_eager" else {"backend": "checkmate", "options": options}

        def compile_model(model: Any, in_place: bool) -> Any:
            if in_place:
                model.compile(**settings)
                return model
            return torch.compile(model, **settings)

        WATCH.compile = compile_model
    counter.install()
    counter.reset()
    try:
        SCRIPTS[name].main()
        end_step()
        tensors = [t for m in WATCH.models for t in (*m.parameters(), *m.buffers())]
        row["parameters"] = digest(*tensors)
    except BaseException as error:  # noqa: BLE001 - whatever a script, Dynamo or the backend raises is a row of the table
        traceback.print_exc()
        end_step()
        row.update(_failure(error))
    finally:
        logging.getLogger("checkmate").removeHandler(collect)
        hook.remove()
    return row


def shapes(batch: Any) -> str:
    """The sizes of the tensors of a batch: steps of other sizes are of other kinds."""
    import torch
    from torch.utils import _pytree as pytree

    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, (torch.Tensor, int))]
    return str([tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])


def _budget() -> list[Any] | None:
    """Bytes of the budget that the newest plan was made for, and whether it is one of the whole step."""
    from checkmate.torch.steps.coordinator import coordinator

    result = coordinator().result
    return None if result is None else [result.budget_bytes, coordinator().step is not None]


def _failure(error: BaseException) -> dict[str, Any]:
    """An exception as a refusal, or as an error."""
    from checkmate import InfeasibleBudgetError, PlanNotFoundError

    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not any(cause is known for known in causes):  # Dynamo raises an error from itself
        causes.append(cause)
        cause = getattr(cause, "inner_exception", None) or cause.__cause__ or cause.__context__
    cause = next((each for each in causes if isinstance(each, (InfeasibleBudgetError, PlanNotFoundError))), None)
    if isinstance(cause, (InfeasibleBudgetError, PlanNotFoundError)) and cause.smallest_bytes:
        sizes = {"budget_bytes": cause.budget_bytes, "smallest_bytes": cause.smallest_bytes}
        share = re.search(r"to at least ([\d.]+%)", cause.hint)
        enough = share[1] if share else str(cause.smallest_bytes)
        return {"refused": {**sizes, "enough": enough, "message": without_folders(str(cause))[:600]}}
    return {"error": f"{type(error).__name__}: {without_folders(str(error))[:600]}"}


def highest(found: dict[str, Any]) -> int:
    """The highest peak of all steps of a run, in bytes."""
    return max((step["peak_bytes"] for step in found["steps"]), default=0)


def limits(found: dict[str, Any], asked: str, eager: dict[str, Any]) -> list[int]:
    """The budget of each step in bytes: the one that was asked for, or what a share was taken to be in that step.

    Until a step of several graphs is planned as a whole its share is not known; it is then that of the first step of the loop of
    which all is. If there is none, it is of what eager takes, or of the step that is refused. Where nothing can be planned there
    is nothing to give up, and the share is all that the script takes.
    """
    if not asked.endswith("%"):
        return [int(asked)] * len(found["steps"])
    budgets = [step.get("budgets", []) for step in found["steps"]]
    fixed, most = eager["steps"][0]["live_bytes"], highest(eager)
    share = float(asked[:-1]) / 100 if any(budgets) else 1.0
    known = (max(total for total, _ in each) for each in budgets if each and all(whole for _, whole in each))
    of_eager = max(fixed + int(share * (most - fixed)), found.get("refused", {}).get("budget_bytes", 0))
    first = next(known, of_eager)
    # Where a part of the step is not known yet, the first share counts too.
    return [max([total if whole else first for total, whole in each], default=first) for each in budgets]


def times(found: dict[str, Any]) -> int:
    """How many steps of the kind of the last one a run began."""
    kinds = [step.get("kind") for step in found.get("steps", [])]
    return kinds.count(kinds[-1]) if kinds else 0


def excesses(found: dict[str, Any], asked: str, eager: dict[str, Any]) -> list[tuple[int, int, int, int]]:
    """Step, peak, budget, and the bytes that warnings have announced before or in it, of every step over its budget."""
    over = []
    for number, (step, limit) in enumerate(zip(found["steps"], limits(found, asked, eager), strict=True), 1):
        if step["peak_bytes"] > limit:
            said = [
                _announced(text, limit)
                for at, text in found["warnings"]
                if at == number or (at < number and "a first step" not in text)
            ]
            over.append((number, step["peak_bytes"], limit, max(said, default=0)))
    return over


def _announced(text: str, limit: int) -> int:
    """The bytes that a warning says may be taken; 0 if it says none."""
    units = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    besides = "exceed it by" in text or "exceeded by" in text
    if besides:
        text = re.sub(r"budget of [\d.]+ ?\w+", "", text)
    amounts = re.findall(r"([\d.,]*\d) ?(B|bytes|KiB|MiB|GiB)\b", text)
    most = max((math.ceil((float(n.replace(",", "")) + 0.005) * units[unit]) for n, unit in amounts), default=0)
    return limit + most if besides else most


def classify(row: dict[str, Any]) -> None:
    """Note the class of each run of a script with a budget, and the reason in words."""
    for label in BUDGETS:
        if label in row:
            row[label]["outcome"], row[label]["why"] = outcome(row[label], row)


def outcome(found: dict[str, Any], row: dict[str, Any]) -> tuple[str, str]:
    """The class of a run with a budget, and the reason in words."""
    reference, eager = row["100%"], row["eager"]
    asked = budget_of(next(key for key in row if row[key] is found), eager)
    if "hang" in found:
        return "hang", f"no end within {found['hang']:g} s"
    if "error" in found and found["error"] == row.get("aot_eager", {}).get("error"):
        return "not compiled", found["error"]
    if "error" in found:
        return _error(found, asked, eager)
    if "refused" in found:
        return _refusal(found, asked, eager)
    if any(key in reference for key in ("error", "refused", "hang")):
        return "crash", 'at "100%"'
    unequal = _unequal(found, reference, eager)
    if unequal:
        return "wrong bits", unequal
    return _over(excesses(found, asked, eager))


def budget_of(label: str, eager: dict[str, Any]) -> str:
    """The budget of a column, as it is asked for."""
    return label if label.endswith("%") else str(int(SHARE * highest(eager)))


def _error(found: dict[str, Any], asked: str, eager: dict[str, Any]) -> tuple[str, str]:
    """The class of a run that raised another error than one of a budget: right if nothing can be planned and eager takes more."""
    step, error = len(found.get("steps", [])), found["error"]
    enough = not asked.endswith("%") and int(asked) >= highest(eager)
    if not error.startswith(UNPLANNABLE) or times(found) > KNOWN_BY or enough:
        return "crash", f"step {step}: {error}"
    name, why = _over(excesses(found, asked, eager))
    return ("refused", f"step {step}: no plan can be made: {error}") if name in KEPT else (name, why)


def _refusal(found: dict[str, Any], asked: str, eager: dict[str, Any]) -> tuple[str, str]:
    """The class of a run that was refused: right if the budgets that are named lead to one that is kept."""
    runs = [found, *found["retries"]]
    refusals = [each["refused"] for each in runs if "refused" in each]
    smallest = [refusal["smallest_bytes"] for refusal in refusals]
    steps = [len(each["steps"]) for each in runs if "refused" in each]
    text = ", ".join(f"step {step}: smallest {mib(size or 0)}" for step, size in zip(steps, smallest, strict=True)) + " MiB"
    if any(key in runs[-1] for key in ("error", "refused", "hang")):
        last = runs[-1]["refused"]["message"] if "refused" in runs[-1] else str(runs[-1].get("error", "hang"))
        return "false refusal", f"{text}: {last[:300]}"
    budgets, eager_bytes = [asked, *(each["asked"] for each in found["retries"])], highest(eager)
    lower = any(refusal["smallest_bytes"] <= refusal["budget_bytes"] for refusal in refusals)
    if lower or smallest[-1] > eager_bytes:
        return "false refusal", f"{text}, budget {mib(refusals[0]['budget_bytes'])}, eager {mib(eager_bytes)} MiB"
    name, why = _over([each for run, size in zip(runs, budgets, strict=True) for each in excesses(run, size, eager)])
    if name not in KEPT:
        return name, why
    in_time = max(times(each) for each in runs if "refused" in each) <= KNOWN_BY
    return ("refused" if in_time else "late refusal"), text


def _over(over: list[tuple[int, int, int, int]]) -> tuple[str, str]:
    """The class of a run by the step over its budget that says least."""
    if not over:
        return "holds", ""
    _, peak, limit, said = min(over, key=lambda step: step[3] - step[1])
    text = "; ".join(f"step {n}: {mib(p)} of {mib(b)} MiB" + (f", said {mib(s)}" if s else "") for n, p, b, s in over)
    return ("announced" if said >= peak else "understated" if said > limit else "silent"), text


def _unequal(found: dict[str, Any], reference: dict[str, Any], eager: dict[str, Any]) -> str:
    """The first difference of a run from "100%", and of its losses from those of eager; empty if there is none."""
    if found["losses"] != reference["losses"]:
        pairs = zip(found["losses"], reference["losses"], strict=False)
        first = next((f"step {a[0]}: loss {a[1]!r}, not {b[1]!r}" for a, b in pairs if a != b), "other losses")
        return f'{first} as at "100%"'
    if found["parameters"] != reference["parameters"]:
        return 'final parameters differ from those at "100%"'
    if len(found["losses"]) != len(eager["losses"]):
        return f"{len(found['losses'])} losses, eager {len(eager['losses'])}"
    for (step, ours), (_, theirs) in zip(found["losses"], eager["losses"], strict=True):
        if not math.isclose(ours, theirs, rel_tol=TOLERANCE, abs_tol=1e-5):
            return f"step {step}: loss {ours!r}, eager {theirs!r}"
    return ""


def counted(rows: dict[str, Any]) -> dict[str, bool]:
    """Whether a script keeps its promises at both budgets; without those that PyTorch does not compile."""
    outcomes = {name: [row[label]["outcome"] for label in budgets_of(row)] for name, row in rows.items()}
    return {name: bool(each) and set(each) <= set(KEPT) for name, each in outcomes.items() if "not compiled" not in each}


def broken_promises(rows: dict[str, Any]) -> list[str]:
    """Promises that are broken, in words."""
    broken = [
        f"{name} {label}: {row[label]['outcome']}: {row[label]['why']}"
        for name, row in rows.items()
        for label in budgets_of(row)
        if row[label]["outcome"] in ("silent", "hang")
    ]
    kept = counted(rows)
    if sum(kept.values()) < len(kept) * 0.95:
        broken.append(f"{sum(kept.values())} of {len(kept)} scripts keep their budgets")
    return broken


def budgets_of(row: dict[str, Any]) -> list[str]:
    """The budgets that a script was run with."""
    return [label for label in row if "outcome" in row[label]]


def lines(name: str, row: dict[str, Any]) -> list[str]:
    """A script on the terminal: a line for each run."""
    found = []
    for label, each in row.items():
        peaks = " ".join(mib(step["peak_bytes"]) for step in each.get("steps", []))
        said = f"{each['outcome']}: {each['why']}" if "outcome" in each else each.get("error", "")
        found.append(f"{name} {label}: peaks {peaks}; {said}; {each.get('warnings', '')}")
    return found


if __name__ == "__main__":
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    os.environ.update(HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="1")
    sys.exit(main())
