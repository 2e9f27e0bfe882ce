"""How simple rules, an integer program and our solver choose what to recompute: costs, the proven bound, and measured steps.

    python benchmarks/lessons.py                   # eight models at five budgets, about half an hour
    python benchmarks/lessons.py --models unet     # the other models keep their rows
    python benchmarks/lessons.py --draw            # only draw the figure of the committed results

Budgets are shares of the activation memory. All plans are of one captured graph, with one set of measured costs and one
account of memory. A method may use any value of its parameter; its cheapest plan within the budget counts.

- ``uniform``: checkpoints around every k-th block, or around all but every k-th;
- ``selective``: the same, and the outputs of matrix products, convolutions and attention in these blocks may be saved;
- ``sqrt(n)``: segments of equal length (Chen et al. 2016);
- ``knapsack``: the values that PyTorch's partitioner saves for 26 settings of ``activation_memory_budget``, by its default
  solver and by its greedy one;
- ``greedy``: at the peak the value that is cheapest to recompute per byte is evicted, until the budget is kept;
- ``search``: from greedy's plan, evictions are undone and the plan is repaired (`LocalSearch`): ours without integer programs;
- ``program``: the integer program of Jain et al. (2020) on HiGHS, without a plan to start from, up to 400 ops;
- ``ours`` and ``bound``: `Auto`, and its lower bound on the cost of every plan.

At 50 % the steps of three models run all plans op by op in one process, in turn, on one thread. The least processor time of
each counts. `torch_inductor.py` has the same under Inductor, where the graph is another one.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

for folder in (Path(__file__).parent, Path(__file__).parent / "gpu"):
    sys.path.insert(0, str(folder))
import cases
import models
import torch
import torch.nn.functional as F
from fresh import add_rows, earlier, parser
from models import Case
from steps import Variant
from steps import timed as measure
from torch import Tensor, nn

from checkmate import Auto, ChenSqrtN, Graph, Limits, LocalSearch, Milp, Plan, Problem, evaluate, solve
from checkmate.regions.blocks import Schedule, find_regions

SHARES, TIMED, ROUNDS = (20, 35, 50, 65, 80), ("equal_layers", "unet", "diffusion_transformer"), 60
SAVED = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.convolution.", "aten._scaled_dot_product")
METHODS = {
    "uniform": ("#9a9a9a", "s", ":"), "selective": ("#2f9e8f", "o", "--"), "sqrt(n)": ("#8a6bd1", "v", ":"),
    "knapsack": ("#d6453d", "D", "-"), "greedy": ("#e08a1e", "^", "-"), "search": None, "program": None,
    "ours": ("#2f7ed8", "o", "-"), "bound": ("#2f7ed8", "", ":"),
}  # fmt: skip
"""Colour, marker and line of each that is drawn: the search is hard to tell from ours, and the program has few plans."""


class Triangles(nn.Module):
    """Multiplication of a pair representation along triangles, outgoing or incoming (Jumper et al. 2021)."""

    def __init__(self, width: int, sides: str) -> None:
        super().__init__()
        self.sides, self.norm, self.out_norm = sides, nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.gate, self.out = nn.Linear(width, 4 * width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, pair: Tensor) -> Tensor:
        normed = self.norm(pair)
        a, b, gate_a, gate_b = self.inputs(normed).chunk(4, -1)
        made = torch.einsum(self.sides, a * gate_a.sigmoid(), b * gate_b.sigmoid())
        return pair + self.gate(normed).sigmoid() * self.out(self.out_norm(made))


class PairBlock(nn.Module):
    """Triangles, attention along rows with a bias, and a transition, as in a Pairformer (Abramson et al. 2024)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.bias = heads, nn.LayerNorm(width), nn.Linear(width, heads, bias=False)
        self.triangles = nn.Sequential(Triangles(width, "bikc,bjkc->bijc"), Triangles(width, "bkic,bkjc->bijc"))
        self.inputs, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.transition = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, pair: Tensor) -> Tensor:
        pair = self.triangles(pair)
        normed = self.norm(pair)
        q, k, v = self.inputs(normed).unflatten(-1, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5)
        scores = q @ k.transpose(-1, -2) + self.bias(normed).permute(0, 3, 1, 2).unsqueeze(1)
        pair = pair + self.out((scores.softmax(-1) @ v).transpose(2, 3).flatten(3))
        return pair + self.transition(pair)


