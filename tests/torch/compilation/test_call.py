"""Nothing is silent: what Dynamo leaves out of every graph is named, and a call without any plan is an error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

import checkmate
from checkmate import CheckmateError, OptionError
from checkmate.torch import NothingPlannedError
from checkmate.torch.steps.coordinator import coordinator
from tests.torch.steps import dynamo_settings

# Dynamo looks at `.grad` of the tensor that crosses a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

ROOMY = "64MiB"
HERE = "test_call.py"


class Layers(nn.Module):
    """Three layers; what a model does with them is its `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))


class Whole(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


class ItemInLoop(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.mean().item() > 1e9:
                x = x / 10
        return x.square().mean()


class PrintInLoop(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            print(end="")  # noqa: T201 - the construct under test
        return x.square().mean()


class Routed(Layers):
    """A mixture of experts: which tokens an expert gets is data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        expert, out = x[:, :3].argmax(-1), torch.zeros_like(x)
        for index, layer in enumerate(self.layers):
            mine = expert == index
            if mine.any():
                out[mine] = layer(x[mine])
        return out.square().mean()


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rnn, self.head = getattr(nn, kind)(16, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0]).square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x))


class BlocksInLoop(nn.Module):
    """Dynamo skips this forward as a whole, and compiles that of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if x.mean().item() > 1e9:
                x = x / 10
        return x.square().mean()


class Disabled(Layers):
    @torch.compiler.disable
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers[1](x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](self.middle(self.layers[0](x))).square().mean()


class Printing(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        print(end="")  # noqa: T201 - the construct under test
        return self.layers[1](x).square().mean()


class Recurring(Recurrent):
    """The recurrent layer runs in some calls only."""

    def forward(self, x: torch.Tensor, recur: bool = False) -> torch.Tensor:
        return (self.rnn(x)[0] if recur else self.head(x)).square().mean()


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., torch.Tensor]:
    given = {"budget": ROOMY, "costs": "estimated", "solver": "keep-all", **options}
    return torch.compile(model, backend="checkmate", options=given)


def batch(*sizes: int) -> torch.Tensor:
    return torch.randn(*(sizes or (8, 16)))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("checkmate") and r.levelno == logging.WARNING]


UNPLANNED = [
    (ItemInLoop(), "`forward` .*test_call.py:[0-9]+.*`if x.mean.*Unsupported Tensor.item", "torch.where in place of `if`"),
    (PrintInLoop(), "`forward` .*test_call.py:[0-9]+.*`print.*Failed to trace builtin", "at least out of the loop"),
    (Routed(), "`forward` .*test_call.py:[0-9]+.*`if mine.any.*Data-dependent", "of a mixture of experts, each expert"),
]
NAMES = ["item_in_loop", "print_in_loop", "routing"]


def input_of(model: nn.Module) -> torch.Tensor:
    return batch(2, 4, 16) if isinstance(model, Recurrent) else batch()


@pytest.mark.parametrize(("model", "words", "hint"), UNPLANNED, ids=NAMES)
def test_a_call_without_any_plan_is_an_error(model: nn.Module, words: str, hint: str) -> None:
    """A budget that nothing keeps is worse than none: the user believes in it."""
    run, x = compiled(model), input_of(model)
    with pytest.raises(NothingPlannedError, match=words) as caught:
        run(x)
    assert hint in caught.value.hint
    assert "unplanned='warn'" in caught.value.hint
    with pytest.raises(NothingPlannedError, match=words):
        run(x)  # Dynamo tries no second time, and the reason is still known


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="PyTorch compiles it")
def test_a_sequence_that_compiles_itself_is_told_of_torch_compile() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    model.compile(backend="checkmate", options={"budget": ROOMY})
    with pytest.raises(NothingPlannedError, match="traced no function") as caught:
        model(batch())
    assert "torch.compile(model, ...) in place of model.compile(...)" in caught.value.hint


def test_a_call_without_any_plan_is_eager_code_of_a_step_that_has_one(caplog: pytest.LogCaptureFixture) -> None:
    """A decoder that Dynamo cannot trace, after an encoder that it can: what it takes counts when the step is planned."""
    encoder, decoder, x = nn.Linear(16, 16), PrintInLoop(), batch()
    encode, decode = compiled(encoder), compiled(decoder)
    for _ in range(3):
        decode(encode(x)).backward()
        decoder.zero_grad()
    (said,) = warnings(caplog)
    assert "part of this call runs outside of every plan: what it allocates counts towards the budget" in said
    assert coordinator().step is not None
    assert any(op.name.startswith("between") for op in coordinator().step.graph.ops)


