"""`checkmate fits --config`: a configuration of Hugging Face is enough, and wrong ones are refused before a trace."""

from __future__ import annotations

import json
import sys

import pytest

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}


@pytest.fixture
def config(run, tmp_path):
    pytest.importorskip("transformers", reason="needs transformers")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return "config.json"


def test_a_configuration_is_enough(run, config):
    """Parameters in the type that it names, the batch and sequence of the command line, and no memory for any of it."""
    done = run("fits", "--config", config, "--batch", "3", "--seq", "16", "--device", "H100", "--time-limit", "1", "--json")
    assert done.code == 0, done.err
    layer = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    tensors = 2 * 64 * 32 + layer + 32
    assert 2 * tensors <= done.json["parameter_bytes"] < 2 * tensors + 512 * 20  # each rounded up to the allocator's blocks
    assert done.json["batch"]["asked"] == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--config", "absent.json"), "absent.json: no such file"),
        (("--config", "config.json", "--seq", "65"), "--seq 65 is not from 2 to the 64 positions"),
        (("--config", "config.json", "--batch", "0"), "--batch 0"),
        (("--config", "bare.json"), "model_type"),
        (("--config", "vision.json"), "no configuration of a causal language model"),
        (("--config", "config.json", "model.py:build"), "either a function or --config"),
        (("model.py:build", "--seq", "3"), "--seq belongs to --config"),
        ((), "either a function or --config"),
    ],
)
def test_what_cannot_be_answered_is_said(run, config, tmp_path, words, said):
    """With the option at fault."""
    (tmp_path / "bare.json").write_text("{}")
    (tmp_path / "vision.json").write_text(json.dumps({"model_type": "vit"}))
    done = run("fits", *words, "--device", "H100")
    assert done.code == 2 and said in done.err, done.err


def test_transformers_is_named_where_it_is_missing(run):
    """It is in no extra: planning does not need it."""
    pytest.importorskip("torch", reason="needs the torch extra")
    before = {name: sys.modules[name] for name in sys.modules.keys() & {"transformers"}}
    sys.modules["transformers"] = None
    try:
        done = run("fits", "--config", "config.json", "--device", "H100")
    finally:
        del sys.modules["transformers"]
        sys.modules.update(before)
    assert done.code == 2 and "hint: pip install transformers" in done.err