class Messages(nn.Module):
    """A layer of a graph network: a message for each edge, summed at its end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.node = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        sent = self.edge(torch.cat([x[ends[0]], x[ends[1]]], -1))
        return x + self.node(torch.cat([x, torch.zeros_like(x).index_add(0, ends[1], sent)], -1))


class Stack(nn.Module):
    """Layers one after another, and the mean square of their output."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, **given: Tensor) -> Tensor:
        x, *others = given.values()
        for layer in self.layers:
            x = layer(x, *others)
        return x.square().mean()


class TwoStacks(nn.Module):
    """Transformer layers for each of two inputs, compared for all pairs; a decoder reads the output of the first layers."""

    def __init__(self, first: list[nn.Module], second: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = nn.ModuleList(first), nn.ModuleList(second)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.first:
            x = layer(x)
        for layer in self.second:
            y = layer(y, x) if isinstance(layer, nn.TransformerDecoderLayer) else layer(y)
        scores = F.normalize(x.mean(1), dim=-1)[:, None, :96] * F.normalize(y.mean(1), dim=-1)[:, :96]
        return F.cross_entropy(10 * scores.sum(-1), torch.arange(len(x)))


def stacked(layers: list[nn.Module], **given: Tensor) -> Case:
    return Case(Stack(layers), given, tuple(layers))


def two_stacks(kind: Any, *sizes: tuple[int, int, int]) -> Case:
    """Numbers of layers, their widths and lengths; the second ones are of a kind."""
    options, kinds = {"nhead": 4, "dropout": 0.0, "batch_first": True, "norm_first": True}, (nn.TransformerEncoderLayer, kind)
    layers = [[of(w, dim_feedforward=4 * w, **options) for _ in range(n)] for of, (n, w, _) in zip(kinds, sizes, strict=True)]
    x, y = (torch.randn(8, length, width) for _, width, length in sizes)
    return Case(TwoStacks(*layers), {"x": x, "y": y}, (*layers[0], *layers[1]))


def unet() -> Case:
    """A U-Net with GroupNorm: `torch.utils.checkpoint` would count each batch twice in the statistics of BatchNorm."""
    case = models.unet(4, 96, widths=(8, 16, 32, 64))
    for block in case.blocks:
        for i in (1, 4):
            block[i] = nn.GroupNorm(4, block[i].num_features)  # type: ignore[index, operator]
    return case


def mixture_of_experts() -> Case:
    case = models.llama(4, 128, {**models.transformer(4, 128, 4, 256, vocab_size=512), "num_key_value_heads": 2})
    for layer in case.blocks:
        layer.mlp = cases.Experts(128, 256, 4)
    return case


def diffusion_transformer() -> Case:
    net, (latents, noise) = cases.Diffusion(16, 192, 4, 6), torch.randn(2, 8, 4, 16, 16)
    return Case(net, {"latents": latents, "noise": noise, "time": torch.rand(8)}, tuple(net.layers))


MODELS: dict[str, Callable[[], Case]] = {
    "equal_layers": lambda: stacked(
        [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)) for _ in range(16)], x=torch.randn(1024, 256)
    ),
    "encoder_decoder": lambda: two_stacks(nn.TransformerDecoderLayer, (3, 128, 128), (3, 128, 64)),
    "unet": unet,
    "mixture_of_experts": mixture_of_experts,
    "pairformer_blocks": lambda: stacked([PairBlock(32, 4) for _ in range(4)], pair=torch.randn(2, 48, 48, 32)),
    "two_towers": lambda: two_stacks(nn.TransformerEncoderLayer, (4, 192, 64), (4, 96, 48)),
    "diffusion_transformer": diffusion_transformer,
    "graph_network": lambda: stacked(
        [Messages(64) for _ in range(8)], x=torch.randn(1000, 64), ends=torch.randint(1000, (2, 6000))
    ),
}


def captured(case: Case) -> Any:
    """The step of a model: its graph, and the joint FX graph that `checkmate.torch.capture` does not return."""
    from checkmate.torch.options import Options
    from checkmate.torch.step.recipe import StepRecipe
    from checkmate.torch.step.tracing import trace_step

    recipe = StepRecipe(model=case.model, loss=None, optimizer=None, example=case.batch)
    return trace_step(recipe.spec(), case.batch, Options()).whole


