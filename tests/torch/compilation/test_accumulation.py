"""Gradients are added to existing ones where they are computed: bits, hooks and storages are those of autograd."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from checkmate.torch.steps.coordinator import coordinator
from checkmate.torch.steps.recorder import StepRecorder
from tests.torch.networks import mlp
from tests.torch.steps import compiled

# The search for regions allocates in the second step, as costs decide.
QUICK = {"time_limit_s": 1.0, "chunking": "off"}
WIDTH = 64
Run = Callable[..., torch.Tensor]
Loop = Callable[[Run, nn.Module], Any]

# Dynamo asks a tensor between two graphs for its gradient, and torch warns of that.
pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def in_both(
    loop: Loop,
    make: Callable[[], nn.Module] = lambda: mlp(3, dropout=0.0),
    *,
    prepare: int = 3,
    accumulate: bool = False,
    same: Callable[..., bool] = torch.equal,
) -> None:
    """Run a loop with the backend and with ``aot_eager``, once gradients exist and a plan adds to them; compare to the bit.

    Args:
        loop: Gets the compiled model, which returns a loss, and the model; returns what else to compare.
        make: Makes the model.
        prepare: How many backwards come before.
        accumulate: Whether the first plan adds to gradients already.
        same: Compares two tensors.
    """
    found = []
    for backend, options in (
        ("aot_eager", {}),
        (
            "checkmate",
            {"options": {"budget": "100%" if prepare == 0 or accumulate else "80%", "accumulate": accumulate, **QUICK}},
        ),
    ):
        torch._dynamo.reset()
        coordinator().forget_steps()
        torch.manual_seed(0)
        model = make()

        def forward(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return model(x).square().mean()

        run = torch.compile(forward, backend=backend, **options)  # type: ignore[call-overload]
        for i in range(prepare):
            run(batch(i)).backward()
        if options and prepare:
            assert coordinator().step is None or any(p.accumulated for p in coordinator().step.programs)
        seen = loop(run, model)
        found.append((seen, [None if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()]))
    (seen, gradients), (other, others) = found
    assert len(gradients) == len(others)
    assert all(a is b is None or same(a, b) for a, b in zip(gradients, others, strict=True))  # type: ignore[arg-type]
    assert seen is None or all(map(same, seen, other))


def batch(seed: int, rows: int = 32) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_gradients_are_added_to_in_place() -> None:
    """Who holds a gradient sees it grow, as under autograd."""

    def loop(run: Run, model: nn.Module) -> list[torch.Tensor]:
        held = [p.grad for p in model.parameters()]
        run(batch(7)).backward()
        assert all(p.grad.data_ptr() == h.data_ptr() for p, h in zip(model.parameters(), held, strict=True))  # type: ignore[union-attr]
        return [h.clone() for h in held]  # type: ignore[union-attr]

    in_both(loop)


def test_hooks_after_accumulation_see_the_sum() -> None:
    """They can also clear it, as an optimizer inside of the backward does."""

    def loop(run: Run, model: nn.Module) -> list[torch.Tensor]:
        first, second, *_ = model.parameters()
        seen: list[torch.Tensor] = []

        def clear(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            seen.append(parameter.grad.clone())
            parameter.grad = None

        first.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        second.register_post_accumulate_grad_hook(clear)
        for i in range(3):
            run(batch(i)).backward()
        assert len(seen) == 6
        return seen

    in_both(loop)


def test_hooks_before_accumulation_see_the_new_gradient_alone() -> None:
    """They can also change it."""

    def loop(run: Run, model: nn.Module) -> list[torch.Tensor]:
        first, second, *_ = model.parameters()
        seen: list[torch.Tensor] = []
        handle = first.register_hook(lambda gradient: seen.append(gradient.clone()))
        second.register_hook(lambda gradient: gradient * 0.5)
        for i in range(2):
            run(batch(i)).backward()
        handle.remove()
        loss = run(batch(3))
        first.register_hook(lambda gradient: seen.append(gradient.clone()))  # after its plan was chosen
        loss.backward()
        run(batch(4)).backward()
        assert len(seen) == 4
        return seen

    in_both(loop)


def test_a_retained_graph_adds_twice() -> None:
    """Each backward adds its gradients."""

    def loop(run: Run, model: nn.Module) -> None:
        loss = run(batch(1))
        loss.backward(retain_graph=True)
        loss.backward()
        run(batch(2)).backward()

    torch._functorch.config.donated_buffer, before = False, torch._functorch.config.donated_buffer  # aot_eager needs it
    try:
        in_both(loop)
    finally:
        torch._functorch.config.donated_buffer = before


def test_gradients_that_are_asked_for_are_added_to_nothing() -> None:
    """``torch.autograd.grad``, and leaves that ``backward(inputs=...)`` leaves out."""

    def loop(run: Run, model: nn.Module) -> list[torch.Tensor]:
        first, *others = model.parameters()
        found = [*torch.autograd.grad(run(batch(1)), [first, *others])]
        run(batch(2)).backward(inputs=[first])
        found += torch.autograd.grad(run(batch(3)), others[:1])
        run(batch(4)).backward(inputs=others)
        return found

    in_both(loop)


def test_gradients_that_are_cleared_between_forward_and_backward_are_new() -> None:
    """As Lightning does: the plan has room for the old ones, and the new ones take their place."""

    def loop(run: Run, model: nn.Module) -> None:
        for i in range(3):
            loss = run(batch(i))
            if i == 1:
                model.zero_grad(set_to_none=True)
            loss.backward()

    in_both(loop)


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_gradients_of_other_layouts_are_left_to_autograd() -> None:
    """Sparse ones, transposed ones, and such as require a gradient themselves."""

    def loop(run: Run, model: nn.Module) -> None:
        first, second, third, fourth, *_ = model.parameters()
        first.grad = torch.eye(WIDTH).to_sparse()
        third.grad = torch.arange(WIDTH * WIDTH, dtype=torch.float32).view(WIDTH, WIDTH).t()
        fourth.grad = torch.ones(WIDTH, requires_grad=True)
        second.grad = None
        for i in range(2):
            run(batch(i)).backward()

    in_both(loop)


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_that_are_views_are_added_to(shared: bool) -> None:
    """Of a buffer for all of them, as of DDP; two parameters may share one gradient.

    PyTorch does not say in which order two parameters add to one gradient: eager mode and ``aot_eager`` differ.
    """

    def loop(run: Run, model: nn.Module) -> list[torch.Tensor]:
        parameters = list(model.parameters())
        flat, start = torch.zeros(sum(p.numel() for p in parameters)), 0
        for p in parameters:
            p.grad = flat[start : start + p.numel()].view_as(p)
            start += p.numel()
        if shared:
            parameters[1].grad = parameters[3].grad
        for i in range(3):
            run(batch(i)).backward()
        return [flat]

    in_both(loop, same=torch.allclose if shared else torch.equal)


def test_a_parameter_that_eager_code_uses_too_is_left_to_autograd() -> None:
    """Autograd sums both gradients before it adds them to the existing one; in another order the bits would differ."""

    def loop(run: Run, model: nn.Module) -> None:
        (weight, *_) = model.parameters()
        for i in range(4):
            (run(batch(i)) + (batch(i) @ weight).square().mean()).backward()

    in_both(loop, prepare=0)


def test_a_parameter_that_eager_code_begins_to_use_is_left_to_autograd_from_then_on() -> None:
    """Once the sum is in another order, and never wrong."""

    def loop(run: Run, model: nn.Module) -> list[torch.Tensor]:
        (weight, *_) = model.parameters()

        def step(i: int) -> None:
            (run(batch(i)) + (batch(i) @ weight).square().mean()).backward()

        before = weight.grad.clone()  # type: ignore[union-attr]
        step(0)
        sum_of_both = weight.grad - before  # type: ignore[operator]
        model.zero_grad(set_to_none=True)
        step(0)
        torch.testing.assert_close(sum_of_both, weight.grad)
        for i in range(3):
            step(i)
        return []

    in_both(loop)


def test_a_parameter_of_two_forwards_is_left_to_autograd() -> None:
    """The same, for one graph that runs twice in a step."""

    def loop(run: Run, model: nn.Module) -> None:
        for i in range(4):
            (run(batch(i)) + run(batch(i + 1))).backward()

    in_both(loop, prepare=0)


def test_two_graphs_that_add_to_one_gradient_do_not_add_it_twice() -> None:
    """Autograd would sum the two results, which share a storage. The first of them alone is added to; the sum is right."""

    def loop(run: Run, model: nn.Module) -> None:
        before = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
        loss = run(batch(1)) + run(batch(2))
        loss.backward()
        found = [p.grad - old for p, old in zip(model.parameters(), before, strict=True)]  # type: ignore[operator]
        model.zero_grad(set_to_none=True)
        for i in (1, 2):
            run(batch(i)).backward()
        for p, new in zip(model.parameters(), found, strict=True):
            torch.testing.assert_close(p.grad, new)
        model.zero_grad(set_to_none=True)
        for i in range(3):
            (run(batch(i)) + run(batch(i + 1))).backward()

    in_both(loop, accumulate=True)


def test_two_forwards_with_a_backward_each_are_added_to() -> None:
    """Autograd adds the gradients of one backward after those of the other."""

    def loop(run: Run, model: nn.Module) -> None:
        for i in range(3):
            losses = [run(batch(i)), run(batch(i + 1))]
            for loss in losses:
                loss.backward()
            del losses, loss
        if coordinator().step is not None:
            assert [len(p.accumulated) for p in coordinator().step.programs] == [6, 6]

    in_both(loop)


def test_a_gradient_scaler_sees_the_same_gradients() -> None:
    """It unscales accumulated gradients in place, under mixed precision."""

    def loop(run: Run, model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for i in range(6):
            scaler.scale(run(batch(i))).backward()
            if i % 3 == 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    def mixed() -> nn.Module:
        model = mlp(3, dropout=0.0)
        inner = model.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return inner(x).float()

        model.forward = forward  # type: ignore[method-assign]
        return model

    in_both(loop, mixed, prepare=0)


def test_a_backward_that_fails_loses_no_gradient() -> None:
    """Each gradient is the old one or the sum, in its storage, as after a backward of autograd that failed."""
    torch.manual_seed(0)
    model = mlp(3, dropout=0.0)
    run = torch.compile(lambda x: model(x).square().mean(), backend="checkmate", options={"budget": "80%", **QUICK})
    for i in range(3):
        run(batch(i)).backward()
    parameters = list(model.parameters())
    before = [p.grad.clone() for p in parameters]  # type: ignore[union-attr]
    places = [p.grad.data_ptr() for p in parameters]  # type: ignore[union-attr]
    gradients = torch.autograd.grad(run(batch(9)), parameters)

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    loss = run(batch(9))
    handle = parameters[2].register_post_accumulate_grad_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward()
    del loss
    added = 0
    for p, old, new, place in zip(parameters, before, gradients, places, strict=True):
        assert p.grad is not None
        assert p.grad.data_ptr() == place
        added += torch.equal(p.grad, old + new)
        assert torch.equal(p.grad, old) or torch.equal(p.grad, old + new)
    assert added > 0
    handle.remove()
    middle = [p.grad.clone() for p in parameters]  # type: ignore[union-attr]
    run(batch(9)).backward()
    assert all(torch.equal(p.grad, old + new) for p, old, new in zip(parameters, middle, gradients, strict=True))  # type: ignore[arg-type]


def test_a_shape_that_is_compiled_while_gradients_exist_adds_to_them() -> None:
    """Its first plan holds no gradient twice, so that a budget is not refused that later steps keep."""
    torch.manual_seed(0)
    model = mlp(8, width=128, dropout=0.0)
    run, planned = compiled(lambda x: model(x).square().mean(), dynamic=False, budget="64MiB", **QUICK)
    eager = copy.deepcopy(model)
    for rows in (64, 48):
        x = torch.randn(rows, 128)
        for each in (lambda x: run(x), lambda x: eager(x).square().mean()):
            each(x).backward()
    interface, result = planned[-1]
    gradients = sum(p.nbytes for p in model.parameters())
    assert len(planned) == 2
    assert result.peak_bytes - interface.graph.resident_bytes < gradients
    for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)


def test_steps_leave_no_records() -> None:
    """Buffers and accumulated gradients live on, and what was recorded of them in a step does not."""
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)), batch(0)
    run = torch.compile(lambda: model(x).sum(), backend="checkmate", options={"budget": "100%", **QUICK})
    counts = []
    for _ in range(3):
        for _ in range(3):
            run().backward()
        gc.collect()
        counts.append(sum(type(each) is StepRecorder for each in gc.get_objects()))
    assert counts[1] == counts[2]


class Sum(nn.Module):
    """The gradient of its output is that of both of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.full((32, WIDTH), 0.5 * i)) for i in (1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first + self.second + x.exp()


def test_a_gradient_that_the_backward_is_given_is_added_to_two_parameters() -> None:
    """It is computed by eager code, and by no op of the graph."""
    found = []
    for backend, options in (("aot_eager", {}), ("checkmate", {"options": {"budget": "1MiB", **QUICK}})):
        torch._dynamo.reset()
        coordinator().forget_steps()
        model = Sum()
        run = torch.compile(model, backend=backend, **options)  # type: ignore[call-overload]
        for i in range(4):
            run(batch(i)).square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    assert coordinator().step is not None
    assert coordinator().step.programs[0].accumulated == {0, 1}
    assert all(map(torch.equal, *found))


def test_a_plan_that_is_given_runs_as_it_is() -> None:
    """It is for the graph without existing gradients, to which autograd then adds."""
    model, x = mlp(2, dropout=0.0), batch(0)
    run, planned = compiled(lambda x: model(x).square().mean(), budget="90%", **QUICK)
    run(x).backward()
    plan = planned[-1][1].plan
    gradients = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad(set_to_none=True)
    torch._dynamo.reset()
    run, planned = compiled(lambda x: model(x).square().mean(), budget="1GiB", plan=plan)
    for _ in range(3):
        run(x).backward()
    assert [result.plan for _, result in planned] == [plan]
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(p.grad, gradient + gradient + gradient)  # type: ignore[arg-type]
