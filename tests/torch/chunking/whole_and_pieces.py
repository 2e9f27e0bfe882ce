"""Every rule of an op against the op: run whole, and piece by piece."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from checkmate.torch.chunking.rules.placements import CARRY, SUM, Rule, Slices, Split, arguments_of_piece, cuts, sliced

aten = torch.ops.aten

COUNTS = (2, 3, 1000)
"""Numbers of pieces: two, an uneven one, and pieces of one element or row."""

UNINITIALIZED = {aten.new_empty.default, aten.empty_like.default}
"""Ops whose result has no values to compare."""


def node_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> fx.Node:
    """A node as captured graphs have it, with tensors in place of traced ones."""
    graph = fx.Graph()

    def placeholder(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        made = graph.placeholder("x")
        made.meta["val"] = value
        return made

    args, kwargs = pytree.tree_map(placeholder, (tuple(args), kwargs))
    node = graph.call_function(op, args, kwargs)
    node.meta["val"] = result
    return node


def mismatches(op: Any, args: Sequence[Any], kwargs: dict[str, Any], rules: Sequence[Rule]) -> Iterator[str]:
    """Run every rule with several numbers of pieces; yield what is not as the op is."""
    whole = op(*args, **kwargs)
    outputs = list(whole) if isinstance(whole, (tuple, list)) else [whole]
    for rule in rules:
        for count in COUNTS:
            try:
                pieces = run_in_pieces(op, args, kwargs, rule, outputs, count)
            except (RuntimeError, IndexError, AssertionError) as error:
                yield f"{op} {rule} in {count}: {error}"
                continue
            if pieces is None:
                continue
            # The error of sums in another order is relative to the numbers that are summed.
            scale = max(
                (_largest(t) for t in pytree.tree_leaves((args, kwargs, whole)) if isinstance(t, torch.Tensor)), default=0.0
            )
            for position, (expected, placement) in enumerate(zip(outputs, rule.outputs, strict=True)):
                if op in UNINITIALIZED or not isinstance(expected, torch.Tensor):
                    continue
                if not _agrees(expected, placement, pieces, position, scale):
                    yield f"{op} {rule} in {count}: output {position} differs"


def run_in_pieces(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], rule: Rule, outputs: Sequence[Any], count: int
) -> list[tuple[list[Slices | None], list[Any]]] | None:
    """For each piece what was cut from the outputs, and the results; None where two dimensions cannot be cut into so many."""
    leaves, structure = pytree.tree_flatten((tuple(args), kwargs))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[i] for i in where]
    placed = [*zip(tensors, rule.inputs, strict=True), *zip(outputs, rule.outputs, strict=True)]
    found = [(isinstance(p, Split), cuts(tuple(t.shape), p, count) if isinstance(p, Split) else None) for t, p in placed]
    if any(cut and slices is None for cut, slices in found):
        return None
    of_inputs, of_outputs = [s for _, s in found[: len(tensors)]], [s for _, s in found[len(tensors) :]]
    lengths = {len(each) for each in (*of_inputs, *of_outputs) if each is not None}
    (pieces,) = lengths
    done: list[tuple[list[Slices | None], list[Any]]] = []
    for k in range(pieces):
        for i, tensor, cut in zip(where, tensors, of_inputs, strict=True):
            leaves[i] = tensor if cut is None else sliced(tensor, cut[k])
        here = [None if cut is None else cut[k] for cut in of_outputs]
        shapes = [
            None if not isinstance(t, torch.Tensor) else tuple((t if cut is None else sliced(t, cut)).shape)
            for t, cut in zip(outputs, here, strict=True)
        ]
        if CARRY in rule.outputs and done:
            leaves[0] = done[-1][1][0]
        piece_args, piece_kwargs = pytree.tree_unflatten(leaves, structure)
        result = _call(op, arguments_of_piece(op, rule, piece_args, shapes), piece_kwargs)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        for shape, tensor in zip(shapes, results, strict=True):
            assert shape is None or tuple(tensor.shape) == tuple(shape), f"{tuple(tensor.shape)} instead of {shape}"
        done.append((here, results))
    return done


def _call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with contextlib.suppress(RuntimeError):
        return op(*args, **kwargs)
    # A view of a slice may not exist; what the slice's values give is still to be right.
    args, kwargs = pytree.tree_map(lambda a: a.contiguous() if isinstance(a, torch.Tensor) else a, (args, kwargs))
    return op(*args, **kwargs)


def _agrees(expected: torch.Tensor, placement: Any, pieces: Sequence[Any], at: int, scale: float) -> bool:
    if placement == SUM:
        return _close(sum(results[at] for _, results in pieces), expected, scale)
    if placement == CARRY:
        return _close(pieces[-1][1][at], expected, scale)
    return all(_close(results[at], expected if cut[at] is None else sliced(expected, cut[at]), scale) for cut, results in pieces)


def _close(value: Any, expected: torch.Tensor, scale: float) -> bool:
    if value.dtype != expected.dtype or value.shape != expected.shape:
        return False
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        return torch.equal(value, expected)
    eps = 1e3 * torch.finfo(expected.dtype).eps
    return torch.allclose(value, expected, rtol=eps, atol=eps * scale, equal_nan=True)


def _largest(tensor: torch.Tensor) -> float:
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return 0.0
    finite = tensor[tensor.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0