def by_blocks(graph: Graph, case: Case, *, selective: bool) -> Iterator[Plan]:
    """Plans of checkpoints around some of the blocks; eager mode may hold values longer, in variables of the forward."""
    paths = {module: path for path, module in case.model.named_modules()}
    regions = [region for region in find_regions(graph, [paths[block] for block in case.blocks]) if not region.refusal]
    for k, inside in itertools.product(range(1, len(regions) + 1), (True, False)):
        chosen = [region for i, region in enumerate(regions) if (i % k == 0) == inside]
        kept = (frozenset(o for o in r.ops if selective and graph.ops[o].kind.startswith(SAVED)) for r in chosen)
        order = Schedule(graph, regions).plan(dict(zip(chosen, kept, strict=True))).order
        yield Plan.from_order(graph, order)


def by_knapsack(capture: Any) -> Iterator[Plan]:
    """Plans that save the values that PyTorch's partitioner saves."""
    import torch._functorch.partitioners as partitioners
    from torch._functorch import config

    found, cuts = set[frozenset[str]](), dict[Any, Any]()
    choose, cut = partitioners.choose_saved_values_set, partitioners.solve_min_cut

    def cut_once(joint: Any, node_info: Any, options: Any, recomputable: Any = ()) -> Any:
        key = str(options), frozenset(recomputable)
        if key not in cuts:
            cuts[key] = cut(joint, node_info, options, recomputable or None)
        return cuts[key]

    def all_settings(joint: Any, node_info: Any, memory_budget: float) -> list[Any]:
        saved: list[Any] = []
        for solver, budget in itertools.product(("dp", "greedy"), range(26)):
            with config.patch(activation_memory_budget_solver=solver):
                saved = choose(joint, node_info, memory_budget=budget / 25)
            found.add(frozenset(node.name for node in saved))
        return saved

    runtime = functools.cache(partitioners.estimate_runtime)
    replaced = {"choose_saved_values_set": all_settings, "solve_min_cut": cut_once, "estimate_runtime": runtime}
    with mock.patch.multiple(partitioners, **replaced):
        joint = copy.deepcopy(capture.joint)
        partitioners.min_cut_rematerialization_partition(joint, (), num_fwd_outputs=capture.num_fwd_outputs)
    value_of = {node.name: value for node, value in capture.value_of.items()}
    for names in found:
        yield with_saved(capture.graph, {value_of[name] for name in names if name in value_of})


def with_saved(graph: Graph, saved: set[int]) -> Plan:
    """The plan that computes every other forward value again, once, when the backward first needs it."""
    assert graph.boundary is not None
    roots, order = {graph.root[v] for v in saved}, list(range(graph.boundary + 1))
    have = {v for v, root in enumerate(graph.root) if root in roots}
    have.update(v for op in graph.ops if not op.recomputable for v in op.outputs)

    def compute(o: int) -> None:
        for v in graph.ops[o].inputs:
            if v not in have:
                compute(graph.producer[v])
        order.append(o)
        have.update(graph.ops[o].outputs)

    for o in range(graph.boundary + 1, len(graph.ops)):
        compute(o)
    return Plan.from_order(graph, order)


def solved(problem: Problem, solver: Any, time_s: float) -> Any:
    return solve(problem, solver, limits=Limits(time_s=time_s, gap=1e-3, threads=1), raise_on_failure=False)


def by_program(problem: Problem, time_s: float) -> list[Any]:
    """A plan of the integer program alone; the solver `Milp` starts the engine from a plan of the local search."""
    from checkmate.solvers.backends.highs import solve_integer
    from checkmate.solvers.milp import StageProgram
    from checkmate.solvers.reductions.fold_views import FoldViews

    fold = FoldViews.of(problem.graph)
    stages = StageProgram(fold.apply(problem))
    solution = solve_integer(stages.build(), time_s=time_s).solution if stages.ops <= Milp().max_ops else None
    if solution is None:
        return []
    return [evaluate(problem.graph, Plan.from_order(problem.graph, fold.invert(stages.order(solution))))]


