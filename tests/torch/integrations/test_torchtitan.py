"""A memory policy for torchtitan's graph trainer: with its own tracer and passes, and with a stub of their shape."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from checkmate.core.errors import InfeasibleBudgetError, MissingExtraError, OptionError
from checkmate.torch import measure_peak
from checkmate.torch.integrations import with_budget

TRAINER = "torchtitan.experiments.graph_trainer"
Policies = dict[str, Callable[..., fx.GraphModule]]


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> Policies:
    """Policies by name, as in ``experiments/graph_trainer/memory_policy.py``; the full one saves results of layers."""

    def full(module: fx.GraphModule, *, config: Any) -> fx.GraphModule:
        for node in module.graph.nodes:
            if node.op == "call_function" and not node.meta.get("autograd_backward") and node.name not in config.once:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        return module

    registry, found = ModuleType(f"{TRAINER}.memory_policy"), {"full": full}
    registry.MEMORY_POLICY_REGISTRY = found  # type: ignore[attr-defined]
    registry.register_memory_policy = lambda key: lambda policy: found.update({key: policy})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    return found


LAYERS = 3


def traced() -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Forward and backward in one graph, as ``make_fx_tracer.py`` traces it; PyTorch marks the nodes of the backward."""
    torch.manual_seed(0)
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(LAYERS)]

    def step(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
        for weight in weights:
            x = torch.tanh(nn.functional.gelu(x @ weight).sin())
        loss = x.square().mean()
        return [loss.detach(), *torch.autograd.grad(loss, weights)]

    inputs = [torch.randn(512, 64), *weights]
    module = make_fx(step, tracing_mode="fake")(*inputs)
    started = False  # PyTorch 2.11 does not mark them
    for node in module.graph.nodes:
        started = started or node.meta.get("autograd_backward", False) or "ones_like" in str(node.target)
        node.meta.update({"autograd_backward": True, "custom": {"module_fqn": "layers"}} if started else {})
    return module, inputs


def run_again(module: fx.GraphModule) -> None:
    """As ``selective_activation_remat_pass``: a tagged node gets a copy before the first node of the backward that needs it."""
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    copies: dict[fx.Node, fx.Node] = {}

    def tagged(node: fx.Node) -> bool:
        return node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE

    def closure(node: fx.Node) -> set[fx.Node]:
        return {node}.union(*map(closure, node.all_input_nodes)) if tagged(node) else set()

    for node in [n for n in module.graph.nodes if n.meta.get("autograd_backward")]:
        for read in sorted(set().union(*map(closure, node.all_input_nodes)) - copies.keys(), key=order.__getitem__):
            with module.graph.inserting_before(node):
                copies[read] = module.graph.node_copy(read, lambda n: copies.get(n, n))
        node.args = fx.map_arg(node.args, lambda n: copies.get(n, n))
    for node in reversed(list(copies)):
        if not node.users:
            module.graph.erase_node(node)
    module.recompile()


def measured(module: fx.GraphModule, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    with torch.no_grad():
        return module(*inputs), measure_peak(lambda: module(*inputs))


def test_the_step_keeps_the_budget(policies: Policies) -> None:
    """The bits of the plain step, a smaller peak, and only tags that torchtitan's passes carry out."""
    module, inputs = traced()
    expected, plain = measured(module, inputs)
    resident = sum(t.nbytes for t in inputs)
    budget = resident + int(0.7 * plain)
    config = SimpleNamespace(compile=SimpleNamespace(memory_policy="default"), once={"tanh", "tanh_1", "tanh_2"})
    assert with_budget(config, budget) is config and config.compile.memory_policy == "checkmate"
    policies["checkmate"](module, config=config)
    assert not any("recompute" in n.meta for n in module.graph.nodes if n.meta.get("autograd_backward"))
    run_again(module)
    found, peak = measured(module, inputs)
    assert all(map(torch.equal, found, expected))
    assert resident + peak <= budget
    with_budget(config, resident + plain // 8)
    with pytest.raises(InfeasibleBudgetError, match="with every op tagged"):
        policies["checkmate"](traced()[0], config=config)


def test_there_has_to_be_a_budget(policies: Policies, environ: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the call or of the environment; and torchtitan."""
    environ.pop("CHECKMATE_BUDGET", None)
    config = SimpleNamespace(compile=SimpleNamespace(memory_policy="default"))
    with pytest.raises(OptionError, match="there is no budget"):
        with_budget(config)
    environ["CHECKMATE_BUDGET"] = "1GiB"
    with_budget(config)
    assert "checkmate" in policies
    monkeypatch.setitem(sys.modules, f"{TRAINER}.memory_policy", None)
    with pytest.raises(MissingExtraError, match="pip install torchtitan"):
        with_budget(config)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.norm, self.lm_head = nn.Embedding(256, 64), nn.LayerNorm(64), nn.Linear(64, 256)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(4)})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_with_the_passes_of_torchtitan() -> None:
    """Its tracer, its tags and its pass for recomputation: bits, and the peak within the budget and near the plan."""
    pytest.importorskip("torchtitan", reason="needs torchtitan: pip install torchtitan")
    part = lambda name: import_module(f"{TRAINER}.{name}")  # noqa: E731
    outcomes = []
    for share in (None, 0.6):
        torch.manual_seed(0)
        model = Decoder()
        part("common_utils").annotate_module_fqns(model)
        tokens, labels = torch.randint(256, (2, 4, 128))

        def step(tokens: torch.Tensor, labels: torch.Tensor, model: nn.Module = model) -> list[torch.Tensor]:
            of = lambda prediction, labels: nn.functional.cross_entropy(prediction.flatten(0, 1), labels.flatten())  # noqa: E731
            loss = part("common_utils").compute_annotated_loss(of, model(tokens), labels)
            return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

        result = part("make_fx_tracer").minimal_fx_tracer(step, module=model)(tokens, labels)
        resident = sum(p.nbytes for p in model.parameters())
        if share is not None:
            budget = resident + int(share * outcomes[0][1])
            config = SimpleNamespace(compile=SimpleNamespace(memory_policy="default", full_recompute_save_ops=""))
            part("memory_policy").tag_with_memory_policy_pass(result.gm, config=with_budget(config, budget))
            result.gm = part("selective_activation_remat").selective_activation_remat_pass(result.gm)
        run = lambda: part("make_fx_tracer").run_traced(result, module=model)(tokens, labels)  # noqa: B023, E731
        outcomes.append((run(), measure_peak(run)))
    assert all(map(torch.equal, outcomes[0][0], outcomes[1][0]))
    assert 0.95 * share * outcomes[0][1] <= outcomes[1][1] <= share * outcomes[0][1]
