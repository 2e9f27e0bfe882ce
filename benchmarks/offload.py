"""Fronts with and without a host on GPUs that are not there: cost and bound against the budget, with copies planned jointly.

Steps are traced on shapes alone; op costs are roofline estimates for the device, and copies take the rates of its profile.
Nothing was measured: the fronts compare plans under one model. ``waits`` is the time in which the step waits for copies.

    python benchmarks/offload.py [--cases gpt2-xl llama-7b resnet-50] [--devices H100 ...] [--seconds 30]

Rows of cases and devices that are not named stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch_fits
from fresh import add_rows, of_cases

DEVICES = ("RTX 4090", "H100", "H200", "GH200")
BUDGETS = ("20%", "40%")
HOST = "64GiB"
WHOLE = ("llama-7b",)
"""Cases with SGD in the step."""


def gpt2_xl() -> tuple[Any, Any, Any]:
    """GPT-2 XL in bfloat16 without dropout, 4 sequences of 1024 tokens."""
    import torch

    return torch_fits.gpt2_xl(4, torch.bfloat16)[:3]


def llama_7b() -> tuple[Any, Any, Any]:
    """The shapes of Llama 7B in bfloat16, one sequence of 2048 tokens."""
    return torch_fits.llama_7b()[:3]


def llama_1b() -> tuple[Any, Any, Any]:
    """The shapes of Llama 3.2 1B in bfloat16, 4 sequences of 2048 tokens: the case of torchtitan#3881."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True}
    return torch_fits.outside(torch_fits.llama(**torch_fits.LLAMA_3, **sizes), 4, 2048)


def resnet_50() -> tuple[Any, Any, Any]:
    """ResNet-50 in float32 (TF32), 64 images of 224 x 224 pixels."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = ResNetForImageClassification(ResNetConfig(num_labels=1000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(pixel_values=x).logits

    with torch.device("meta"):
        return Logits(), torch.nn.functional.cross_entropy, (torch.zeros(64, 3, 224, 224), torch.zeros(64, dtype=torch.long))


CASES = {"gpt2-xl": gpt2_xl, "llama-7b": llama_7b, "llama-1b": llama_1b, "resnet-50": resnet_50}


def front(name: str, device: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Both curves of a case on a device, from the smallest budget up."""
    import torch

    import checkmate
    import checkmate.torch

    profile = checkmate.load_device(device)
    model, loss, example = CASES[name]()
    # Gradients of a large model take more than its activations; in a whole step each is freed when it is used.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if name in WHOLE else None
    graph = checkmate.torch.capture(model, loss, example=example, device=profile, optimizer=optimizer, outputs="released")
    host = profile.host_memory(HOST)
    for budget in BUDGETS:
        found = {}
        for kind, given in (("alone", None), ("host", host)):
            problem = checkmate.Problem(graph, budget, host=given)
            start = found["alone"].plan if kind == "host" else None
            limits = checkmate.Limits(time_s=seconds if kind == "host" else seconds / 2)
            found[kind] = checkmate.solve(problem, limits=limits, initial=start, raise_on_failure=False)
        yield {
            "case": name,
            "about": " ".join((CASES[name].__doc__ or "").split()),
            "device": device,
            "budget": budget,
            "budget_bytes": checkmate.Problem(graph, budget).budget_bytes,
            "resident_bytes": graph.resident_bytes,
            "ops": len(graph.ops),
            "once_ns": graph.cost,
            "forward_ns": sum(op.cost for op in graph.ops if op.phase == "forward"),
            "out_bytes_per_s": host.out_bytes_per_s,
            "in_bytes_per_s": host.in_bytes_per_s,
            **{kind: _figures(graph, result) for kind, result in found.items()},
        }


def _figures(graph: Any, result: Any) -> dict[str, Any]:
    import checkmate

    figures = {
        "bound": None if result.bound == float("inf") else result.bound / graph.cost,
        "elapsed_s": round(result.elapsed_s, 1),
    }
    if result.plan is None:
        return {**figures, "status": result.termination.reason.value}
    timeline = checkmate.simulate(graph, result.plan)
    return {
        **figures,
        "status": result.termination.reason.value,
        "overhead": result.overhead,
        "gap": result.gap,
        "peak_bytes": result.peak_bytes,
        "recomputations": len(result.plan.order) - len(graph.ops),
        "copies": sum(c.direction == "out" for c in timeline.copies),
        "offloaded_bytes": timeline.copied_bytes("out"),
        "host_peak_bytes": timeline.host_peak_bytes,
        "waits_ns": timeline.waited,
    }


def main() -> None:
    """Run the named cases, keep the rows of the others, and write the JSON."""
    options = of_cases(__doc__, CASES, DEVICES, 30.0)
    rows = (row for device in options.devices for case in options.cases for row in front(case, device, options.seconds))
    packages = ("torch", "transformers")
    add_rows(__file__, rows, ("case", "device", "budget"), packages=packages, seconds=options.seconds)


if __name__ == "__main__":
    main()
