"""The models of PyTorch's own dashboard, in its training step, with our backend beside `aot_eager`.

    pip install timm torchvision torch_geometric
    python benchmarks/dynamo_suite.py [--models GPT2ForSequenceClassification vgg16] [--time-limit 3]

`dynamo_models.csv` has the names of `benchmarks/dynamo` in PyTorch (the lists of transformers and timm, with the names that the
latter had in 2023, and TorchBench) whose code is in a package. The call is the dashboard's, too: one function of cloned inputs,
forward, loss, backward and results is compiled. Weights are random; models of transformers have two layers of width 64, and
images have 96 pixels wherever the model takes them.

Each model has a process of its own. `accuracy` compares loss, gradients, parameters and buffers of two steps from one seed with
eager mode, and `identical` says whether they are equal to the bit. `speedup` is the processor time of eager mode over that of the
backend, and `compression_ratio` its peak over that of the backend, with parameters and gradients. Ours runs within 60 % of the
step that keeps everything, or within the bytes that a refusal names. Models that were run keep their rows; without `--models` the
others are run. Exit status 1 if a model passes with `aot_eager` and not with ours.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import importlib
import json
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fresh import ChildError, answer, child, parser, results_of

BACKENDS = ("aot_eager", "checkmate")
BUDGET = "60%"
BATCH = 4
RESULTS = results_of(__file__).with_suffix(".csv")
SECONDS = 600
"""What a model may take: after it, its process is ended."""

COLUMNS = """
dev name batch_size accuracy speedup abs_latency compilation_latency compression_ratio eager_peak_mem dynamo_peak_mem
calls_captured unique_graphs graph_breaks suite backend budget identical error
"""  # those of the dashboard, and five of ours

with (Path(__file__).parent / "dynamo_models.csv").open() as models:
    MODELS = {(row["suite"], row["name"]): (row["package"], row["model"]) for row in csv.DictReader(models)}

SMALL = json.loads((Path(__file__).parent / "dynamo_small.json").read_text())
"""Values of what a configuration of transformers names so."""


def small(config: Any) -> dict[str, Any]:
    """Arguments of a configuration that is like another one, and small."""
    found = {key: value for key, value in SMALL.items() if hasattr(config, key)}
    return found | ({"decoder_start_token_id": 0} if getattr(config, "is_encoder_decoder", False) else {})


def transformer(kind: str) -> tuple[Any, Any]:
    """A small model of transformers, and its arguments."""
    import torch
    import transformers

    cls = getattr(transformers, kind)
    default = cls.config_class()
    parts = {part: small(getattr(default, part)) for part in ("text_config", "vision_config") if kind == "CLIPModel"}
    widths = {"num_hidden_layers": 2, "vocab_size": 2048} if kind.startswith("MobileBert") else parts or small(default)
    config = cls.config_class(**widths, **({"is_decoder": True} if kind.startswith("Reformer") else {}))
    config.use_cache = False  # as in the dashboard
    model, ids = cls(config), torch.randint(3, 2048, (BATCH, 64 if kind.startswith("CLIP") else 128))
    if kind.startswith("Whisper"):
        return model, {"input_features": torch.randn(BATCH, 16, 128), "labels": ids}
    if kind == "CLIPModel":
        return model, {"input_ids": ids, "pixel_values": torch.randn(BATCH, 3, 64, 64), "return_loss": torch.tensor(True)}
    targets = {"QuestionAnswering": ("start_positions", "end_positions"), "TextModel": ()}
    keys = next((keys for end, keys in targets.items() if kind.endswith(end)), ("labels",))
    classes = kind.endswith(("SequenceClassification", "QuestionAnswering"))
    return model, {"input_ids": ids, **{key: torch.randint(2, (BATCH,)) if classes else ids for key in keys}}


def image_model(make: Callable[..., Any], name: str) -> tuple[Any, Any]:
    """A model of images, with small ones if it takes any size, or else with its own."""
    import torch

    for size, own in ((96, {"img_size": 96}), (96, {}), (None, {})):
        with contextlib.suppress(TypeError, RuntimeError, AssertionError, ValueError):
            model = make(name, **own)
            images = torch.randn(BATCH, 3, *([size] * 2 if size else model.default_cfg["input_size"][1:]))
            copy.deepcopy(model)(images)
            return model, [images]
    raise ValueError(f"no size of an image works for {name}")


def built(package: str, name: str) -> tuple[Any, Any]:
    """A model of a package with random weights, and its arguments."""
    import stock_models  # noqa: F401 - with which torchvision is imported without its operators
    import torch

    if package == "transformers":
        return transformer(name)
    if package == "torch_geometric":
        net = getattr(importlib.import_module("torch_geometric.nn.models"), name)(64, 64, num_layers=3, out_channels=64)
        return net, [torch.randn(500, 64), torch.randint(500, (2, 2500))]
    make = {"timm": ("timm", "create_model"), "torchvision": ("torchvision.models", "get_model")}[package]
    return image_model(getattr(importlib.import_module(make[0]), make[1]), name)


def run(suite: str, name: str, time_limit_s: float) -> list[dict[str, Any]]:
    """Child: eager mode, and then each backend."""
    import torch
    from torch._dynamo.utils import counters, same

    torch.set_num_threads(1)
    torch.manual_seed(0)
    first, inputs = built(*MODELS[suite, name])
    eager = observed(iteration(suite), copy.deepcopy(first.train()), inputs)
    rows = []
    for backend in BACKENDS:
        budget, ours = BUDGET if backend == "checkmate" else "", {"named": 0}
        while "named" in ours:  # a budget that is refused, and then those that the refusals name
            torch._dynamo.reset()
            counters.clear()
            options = {"budget": budget, "time_limit_s": time_limit_s} if budget else None
            ours = observed(torch.compile(iteration(suite), backend=backend, options=options), copy.deepcopy(first), inputs)
            budget = str(ours.get("named", budget))
        row = {"accuracy": "eager_fail_to_run"} | eager if "error" in eager else {"accuracy": "fail_to_run"} | ours
        if "error" not in row:
            row = {
                "accuracy": "pass" if same(eager["results"], ours["results"], tol=1e-2) else "fail_accuracy",
                "identical": same(eager["results"], ours["results"], tol=0.0),
                "speedup": round(eager["seconds"] / ours["seconds"], 3),
                "abs_latency": round(1e3 * ours["seconds"], 2),
                "compilation_latency": round(ours["first"], 1),
                "compression_ratio": round(eager["peak"] / ours["peak"], 3),
                "eager_peak_mem": eager["peak"],
                "dynamo_peak_mem": ours["peak"],
            }
        row |= {"budget": budget, "graph_breaks": sum(counters["graph_break"].values())}
        rows.append(of(suite, name, backend) | row | {key: counters["stats"][key] for key in ("calls_captured", "unique_graphs")})
    return rows


def of(suite: str, name: str, backend: str) -> dict[str, Any]:
    """What a row is of."""
    return {"dev": "cpu", "name": name, "batch_size": BATCH, "suite": suite, "backend": backend}


def observed(step: Callable[..., Any], model: Any, inputs: Any) -> dict[str, Any]:
    """Results of a second step from a seed, and then a peak and the time of the fastest of three; or an error."""
    import numpy
    import torch

    from checkmate.torch import measure_peak

    try:
        for seed in (torch.manual_seed, numpy.random.seed, random.seed):
            seed(0)
        first = timed(lambda: step(model, inputs, False))
        results = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), step(model, inputs, True))
        step(model, inputs, False)
        model.zero_grad(True)
        resident = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        peak = resident + measure_peak(lambda: step(model, inputs, False))
        seconds = min(timed(lambda: step(model, inputs, False)) for _ in range(3))
    except Exception as error:  # noqa: BLE001 - whatever a model or a backend raises is a row of the table
        traceback.print_exc()
        named = getattr(error, "smallest_bytes", None)  # of a refusal
        return {"error": f"{type(error).__name__}: {error}".replace("\n", " ")[:300], **({"named": named} if named else {})}
    return {"results": results, "first": first, "peak": peak, "seconds": seconds}


def timed(step: Callable[[], Any]) -> float:
    """Seconds of processor time."""
    began = time.process_time()
    step()
    return time.process_time() - began


def iteration(suite: str) -> Callable[..., Any]:
    """The dashboard's training step of a suite."""
    import torch
    from torch._dynamo.testing import collect_results, reduce_to_scalar_loss
    from torch._dynamo.utils import clone_inputs

    clear = torch._disable_dynamo(lambda model: model.zero_grad(True))

    def step(model: Any, inputs: Any, collect: bool) -> Any:
        given = clone_inputs(inputs)
        clear(model)
        predicted = model(**given) if isinstance(given, dict) else model(*given)
        loss = predicted[0] if suite == "huggingface" else reduce_to_scalar_loss(predicted)
        loss.backward()
        return collect_results(model, None, loss, []) if collect else None

    return step


