"""What a step takes, and how large it may be, where regions of it run piece by piece."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import checkmate
import checkmate.torch
from checkmate.core.errors import OptionError
from checkmate.core.units import parse_bytes
from checkmate.studies.fit_report import Fits

VOCABULARY, WIDTH, TOKENS = 65536, 512, 4096
MEMORY = parse_bytes("2GiB")
"""Less than two arrays of logits, which are 1 GiB each."""


class Head(nn.Module):
    """Embedding and head: the logits are by far the largest tensor."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.embedding(tokens).tanh()).flatten(0, 1), labels.flatten())


def ask(**options: Any) -> Fits:
    """Ask for a model on the meta device, on a GPU that is not there. Nothing can run, and nothing is allocated."""
    torch._dynamo.reset()
    given: dict[str, Any] = {"device": "H100", "headroom": 0.0, "time_limit_s": 6.0, **options}
    with torch.device("meta"):
        tokens = torch.zeros(2, TOKENS // 2, dtype=torch.long)
        model = Head(VOCABULARY, WIDTH)
        return checkmate.torch.fits(model, example={"tokens": tokens, "labels": tokens}, optimizer="sgd", **given)


def test_a_device_below_the_floor_is_enough_in_pieces() -> None:
    """The plan, its proof and the graph that they are for are those of the step in pieces, which the answer names."""
    whole = ask()
    refused, answer = ask(memory=MEMORY), ask(memory=MEMORY, chunking="auto")
    assert refused.verdict == "does not fit"
    assert answer.verdict == "fits with recomputation"
    assert answer.keep_all_bytes == whole.keep_all_bytes > MEMORY
    assert answer.floor_bytes <= answer.smallest_bytes < MEMORY
    assert answer.why.endswith("with head + loss in pieces")
    assert answer.result is not None
    assert answer.result.plan is not None
    assert checkmate.validate(answer.graph, answer.result.plan, answer.available_bytes) == ()
    assert answer.result.overhead == answer.result.cost / whole.graph.cost > 1
    (count,) = (
        found[1] for remark in answer.remarks if (found := re.fullmatch(r"in pieces: head \+ loss, (\d+) pieces of .*", remark))
    )
    assert any(op.kind == f"head + loss in {count} pieces" for op in answer.graph.ops)


def test_what_keeps_everything_runs_nothing_in_pieces() -> None:
    """Pieces cost time, and there is nothing to gain; the smallest peak is that in pieces all the same."""
    whole, answer = ask(), ask(chunking="auto")
    assert answer.verdict == "keeps everything"
    assert answer.graph == whole.graph
    assert answer.smallest_bytes < whole.smallest_bytes


@pytest.mark.parametrize("chunking", ["exact", "sometimes"])
def test_what_cannot_be_known_without_the_device_is_refused(chunking: str) -> None:
    """Which regions keep every bit is found out by running them."""
    with pytest.raises(OptionError, match="chunking=") as refused:
        ask(chunking=chunking)
    assert "chunking='" in refused.value.hint
