"""The plugin for axolotl: as its own ``load_plugin`` loads it, and with a stub of the shape of axolotl 0.19."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("pydantic", reason="needs pydantic, as axolotl does")
pytestmark = pytest.mark.filterwarnings("ignore")  # of axolotl and what it imports
PLUGIN = "checkmate.torch.integrations.axolotl.CheckmatePlugin"


@pytest.fixture(params=["stub", "axolotl"])
def plugin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plugin as axolotl loads it: ``load_plugin`` in ``src/axolotl/integrations/base.py``."""
    if request.param == "axolotl":
        pytest.importorskip("axolotl", reason="needs axolotl: pip install axolotl")
        return importlib.import_module("axolotl.integrations.base").load_plugin(PLUGIN)
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {})  # type: ignore[attr-defined]
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, PLUGIN.rpartition(".")[0], raising=False)
    made = getattr(importlib.import_module(PLUGIN.rpartition(".")[0]), PLUGIN.rpartition(".")[2])()
    monkeypatch.delitem(sys.modules, PLUGIN.rpartition(".")[0])
    return made


def test_the_keys_of_the_yaml_are_validated(plugin: Any) -> None:
    """axolotl adds the model of the keys to its own: ``merge_input_args`` in ``src/axolotl/integrations/config.py``."""
    name = plugin.get_input_args().rpartition(".")[2]
    keys = getattr(sys.modules[type(plugin).__module__], name) if type(plugin).__module__ in sys.modules else None
    keys = keys or type(plugin).add_callbacks_post_trainer.__globals__[name]
    assert keys(checkmate_budget="20GiB").checkmate_budget == "20GiB"
    assert keys().checkmate_budget is None
    with pytest.raises(ValueError, match="checkmate_budget"):
        keys(checkmate_budget={"of": "20GiB"})


@pytest.mark.parametrize("in_the_model", [False, True])
@pytest.mark.parametrize("rl", [None, "dpo"])
def test_trainers_get_their_budget(plugin: Any, rl: str | None, in_the_model: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback compiles the model; a trainer of TRL whose models compute log-probabilities has these compiled."""
    utils = ModuleType("trl.trainer.utils")
    if in_the_model:
        utils._ChunkedLogProbFunction = utils._use_triton = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    cfg = SimpleNamespace(rl=rl, checkmate_budget="20GiB", checkmate_options={"time_limit_s": 7})
    plain = lambda: None  # noqa: E731
    trainer = SimpleNamespace(
        model=SimpleNamespace(forward=plain),
        args=SimpleNamespace(gradient_checkpointing=False),
        accelerator=SimpleNamespace(unwrap_model=lambda m: m),
    )
    callbacks = plugin.add_callbacks_post_trainer(cfg, trainer)
    if rl and in_the_model:
        assert callbacks == [] and trainer.model.forward is not plain
    else:
        (callback,) = callbacks
        assert callback.options == {"budget": "20GiB", "time_limit_s": 7} and trainer.model.forward is plain
