"""Regions under `torch.utils.checkpoint`: hints by default, computed again and never held when that is asked for."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import checkmate.torch
from checkmate import OptionError
from checkmate.torch import measure_peak
from tests.torch.networks import Cnn, Transformer, input_of, mlp
from tests.torch.steps import ROOMY, Forgetful, Planned, close, compiled, observe, planned_bytes, recomputes

Forward = Callable[[torch.Tensor], torch.Tensor]
REGIONS: dict[str, Callable[[], tuple[nn.Module, Forward]]] = {}
"""Name -> builder of a model, and of a forward with checkpointed regions in it."""


def regions(build: Callable[[], tuple[nn.Module, Forward]]) -> Callable[[], tuple[nn.Module, Forward]]:
    REGIONS[build.__name__] = build
    return build


def blocks(count: int = 3) -> nn.ModuleList:
    return nn.ModuleList(mlp(2) for _ in range(count))


@regions
def one_after_the_other() -> tuple[nn.Module, Forward]:
    parts = blocks()
    return parts, lambda x: functools.reduce(lambda y, part: checkpoint(part, y, use_reentrant=False), parts, x)


@regions
def nested_and_rest() -> tuple[nn.Module, Forward]:
    first, inner, last = parts = blocks()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, first(x).tanh(), use_reentrant=False).sin()

    return parts, lambda x: last(checkpoint(outer, x.exp(), use_reentrant=False).tanh())


@regions
def statistics() -> tuple[nn.Module, Forward]:
    model = Cnn()

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = model.stem(torch.cat([x, x, x], 1).view(128, 3, 8, 8))
        for block in model.blocks:
            y = y + checkpoint(block, y, use_reentrant=False)
        return F.max_pool2d(y, 2)

    return model, forward


@regions
def attention() -> tuple[nn.Module, Forward]:
    model = Transformer()

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x.reshape(-1, 16, 32)
        for layer in model.layers:
            y = checkpoint(layer, y, use_reentrant=False)
        return y

    return model, forward


@regions
def buffer_overwritten() -> tuple[nn.Module, Forward]:
    part, holder = mlp(2), nn.Module()
    holder.register_buffer("mean", torch.zeros(64))

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(lambda x: part(x * holder.mean.cos()).tanh(), x.sin(), use_reentrant=False)
        holder.mean.lerp_(x.mean(0), 0.1)
        return y * holder.mean.exp()

    return nn.ModuleList([part, holder]), forward


def selective(policy: Callable[..., CheckpointPolicy]) -> tuple[nn.Module, Forward]:
    parts = blocks()
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for part in parts:
            x = checkpoint(part, x, use_reentrant=False, context_fn=contexts)
        return x

    return parts, forward


@regions
def products_saved() -> tuple[nn.Module, Forward]:
    return selective(_save_products)


def _save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


QUICK = ("nested_and_rest", "products_saved")
"""Regions that are tested every time."""


@pytest.mark.parametrize(
    ("name", "how"),
    [pytest.param(n, how, marks=() if n in QUICK else pytest.mark.slow) for n in REGIONS for how in ("forget", "keep")],
)
def test_a_respected_region_changes_no_bit(name: str, how: str) -> None:
    """Against the same model without any budget; once with the fewest computations, once with the most."""
    model, forward = REGIONS[name]()
    x = input_of("dropout")

    def loss() -> torch.Tensor:
        return forward(x).square().mean()

    reference = observe(model, compiled(loss)[0])
    torch._dynamo.reset()
    options = {} if how == "keep" else {"budget": ROOMY, "solver": Forgetful()}
    run, planned = compiled(loss, checkpoints="respected", **options)
    assert reference.differs(observe(model, run)) == []
    assert _again(planned)
    assert measure_peak(lambda: run().backward()) <= planned_bytes(planned) + 64


def test_what_must_be_saved_is_computed_once() -> None:
    """Selective checkpointing keeps the products; everything else in the region is computed again."""
    model, forward = products_saved()
    x = input_of("dropout")
    for how in ("hints", "respected"):
        torch._dynamo.reset()
        run, planned = compiled(lambda: forward(x).mean(), budget=ROOMY, solver=Forgetful(), checkpoints=how)
        run().backward()
        model.zero_grad(set_to_none=True)
        interface, result = planned[-1]
        order = [interface.graph.ops[o] for o in result.plan.order]
        assert len([op for op in order if "addmm" in op.kind]) == 6
        assert len([op for op in order if "gelu.default" in op.kind]) > 6


def test_a_hint_is_nothing_where_there_is_room() -> None:
    """By default the planner decides on everything: with room, nothing is computed twice."""
    _, forward = one_after_the_other()
    x = input_of("dropout")
    run, planned = compiled(lambda: forward(x).square().mean(), budget=ROOMY)
    run().backward()
    assert _again(planned) == []
    assert recomputes(planned) == 0


def test_regions_take_what_eager_checkpointing_takes() -> None:
    """With dropout inside, without a budget: about the same memory for the same wish, where keeping all takes thrice as much."""
    model = blocks(6)
    x = input_of("dropout", 8192)

    def loss() -> torch.Tensor:
        y = x
        for part in model:
            y = checkpoint(part, y, use_reentrant=False)
        return y.square().mean()

    eager = measure_peak(lambda: loss().backward())
    model.zero_grad(set_to_none=True)
    run, planned = compiled(loss, checkpoints="respected")
    run().backward()
    model.zero_grad(set_to_none=True)
    measured = measure_peak(lambda: run().backward())
    assert close(measured, planned_bytes(planned))
    assert measured <= 1.05 * eager


def test_a_budget_decides_on_the_rest() -> None:
    """Outside of the regions the plan may forget what it likes."""
    regions_, rest = blocks(2), mlp(6)
    model = nn.ModuleList([regions_, rest])
    x = input_of("dropout", 512)

    def loss() -> torch.Tensor:
        y = rest(x)
        for part in regions_:
            y = checkpoint(part, y, use_reentrant=False)
        return y.square().mean()

    reference = observe(model, compiled(loss)[0])
    torch._dynamo.reset()
    run, planned = compiled(loss, checkpoints="respected", budget="75%", time_limit_s=5)
    assert reference.differs(observe(model, run)) == []
    assert recomputes(planned) > 0
    assert close(measure_peak(lambda: run().backward()), planned_bytes(planned))
    assert planned[-1][1].peak_bytes <= planned[-1][1].budget_bytes


@pytest.mark.slow
def test_regions_of_every_size() -> None:
    """Respected, under a budget, with one plan for all sizes up to the largest."""
    model, forward = one_after_the_other()
    batches = [torch.randn(rows, 64) for rows in (256, 96, 160)]
    keep_all, _ = compiled(lambda x: forward(x).square().mean(), dynamic=True)
    references = [observe(model, lambda x=x: keep_all(x)) for x in batches]
    torch._dynamo.reset()
    run, planned = compiled(
        lambda x: forward(x).square().mean(), dynamic=True, checkpoints="respected", budget="90%", time_limit_s=1.5
    )
    assert [r.differs(observe(model, lambda x=x: run(x))) for r, x in zip(references, batches, strict=True)] == [[], [], []]
    assert len(planned) == 1
    assert _again(planned)
    assert close(measure_peak(lambda: run(batches[0]).backward()), planned_bytes(planned))


def test_a_step_respects_regions_too() -> None:
    """Then the optimizer steps after the backward: a whole step has no boundary to hold nothing over."""
    parts, forward = one_after_the_other()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(x)

    model, x = Model(), input_of("dropout")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = checkmate.torch.compile(model, F.mse_loss, optimizer, example=(x, x), checkpoints="respected")
    assert not step.whole
    assert any("again" in op.name for op in step.graph.ops)
    with pytest.raises(OptionError, match="checkpoints='respected'"):
        checkmate.torch.compile(model, F.mse_loss, optimizer, example=(x, x), checkpoints="respected", whole=True)


def test_an_unknown_wish_is_refused() -> None:
    """Like every option."""
    with pytest.raises(OptionError, match="checkpoints='ignored' is not one of hints, respected"):
        compiled(lambda: None, checkpoints="ignored")


def _again(planned: Planned) -> list[str]:
    return [op.name for op in planned[-1][0].graph.ops if "again" in op.name or "run_with_rng_state" in op.name]


def _region(node: fx.Node) -> object:
    return node.meta.get("ac_graph_id")


def _users(node: fx.Node) -> list[fx.Node]:
    """Readers in the forward, through the picking of outputs."""
    found: list[fx.Node] = []
    for user in node.users:
        if user.target is operator.getitem:
            found += _users(user)
        elif user.op == "output" or "backward" not in str(user.meta.get("partitioner_tag")):
            found.append(user)
    return found


class Checkpointed(nn.Module):
    """Blocks with dropout, each under `torch.utils.checkpoint` unless nothing is asked for."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.parts, self.how = blocks(), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = checkpoint(part, x, **self.how) if self.how else part(x)
        return x.square().mean()