def points(name: str, time_s: float) -> Iterator[dict[str, Any]]:
    """A row for each budget of a model: overheads by method, None without a plan, and times over keeping everything."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = MODELS[name]()
    capture = captured(case)
    graph = capture.graph
    swept = {"uniform": list(by_blocks(graph, case, selective=False)), "knapsack": list(by_knapsack(capture))}
    swept["selective"] = [*by_blocks(graph, case, selective=True), *swept["uniform"]]
    known = {method: [evaluate(graph, plan) for plan in plans] for method, plans in swept.items()}
    for share in SHARES:
        problem = Problem(graph, f"{share}%")
        ours = solved(problem, Auto(), time_s)
        known["sqrt(n)"] = [solved(problem, ChenSqrtN(points=at), time_s) for at in ("articulation", "linearized")]
        known |= {"greedy": [solved(problem, LocalSearch(decodes=0), time_s)], "search": [solved(problem, LocalSearch(), time_s)]}
        known["ours"] = [ours]
        known["program"] = by_program(problem, 4 * time_s)
        fitting = {m: [r for r in known[m] if r.plan and r.peak_bytes <= problem.budget_bytes] for m in METHODS if m in known}
        best = {m: min(results, key=lambda result: result.cost) for m, results in fitting.items() if results}
        row = {"model": name, "share": share, "ops": len(graph.ops), "step_ms": graph.cost / 1e6}
        row |= {method: best[method].overhead if method in best else None for method in METHODS}
        row["bound"] = None if math.isinf(ours.bound) else max(1.0, ours.bound / graph.cost)
        if share == 50 and name in TIMED:
            row["time"] = timed(case, {method: result.plan for method, result in best.items()})
        yield row


def timed(case: Case, plans: dict[str, Plan]) -> dict[str, float]:
    """Processor time of a step by each plan, over that of the step that keeps everything."""
    import checkmate.torch

    variants: list[Variant] = []
    for method, plan in {"keep all": None, **plans}.items():
        step = checkmate.torch.compile(case.model, example=case.batch, plan=plan)
        variants.append(Variant(method, "ours", lambda step=step: step(**case.batch), case.model))
    measure(variants, 3)  # warm
    measure(variants, ROUNDS)
    seconds = {variant.name: variant.row["time_s"] for variant in variants}
    return {method: round(s / seconds["keep all"], 4) for method, s in seconds.items()}


def draw(rows: list[dict[str, Any]]) -> None:
    """Overhead against budget for each model, in `docs/images/lessons.svg`."""
    from matplotlib.figure import Figure

    from checkmate.plot import themed_svg

    figure = Figure(figsize=(10.4, 5.6), layout="constrained")
    axes = figure.subplots(2, 4, sharex=True)
    for ax, name in zip(axes.flat, MODELS, strict=True):
        mine = sorted((row for row in rows if row["model"] == name), key=lambda row: row["share"])
        for method, style in METHODS.items():
            if style is not None:
                look = dict(zip(("color", "marker", "linestyle"), style, strict=True))
                shares, overheads = [row["share"] for row in mine], [row[method] or math.nan for row in mine]
                ax.plot(shares, overheads, **look, markersize=4, linewidth=1.4, label=method)
        ax.set_title({"unet": "U-Net"}.get(name, name.replace("_", " ")), fontsize=10)
        ax.set_xticks(SHARES, [f"{share} %" for share in SHARES], fontsize=8)
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[:, 0]:
        ax.set_ylabel("overhead")
    figure.supxlabel("budget, share of the activation memory", fontsize=9)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=8, frameon=False)
    (Path(__file__).parents[1] / "docs" / "images" / "lessons.svg").write_text(themed_svg(figure))


def main() -> None:
    """Run the models, print their rows, and draw."""
    command = parser(__doc__)
    command.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    command.add_argument(
        "--time-limit", type=float, default=10.0, help="seconds a solve may take; programs have three times as many"
    )
    command.add_argument("--draw", action="store_true", help="only draw the figure")
    options = command.parse_args()
    logging.disable(logging.WARNING)
    if not options.draw:
        rows = (row for name in options.models for row in points(name, options.time_limit))
        add_rows(__file__, rows, ("model", "share"), packages=("torch", "transformers", "highspy"))
    draw(earlier(__file__, "rows"))


if __name__ == "__main__":
    main()