def verdict(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Prints how many models pass; those that pass with `aot_eager` only."""
    found = {(row["suite"], row["name"], row["backend"]) for row in rows if row["accuracy"] == "pass"}
    stock, ours = ({case[:2] for case in found if case[2] == backend} for backend in BACKENDS)
    print(f"aot_eager passes {len(stock)} models, checkmate {len(stock & ours)} of them")
    return [f"{suite}: {name} passes with aot_eager only" for suite, name in sorted(stock - ours)]


def main() -> int:
    """Run the benchmark, or one child of it."""
    command = parser(__doc__)
    command.add_argument("--models", nargs="+", default=[])
    command.add_argument("--time-limit", default="3", help="seconds a solve may take")
    command.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = command.parse_args()
    if options.child:
        signal.alarm(SECONDS)
        suite, name, limit = options.child
        answer(run(suite, name, float(limit)))
        return 0
    for case in MODELS:
        if case[1] not in options.models if options.models else case in known():
            continue
        try:
            rows = child(__file__, *case, options.time_limit, HF_HUB_OFFLINE="1")
        except ChildError as error:
            status = {"accuracy": "timeout" if "-14" in str(error) else "fail_to_run", "error": str(error)}
            rows = [of(*case, backend) | status for backend in BACKENDS]
        print(*case, *(row["accuracy"] for row in rows), *(row.get("error", "") for row in rows), flush=True)
        found = known() | {case: rows}
        with RESULTS.open("w", newline="") as file:
            table = csv.DictWriter(file, COLUMNS.split(), lineterminator="\n")
            table.writeheader()
            table.writerows(row for case in MODELS for row in found.get(case, ()))
    broken = verdict(row for rows in known().values() for row in rows)
    print(*broken or ["all promises hold"], sep="\n")
    return bool(broken)


def known() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Rows of models that were run, by suite and name."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    if RESULTS.exists():
        with RESULTS.open() as file:
            for row in csv.DictReader(file):
                found.setdefault((row["suite"], row["name"]), []).append(row)
    return found


if __name__ == "__main__":
    sys.exit(main())