def whole_step(budget: str, compiler: str = "eager", **how: Any) -> tuple[list[torch.Tensor], checkmate.Result]:
    """Losses, parameters and generator after three steps, and the plan."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Checkpointed(**how), torch.randn(512, 64)
    options: dict[str, Any] = {} if compiler == "inductor" else {"chunking": "off"}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = checkmate.torch.compile(
        model, None, optimizer, example=(x,), budget=budget, whole=True, compiler=compiler, time_limit_s=1, **options
    )
    losses = [step(x)[1].clone() for _ in range(3)]
    return [*losses, *(p.detach().clone() for p in model.parameters()), torch.get_rng_state()], step.result


@pytest.mark.parametrize(
    "how",
    [
        {"use_reentrant": False},
        pytest.param({"use_reentrant": True}, marks=pytest.mark.slow),
        pytest.param({"use_reentrant": False, "preserve_rng_state": False}, marks=pytest.mark.slow),
    ],
)
def test_regions_are_hints_in_a_whole_step(how: dict[str, Any]) -> None:
    """PyTorch would recompute them before they are planned, and refuses those with dropout: a switch that users had on before."""
    plain, planned = whole_step("60%")
    found, result = whole_step("60%", **how)
    assert all(map(torch.equal, plain, found))
    assert result.plan.graph_digest == planned.plan.graph_digest


def test_dropout_in_a_region_of_a_whole_step_is_that_of_eager_code() -> None:
    """The masks of the backward are those of the forward, which are those that the generator gives."""
    torch.manual_seed(0)
    model, x = Checkpointed(use_reentrant=False), torch.randn(512, 64)
    optimizer, left = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        left.append(loss.detach())
    left += [*(p.detach() for p in model.parameters()), torch.get_rng_state()]
    assert all(map(torch.equal, left, whole_step("50%", use_reentrant=False)[0]))


@pytest.mark.slow
def test_regions_are_hints_in_a_whole_step_that_inductor_compiles() -> None:
    """It compiles the same graph."""
    plain, _ = whole_step("60%", "inductor")
    found, _ = whole_step("60%", "inductor", use_reentrant=False)
    assert all(map(torch.equal, plain, found))
