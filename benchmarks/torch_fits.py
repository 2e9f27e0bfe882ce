"""Large models on GPUs that are not there: what `fits` answers, how long it takes, and how much memory.

Each case runs in a fresh process on shapes alone. Wall and processor seconds are of `fits` itself; memory is the whole process's,
PyTorch and transformers included. Exit status 1 if a case takes more than 4 GiB, or more than a minute of processor time.

    python benchmarks/torch_fits.py [--models gpt2-xl llama-7b]

Cases that are not named keep their rows of the last run. The limits are not for those that look for the longest sequence, which
takes three more traces.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fresh import by_model

LIMIT_S, LIMIT_BYTES = 60.0, 4 * 2**30
LONGEST_S = 1500.0
"""Time limit of cases that look for the longest sequence."""


ADAMW = {"device": "H100", "optimizer": "adamw"}


def gpt2_xl(batch: int = 8, dtype: Any = None) -> tuple[Any, Any, Any, dict[str, Any]]:
    """GPT-2 XL in float32, 8 sequences of 1024 tokens, as its paper has it but for dropout."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    without = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=48, n_embd=1600, n_head=25, **without)).to(dtype or torch.float32)
    return *outside(model, batch, 1024), {**ADAMW, "device": "RTX 4090"}


def llama(**config: Any) -> Any:
    """A Llama in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)


LLAMA_3 = {"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0}


def llama_7b() -> tuple[Any, Any, Any, dict[str, Any]]:
    """The shapes of Llama 7B in bfloat16, one sequence of 2048 tokens."""
    return *outside(llama(), 1, 2048), ADAMW


def llama_3_8b() -> tuple[Any, Any, Any, dict[str, Any]]:
    """The shapes of Llama 3 8B in bfloat16, with its vocabulary of 128,256, one sequence of 16,384 tokens."""
    import torch

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "max_position_embeddings": 131072}
    tokens = torch.zeros(1, 16384, dtype=torch.long, device="meta")
    example = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    return llama(**LLAMA_3, **sizes), None, example, {**ADAMW, "sequence_dim": 1, "time_limit_s": LONGEST_S}


CASES = {"gpt2-xl": gpt2_xl, "llama-7b": llama_7b, "llama-3-8b": llama_3_8b}


def outside(net: Any, batch: int, length: int) -> tuple[Any, Any, Any]:
    """A language model that returns its logits, its loss, and tokens."""
    import torch
    from torch.nn.functional import cross_entropy

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.net(input_ids=tokens, use_cache=False).logits

    def loss(logits: Any, tokens: Any) -> Any:
        return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    tokens = torch.zeros(batch, length, dtype=torch.long, device="meta")
    return Logits(), loss, (tokens, tokens)


def ask(name: str, time_limit_s: float, _rounds: int) -> dict[str, Any]:
    """Ask for one case."""
    import torch

    import checkmate.torch

    torch.set_num_threads(1)
    model, loss, example, asked = CASES[name]()
    began, cpu = time.perf_counter(), time.process_time()
    found = checkmate.torch.fits(model, loss, example=example, **{"time_limit_s": time_limit_s, **asked})
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    result, largest = found.result, found.largest_batch
    return {
        "about": " ".join((CASES[name].__doc__ or "").split()),
        **asked,
        "parameters": sum(p.numel() for p in model.parameters()),
        "ops": len(found.graph.ops),
        "verdict": found.verdict,
        "available_bytes": found.available_bytes,
        "resident_bytes": found.graph.resident_bytes,
        "keep_all_bytes": found.keep_all_bytes,
        "smallest_bytes": found.smallest_bytes,
        "floor_bytes": found.floor_bytes,
        "why": found.why,
        "overhead": None if result is None else result.overhead,
        "gap": None if result is None else result.gap,
        "peak_bytes": None if result is None else result.peak_bytes,
        "batch": found.batch,
        "largest_batch": None if largest is None else largest.batch,
        "sequence": found.sequence,
        "longest": _longest(found.longest_sequence),
        "remarks": list(found.remarks),
        "wall_s": round(wall_s, 1),
        "cpu_s": round(cpu_s, 1),
        "max_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "load": [round(x, 1) for x in os.getloadavg()],
    }


def _longest(found: Any) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "sequence": found.batch,
        "upper_bound": found.upper_bound,
        "why": found.why,
        "peak_bytes": found.result.peak_bytes,
        "overhead": found.result.overhead,
        "remarks": list(found.result.remarks),
    }


def verdict(name: str, row: dict[str, Any]) -> list[str]:
    """Limits that a case exceeds."""
    if row.get("longest") is None and (row["cpu_s"] > LIMIT_S or row["max_resident_bytes"] > LIMIT_BYTES):
        return [f"{name}: {row['cpu_s']} s of the processor, {row['max_resident_bytes']} bytes"]
    return []


def main() -> int:
    """Run the cases, or one child."""
    return by_model(__file__, __doc__, tuple(CASES), run=ask, verdict=verdict, rows="cases", time_limit_s=LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
