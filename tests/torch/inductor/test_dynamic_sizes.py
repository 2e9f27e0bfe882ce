"""Dynamic sizes under Inductor: one compilation, planned and measured at the largest size."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn

import checkmate
from checkmate import OptionError
from checkmate.torch import measure_peak
from checkmate.torch._compat.symbolic import guards_against_upper_bounds
from checkmate.torch.inductor.compile import bound_sizes, dynamic_dimensions, largest_inputs, traced_values
from tests.torch.networks import NETWORKS, input_of, mlp
from tests.torch.steps import Planned, compiled, dynamo_settings, observe, recomputes

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("nothing_else"),
]
FUSED: dict[str, Any] = {"compiler": "inductor", "time_limit_s": 3}


def left_by(model: nn.Module, run: Callable[[], torch.Tensor]) -> list[bytes]:
    """What a step leaves, outside of the memory that torch sees: the budget is that of a loop that keeps nothing."""
    found = observe(model, run, steps=1)
    return [t.numpy().tobytes() for t in (*found.results, *found.gradients, *found.buffers) if t is not None]


def peak_of(model: nn.Module, run: Callable[[], torch.Tensor]) -> int:
    """Peak of a step; the model is as before."""
    state = copy.deepcopy(model.state_dict())
    peak = measure_peak(lambda: run().backward())
    model.zero_grad(set_to_none=True)
    model.load_state_dict(state)
    return peak


def steps_of_sizes(
    model: nn.Module,
    batch: Callable[[int], torch.Tensor],
    sizes: Sequence[int],
    budget: int | None,
    announced: tuple[int, int] | None = None,
) -> tuple[list[list[bytes]], list[int], Planned]:
    """What steps of several sizes leave, their peaks, and the plans.

    Args:
        model: The model.
        batch: Makes a batch of a size; one exists at a time.
        sizes: The sizes, in order.
        budget: The budget.
        announced: Dimension and largest size for `mark_dynamic`; without it all dimensions are dynamic.
    """
    torch._dynamo.reset()
    dynamic = True if announced is None else None
    run, planned = compiled(lambda x: model(x).square().mean(), dynamic=dynamic, budget=budget, **FUSED)
    left: list[list[bytes]] = []
    peaks: list[int] = []
    for size in sizes:
        x = batch(size)
        if announced is not None and not left:
            torch._dynamo.mark_dynamic(x, announced[0], min=2, max=announced[1])
        left.append(left_by(model, lambda x=x: run(x)))
        peaks.append(peak_of(model, lambda x=x: run(x)))
        del x
    return left, peaks, planned


def check_three_sizes(
    model: nn.Module, batch: Callable[[int], torch.Tensor], sizes: Sequence[int], announced: tuple[int, int] | None, share: float
) -> None:
    """One compilation serves all sizes, keeps its budget at each, and changes no bit."""
    expected, everything, planned = steps_of_sizes(model, batch, sizes, None, announced)
    resident, light = planned[-1][0].graph.resident_bytes, recomputes(planned)
    limit = int(share * max(everything))
    left, peaks, planned = steps_of_sizes(model, batch, sizes, resident + limit, announced)
    assert len(planned) == 1
    assert recomputes(planned) > light
    assert max(peaks) <= limit
    assert [size for _, size in sorted(zip(peaks, sizes, strict=True))] == sorted(sizes)
    assert left == expected


@pytest.mark.parametrize("announced", [None, (0, 512)])
def test_one_compilation_serves_three_sizes(announced: tuple[int, int] | None) -> None:
    """The first batch is the largest, or the largest size is announced and the first batch is the smallest."""
    sizes = (512, 160, 96) if announced is None else (96, 160, 512)
    check_three_sizes(mlp(depth=2), lambda rows: input_of("dropout", rows), sizes, announced, 0.8)


@pytest.mark.slow
def test_three_sequence_lengths() -> None:
    """The dimension that changes in practice, under attention."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True) for _ in range(2)]
    model = nn.Sequential(*layers)

    def batch(length: int) -> torch.Tensor:
        return torch.randn(8, length, 32, generator=torch.Generator().manual_seed(length))

    check_three_sizes(model, batch, (24, 64, 40), (1, 64), 0.8)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("batch_norm", 0.9), ("unet", 0.9), ("tied", 0.9)])
def test_other_networks_serve_three_sizes(name: str, share: float) -> None:
    """Convolutions, statistics, and shared weights."""
    torch.manual_seed(0)
    check_three_sizes(NETWORKS[name](), lambda rows: input_of(name, rows), (256, 96, 160), None, share)


@pytest.mark.slow
def test_a_larger_size_is_compiled_for_itself() -> None:
    """Never a run at a size that was not planned for."""
    model = mlp(depth=2)
    run, planned = compiled(lambda x: model(x).square().mean(), dynamic=True, budget="90%", **FUSED)
    for rows, count in ((128, 1), (96, 1), (256, 2)):
        run(input_of("dropout", rows)).backward()
        model.zero_grad(set_to_none=True)
        assert len(planned) == count


def test_sizes_that_shrink_as_the_batch_grows_count_at_their_most() -> None:
    """Padding to a fixed length: there is the more of it, the shorter the batch; a trial step of the largest sees the least."""
    model = mlp(1)
    weight = next(model.parameters())

    def padded(x: torch.Tensor) -> torch.Tensor:
        pad = (x.new_ones(1024 - x.shape[0], 64) * 2).matmul(weight)
        return model(x).square().mean() + pad.exp().square().mean()

    x = torch.randn(200, 64)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=1000)
    run, planned = compiled(padded, budget="1GiB", **FUSED)
    run(x).backward()
    model.zero_grad(set_to_none=True)
    remark = next(r for r in planned[0][1].remarks if "measured peak" in r)
    promised = checkmate.parse_bytes(re.findall(r"measured peak ([0-9.]+ [KM]iB)", remark)[0].replace(" ", ""))
    for rows in (8, 200, 1000):
        batch = x if rows == 200 else torch.randn(rows, 64)
        peak = peak_of(model, lambda batch=batch: run(batch))
        assert peak <= 1.005 * promised  # two decimals
    assert len(planned) == 1