@pytest.mark.parametrize(("model", "words", "hint"), UNPLANNED[:1], ids=NAMES[:1])
def test_the_option_makes_it_one_warning(model: nn.Module, words: str, hint: str, caplog: pytest.LogCaptureFixture) -> None:
    """A user who knows wants to train nonetheless, and to read it once."""
    run, x = compiled(model, unplanned="warn"), input_of(model)
    for _ in range(3):
        run(x).backward()
    (said,) = warnings(caplog)
    assert "nothing of this call is planned" in said
    assert hint in said
    caplog.clear()
    with pytest.raises(OptionError, match="unplanned='maybe' is not one of error, warn"):
        compiled(Whole(), unplanned="maybe")(batch())


@pytest.mark.parametrize("quiet", ["no_grad", "inference_mode", "frozen", "no budget", "stance"])
def test_without_gradients_or_a_budget_nothing_is_said(quiet: str, caplog: pytest.LogCaptureFixture) -> None:
    """An evaluation saves nothing for a backward, and without a budget there is no promise."""
    model = ItemInLoop().requires_grad_(quiet != "frozen")
    run = compiled(model, budget=None) if quiet == "no budget" else compiled(model)
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(quiet)
    if context is not None:
        with context():
            run(batch())
    elif quiet == "stance":
        with torch.compiler.set_stance("force_eager"):
            run(batch())
    else:
        run(batch())
    assert warnings(caplog) == []


def test_an_evaluation_first_hides_nothing() -> None:
    """Trainers evaluate before the first step; Dynamo has given up by then and says nothing any more."""
    run = compiled(ItemInLoop())
    with torch.no_grad():
        run(batch())
    with pytest.raises(NothingPlannedError, match=r"Tensor\.item"):
        run(batch())


