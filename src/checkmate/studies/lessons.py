"""Lessons of a plan, as sentences that a person can act on: kinds of ops, differences between layers, the price of memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from itertools import groupby

from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.units import format_bytes, format_cost
from checkmate.studies.lifetimes import saved_for_backward, storage_lifetimes

_FAMILIES = {"attention": "attention", "matrix products": r"^(add|b|badd)?mm$|matmul|dot_general", "convolutions": "conv"}


def lessons(graph: Graph, plan: Plan, *, priced: bool = True) -> tuple[str, ...]:
    """Sentences on the forward values that a plan keeps for the backward, and on those that it recomputes, if there are any.

    The first is on kinds of ops, the next ones are on layers, if modules have numbers, and the last ones estimate the price of a
    MiB from single ops, if ``priced``; a curve of plans has the exact price.
    """
    lives = [life for life in storage_lifetimes(graph, plan) if life.category in ("activations", "recomputed", "outputs")]
    again = {life.value for life in lives if life.category == "recomputed" and graph.values[life.value].size_bytes}
    kept = {life.value for life in saved_for_backward(graph, plan, lives)} - again
    if not kept | again:
        return ()
    prices = _on_price(graph, kept, again) if priced else ()
    return (_on_kinds(graph, kept, again), *_on_layers(graph, kept, again), *prices)


def _on_kinds(graph: Graph, kept: Set[int], again: Set[int]) -> str:
    """Kinds of ops whose outputs are kept, recomputed, or both; those of less than 1 % of the bytes are left out."""
    total, more = _sizes(graph, kept | again), _sizes(graph, again)
    found: dict[str, list[str]] = {"keep": [], "recompute": [], "recompute a part of": []}
    for kind, size in total.most_common():
        share = more[kind] / size
        verb = "keep" if share < 0.1 else "recompute" if share > 0.9 else "recompute a part of"
        part = f"{share:.0%} of " if 0.1 <= share <= 0.9 else ""
        if 100 * size >= total.total():
            found[verb].append(f"{kind} ({part}{format_bytes(size)})")
    return "; ".join(f"{verb} {_listed(kinds, ', ')}" for verb, kinds in found.items() if kinds)


def _on_layers(graph: Graph, kept: Set[int], again: Set[int]) -> Iterator[str]:
    """Ranges of layers that recompute the same kinds of ops, for each stack of layers with a tenth of the bytes."""
    stacks: dict[str, dict[str, set[int]]] = {}
    for v in sorted(kept | again):
        stack, _, number = layer_of(module_of(graph.ops[graph.producer[v]].source)).rpartition(".")
        if number:
            stacks.setdefault(stack, {}).setdefault(number, set()).add(v)
    least = _sizes(graph, kept | again).total() / 10
    for stack, layers in stacks.items():
        total = {number: _sizes(graph, values).total() for number, values in layers.items()}
        more = {number: _sizes(graph, values & again) for number, values in layers.items()}
        kinds = {n: [kind for kind, size in sizes.most_common() if 100 * size >= total[n]] for n, sizes in more.items()}
        ranges = [[*numbers] for _, numbers in groupby(layers, key=lambda number: frozenset(kinds[number]))]
        told = [f"{_range(r)} {'recompute ' if kinds[r[0]] else 'keep everything'}{_listed(kinds[r[0]], ', ')}" for r in ranges]
        if len(layers) > 1 and sum(total.values()) >= least:
            yield f"layers{f' of `{stack}`' if stack else ''}: {_listed(told, '; ')}"


def _on_price(graph: Graph, kept: Set[int], again: Set[int]) -> Iterator[str]:
    """The kept op that is cheapest to recompute for each MiB, and the most expensive recomputed one; small ops are left out."""
    costs: list[float] = []  # to recompute each op from values that the backward has
    for op in graph.ops:
        costs.append(
            float(op.cost) + sum(costs[p] for p in {graph.producer[v] for v in op.inputs if graph.root[v] not in kept | again})
        )
    for values, choose, words in (
        (kept, min, "less costs about {} (recompute {})"),
        (again, max, "more saves about {} (keep {})"),
    ):
        sizes = {o: sum(graph.values[v].size_bytes for v in graph.ops[o].outputs) for o in {graph.producer[v] for v in values}}
        ops = (o for o in sorted(sizes) if graph.ops[o].recomputable and not graph.ops[o].clobbered_by)
        prices = {o: costs[o] * 2**20 / sizes[o] for o in ops if 10 * sizes[o] * len(sizes) >= sum(sizes.values())}
        if prices:
            o = choose(prices, key=prices.__getitem__)
            where = module_of(graph.ops[o].source)
            name = f"`{graph.ops[o].name}`{f' in {where}' if where else ''}"
            yield f"one MiB {words.format(format_cost(prices[o], graph.cost_unit), name)}"


def _sizes(graph: Graph, values: Iterable[int]) -> Counter[str]:
    """Bytes of values by the kind of the op that makes them, in the words of papers."""
    sizes = Counter[str]()
    for v in values:
        op = graph.ops[graph.producer[v]]
        name = op.kind.removeprefix("aten.").partition(".")[0] or re.sub(r".*\.|[\W_]*\d+$", "", op.name) or "values"
        family = (words for words, pattern in _FAMILIES.items() if re.search(pattern, name, re.IGNORECASE))
        sizes[next(family, name.removeprefix("_").removeprefix("native_"))] += graph.values[v].size_bytes
    return sizes


def _listed(texts: Iterable[str], separator: str) -> str:
    """The first four texts, and the number of the others."""
    first, rest = (found := [*texts])[:4], found[4:]
    return separator.join([*first, *([f"{len(rest)} more"] if rest else [])])


def _range(numbers: list[str]) -> str:
    return numbers[0] if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def module_of(source: str) -> str:
    """The module path of a source, without its file and line; the source itself if it has no path.

    Examples:
        >>> module_of("transformer.h.0.mlp, model.py:12"), module_of("model.py:12")
        ('transformer.h.0.mlp', 'model.py:12')
    """
    return re.sub(r", [^,]*:\d+$", "", source)


def layer_of(path: str) -> str:
    """The path of a module up to its first part that is a number, the layer; "" if no part is one.

    Examples:
        >>> layer_of("transformer.h.0.mlp"), layer_of("head")
        ('transformer.h.0', '')
    """
    found = re.match(r"(?:[^.]*[^.\d][^.]*\.)*?\d+(?=\.|$)", path)
    return found[0] if found else ""