def test_a_largest_size_that_the_model_does_not_take_is_refused() -> None:
    """A table of positions ends before the announced length does."""
    model = nn.Embedding(64, 16)
    ids = torch.arange(32)
    torch._dynamo.mark_dynamic(ids, 0, min=2, max=128)
    run, _ = compiled(lambda ids: model(torch.arange(ids.shape[0]) + 0 * ids).square().mean(), budget="1GiB", **FUSED)
    with pytest.raises(OptionError, match=r"a step of the largest sizes, \(128,\), does not run"):
        run(ids)


def test_several_graphs_of_sizes_that_change_are_refused() -> None:
    """Each would have to be compiled again for its part of the step, at the sizes of whatever batch comes next."""
    first, second = mlp(1), mlp(1)

    def broken(x: torch.Tensor) -> torch.Tensor:
        h = first(x)
        torch._dynamo.graph_break()
        return second(h).square().mean()

    run, _ = compiled(broken, fullgraph=False, dynamic=True, budget="90%", **FUSED)
    run(input_of("dropout", 96)).backward()
    with pytest.raises(OptionError, match="this step runs 2 graphs"):
        run(input_of("dropout", 96))


def test_sizes_that_depend_on_data_are_refused() -> None:
    """As by the eager compiler: how much memory such a step takes is not known before it runs."""
    model = mlp(1)
    with dynamo_settings(capture_dynamic_output_shape_ops=True):
        run, _ = compiled(lambda x: model(x[x.sum(1) > 0]).square().sum(), dynamic=True, budget="1GiB", **FUSED)
        with pytest.raises(Exception, match="depends on the data"):
            run(input_of("dropout", 96))


def test_without_a_budget_sizes_may_change_too() -> None:
    """Nothing is measured then, and nothing is refused."""
    model = mlp(1)
    run, planned = compiled(lambda x: model(x).square().mean(), dynamic=True, **FUSED)
    for rows in (96, 32, 48):
        run(input_of("dropout", rows)).backward()
    assert len(planned) == 1


def traced(function: Callable[..., Any], *inputs: Any) -> tuple[Any, Sequence[Any]]:
    """The graph and the inputs that a backend is given for dynamic sizes."""
    seen: list[Any] = []

    def backend(gm: Any, given: Sequence[Any]) -> Any:
        bound_sizes(traced_values(gm))
        seen.append((gm, given, largest_inputs(given, traced_values(gm))))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    return seen[0][0], seen[0][2]


def test_the_largest_inputs_repeat_the_batch() -> None:
    """Same type, layout and leaves; indices stay valid."""
    x, ids = torch.randn(3, 4, requires_grad=True), torch.tensor([5, 7])
    y = torch.randn(4, 3).t()
    for t, dim, most in ((x, 0, 7), (ids, 0, 5), (y, 0, 6)):
        torch._dynamo.mark_dynamic(t, dim, min=2, max=most)
    gm, largest = traced(lambda x, ids, y: x.sum() + ids.sum() + y.sum(), x, ids, y)
    assert [i for i, _ in dynamic_dimensions(traced_values(gm))] == [
        i for i, v in enumerate(largest) if isinstance(v, torch.Tensor)
    ]
    made = [v for v in largest if isinstance(v, torch.Tensor)]
    assert [tuple(t.shape) for t in made] == [(7, 4), (5,), (6, 4)]
    assert torch.equal(made[0][3:6], x) and made[0].requires_grad and made[0].is_leaf
    assert made[1].tolist() == [5, 7, 5, 7, 5]
    assert [int(v) for v in largest if not isinstance(v, torch.Tensor)].count(7) == 1
    assert made[2].stride(0) == 1
    assert torch.equal(made[2][3:], y)


def test_a_batch_of_the_largest_sizes_is_not_copied() -> None:
    """The trial step then runs on the batch itself."""
    x = torch.randn(6, 4)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=6)
    _, largest = traced(lambda x: x.sum(), x)
    assert any(v is x for v in largest)


def test_inputs_that_share_memory_are_not_enlarged() -> None:
    """What one view overwrites the other reads: two copies would be another program."""
    base = torch.randn(10, 4)
    x, y = base[:5], base[3:8]
    for t in (x, y):
        torch._dynamo.mark_dynamic(t, 0, min=2, max=9)
    with pytest.raises(Exception, match="share memory"):
        traced(lambda x, y: x.sum() + y.sum(), x, y)


def test_guards_that_exclude_the_largest_size_are_found() -> None:
    """Code that was generated under them must not be measured, or promised, for a size that it does not serve."""
    found: list[list[str]] = []

    def backend(gm: Any, given: Sequence[Any]) -> Any:
        env = next(v for v in given if isinstance(v, torch.SymInt)).node.shape_env
        symbol = next(iter(env.var_to_range))
        found.append(guards_against_upper_bounds(env))
        with env.ignore_fresh_unbacked_symbols():
            env.evaluate_expr(sympy.Eq(sympy.Mod(symbol, 7), 4))
        found.append(guards_against_upper_bounds(env))
        raise RuntimeError("seen")

    x = torch.randn(4, 4)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=9)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="seen"):
        torch.compile(lambda x: F.gelu(x), backend=backend)(x)
    assert found[0] == []
    assert len(found[1]) == 1