@pytest.mark.parametrize("model", [BlocksInLoop(), Disabled()], ids=["frame_with_inner_frames", "disabled"])
def test_a_part_without_a_plan_is_named_once(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    """What runs eagerly between planned graphs takes memory that no plan knows of."""
    run = compiled(model)
    for _ in range(2):
        run(batch()).backward()
    (said,) = [text for text in warnings(caplog) if "part of this call" in text]
    assert f"runs outside of every plan: what it allocates counts towards the budget of {ROOMY}" in said
    assert HERE in said
    assert "\nhint: " in said


@pytest.mark.parametrize("first", ["training", "evaluation"])
def test_a_graph_break_that_leaves_no_op_out_is_no_warning(first: str, caplog: pytest.LogCaptureFixture) -> None:
    """After a `print` between two graphs both are planned; users cannot change those inside of libraries."""
    run = compiled(Printing(), budget="64MiB")
    if first == "evaluation":
        with torch.no_grad():
            run(batch())
    for _ in range(2):
        run(batch()).backward()
    said = [r.getMessage() for r in caplog.records if "several graphs" in r.getMessage()]
    assert len(said) == 1
    assert "Failed to trace builtin operator" in said[0]
    assert not any("outside" in text for text in warnings(caplog))


def test_a_whole_model_is_planned_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """A warning that comes without need teaches users to read none; tracing makes autograd nodes too, from fake tensors."""
    run = compiled(Whole())
    for _ in range(2):
        run(batch()).backward()
    assert warnings(caplog) == []


def test_another_path_through_the_model_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """In the midst of a training an error would lose the run."""
    run = compiled(Recurring("GRU"))
    run(batch(2, 4, 16)).backward()
    assert warnings(caplog) == []
    for _ in range(2):
        run(batch(2, 4, 16), recur=True).backward()
    (said,) = warnings(caplog)
    assert "recurrent layers run by their kernels" in said


@dynamo_settings(recompile_limit=2)
def test_the_limit_of_compilations_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """From then on other shapes run without a plan, in silence as far as the budget goes."""
    run = torch.compile(Whole(), backend="checkmate", dynamic=False, options={"budget": ROOMY, "costs": "estimated"})
    for rows in (2, 3, 4, 5, 2):
        run(batch(rows, 16)).backward()
    (said,) = warnings(caplog)
    assert (
        f"this call runs outside of every plan: the budget of {ROOMY} is not kept for it and others like it. `forward` (" in said
    )
    assert f"{HERE}:" in said
    assert "mark_dynamic" in said
    assert "recompile_limit" in said


@dynamo_settings(recompile_limit=1, fail_on_recompile_limit_hit=True)
def test_the_limit_can_be_an_error() -> None:
    """Dynamo has the option for that; its error comes through."""
    run = torch.compile(Whole(), backend="checkmate", dynamic=False, options={"budget": ROOMY, "costs": "estimated"})
    run(batch(2, 16)).backward()
    with pytest.raises(Exception, match="fail_on_recompile_limit_hit"):
        run(batch(3, 16))


def test_an_error_of_the_model_is_not_replaced() -> None:
    """The user's own exception is what went wrong."""

    class Failing(ItemInLoop):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        compiled(Failing())(batch())


def test_a_call_while_another_exception_is_handled() -> None:
    """Retries after an out-of-memory error run inside of an `except` block; they are judged like all others."""
    try:
        raise MemoryError
    except MemoryError:
        with pytest.raises(NothingPlannedError):
            compiled(ItemInLoop())(batch())


def test_after_the_error_torch_compiles_as_before() -> None:
    """The error is raised while Dynamo restores its state."""
    with pytest.raises(NothingPlannedError):
        compiled(ItemInLoop())(batch())
    compiled(Whole())(batch()).backward()


def test_of_calls_inside_of_calls_the_outermost_counts() -> None:
    """A compiled block inside of a skipped frame is planned: something is."""
    model = BlocksInLoop()
    model.blocks = nn.ModuleList(compiled(block) for block in model.blocks)  # type: ignore[arg-type]
    compiled(model)(batch()).backward()


def test_wrong_options_are_refused_where_dynamo_makes_no_graph() -> None:
    """The backend, which checks them, is never called."""
    with pytest.raises(CheckmateError, match="nearest known one is 'budget'"):
        torch.compile(ItemInLoop(), backend="checkmate", options={"budgt": "1MiB"})(batch())


def test_reset_forgets_nothing_that_counts(caplog: pytest.LogCaptureFixture) -> None:
    """`torch._dynamo.reset` removes all callbacks, by which nodes made while tracing are told from others."""
    run = compiled(Whole())
    run(batch()).backward()
    torch._dynamo.reset()
    run(batch()).backward()
    assert warnings(caplog) == []


class Interrupted:
    """A solver that is interrupted by Ctrl-C after it found a plan."""

    def run(self, problem: Any, session: Any) -> Any:
        raise KeyboardInterrupt


def test_ctrl_c_while_planning_stops_the_script() -> None:
    """Dynamo lets the interrupt pass, and the next call plans again."""
    model = Whole()
    with pytest.raises(KeyboardInterrupt):
        compiled(model, solver=Interrupted())(batch())
    assert all(p.grad is None for p in model.parameters())
    compiled(model)(batch()).backward()


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_modules_around_a_recurrent_layer_are_planned(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo by itself skips a function that calls such a layer; the layer runs by its kernel between two graphs."""
    model, x = Recurrent(kind), batch(2, 4, 16)
    run = compiled(model)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        loss = run(x)
        loss.backward()
    (said,) = warnings(caplog)
    assert "recurrent layers run by their kernels" in said
    assert "allow_rnn = True" in said
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    model(x).backward()
    assert torch.equal(loss, model(x))
    assert all(torch.equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))
    assert torch._dynamo.config.allow_rnn is False


@dynamo_settings(allow_rnn=True)
def test_traced_recurrent_layers_are_planned(caplog: pytest.LogCaptureFixture) -> None:
    """The hint for recurrent layers works."""
    compiled(Recurrent("GRU"))(batch(2, 4, 16)).backward()
    assert warnings(caplog) == []


def test_generating_text_leaves_the_training_its_compilations() -> None:
    """One token more in each call: Dynamo would reach its limit of compilations, and the training call get no graph."""
    model = Whole()
    run = torch.compile(model, backend="checkmate", options={"budget": "100%", "time_limit_s": 2})
    with torch.no_grad():
        for rows in range(1, torch._dynamo.config.recompile_limit + 4):
            x = torch.ones(rows, 16)
            assert torch.equal(run(x), model(x))
    coordinator().forget_steps()
    for _ in range(2):
        run(torch.ones(64, 16)).backward()
    assert coordinator().result is not None


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x if x.mean().item() < 1e9 else x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


def test_an_evaluation_may_make_autograd_nodes() -> None:
    """A custom function makes one whether or not gradients are asked for: the reference pass of DPO does."""
    run = compiled(lambda x: _Doubled.apply(x), budget="1KiB")
    with torch.no_grad():
        run(batch())


class Sparse(Layers):
    """A layer on a graph whose adjacency matrix is sparse: Dynamo traces no function that is given one."""

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sparse.mm(adjacency, layer(x))
        return x.square().mean()


def test_that_nothing_is_planned_exceeds_no_budget_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """It is known when the call has run; before that its eager code is compared with the budget."""
    run = compiled(Sparse(), budget="1KiB")
    with pytest.raises(NothingPlannedError, match="sparse"):
        run(batch(), torch.eye(len(batch())).to_sparse())
    assert any("no graph of it has run yet" in text for text in warnings(caplog))


def test_dynamo_traces_nothing_of_this_package() -> None:
    """Hooks run where a compiled function calls the backward and the optimizer: Dynamo sees every frame there."""
    torch._dynamo.reset()
    coordinator().forget_steps()
    clear_compilation_metrics()
    model, x = Whole(), torch.randn(8, 16)
    optimizer = torch.optim.AdamW(model.parameters())

    @torch.compile(backend="checkmate", options={"budget": ROOMY, "time_limit_s": 3})
    def train() -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    for _ in range(3):
        train()
    frames = [metrics.co_filename or "" for metrics in get_compilation_metrics()]
    assert any(name.endswith(HERE) for name in frames)
    assert not [name for name in frames if Path(checkmate.__file__).parent in Path(name).parents]
