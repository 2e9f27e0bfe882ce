"""The order in which ops are listed in the graph: as traced, but every variable's update as soon as its gradient is computed.

This needs no TensorFlow, but it stays here because only this front end uses it: PyTorch moves updates in the FX graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from checkmate.core.graph import Phase


def listed_order(
    traced: Sequence[str],
    data: Mapping[str, Sequence[str]],
    before: Mapping[str, Sequence[str]],
    clobbers: Mapping[str, Sequence[str]],
    optimizer: set[str],
) -> list[str]:
    """Ops in the order of the trace, with each update moved to directly after its gradient.

    A gradient is then freed after its update instead of at the end of the backward pass. An op of the optimizer that depends
    on no gradient (weight decay, decay of a slot) is listed directly before the first op that reads it. Where every update
    depends on all gradients, as with clipping by the global norm, no update can move.

    Args:
        traced: Names of ops in the order in which they were traced.
        data: Ops whose values each op reads.
        before: Ops that must run before each op, by control edges.
        clobbers: Ops that overwrite a variable that each op reads.
        optimizer: Ops of the optimizer.

    Returns:
        The same names in a topological order of ``data``, ``before`` and ``clobbers``.
    """
    needs = {n: [*data[n], *before[n]] for n in traced}
    for n in traced:
        for writer in clobbers[n]:
            if writer in needs:
                needs[writer].append(n)
    ready = _ready(traced, needs, optimizer)
    place = {n: i for i, n in enumerate(traced)}
    wanted = {m for n in traced for m in needs[n]}
    # A sink is emitted with everything that it needs, so an op is listed as late as its first reader allows. A sink that
    # depends on no gradient, such as the step counter, is listed last.
    ready = {n: at if at >= 0 else len(traced) for n, at in ready.items()}
    sinks = sorted((n for n in traced if n in optimizer and n not in wanted), key=lambda n: (ready[n], place[n]))
    order: list[str] = []
    done: set[str] = set()

    def emit(name: str) -> None:
        stack = [(name, False)]
        while stack:
            current, expanded = stack.pop()
            if current in done:
                continue
            if expanded:
                done.add(current)
                order.append(current)
                continue
            stack.append((current, True))
            stack += [(m, False) for m in sorted(needs[current], key=place.__getitem__, reverse=True) if m not in done]

    next_sink = 0
    for n in traced:
        if n in optimizer:
            continue
        emit(n)
        while next_sink < len(sinks) and ready[sinks[next_sink]] <= place[n]:
            emit(sinks[next_sink])
            next_sink += 1
    for n in sinks[next_sink:]:
        emit(n)
    return order


def metrics_first(
    traced: Sequence[str],
    data: Mapping[str, Sequence[str]],
    before: Mapping[str, Sequence[str]],
    clobbers: Mapping[str, Sequence[str]],
    phases: Mapping[str, Phase],
) -> list[str]:
    """Ops in the order of the trace, with metrics moved to directly before the backward pass.

    Keras computes metrics after the update, which would keep the prediction until then: for a language model it is the largest
    tensor of the step.

    Args:
        traced: Names of ops in the order in which they were traced.
        data: Ops whose values each op reads.
        before: Ops that must run before each op, by control edges.
        clobbers: Ops that overwrite a variable that each op reads.
        phases: Phase of each op; that of a metric is ``"loss"``.

    Returns:
        The same names, still in a topological order.
    """
    start = next((i for i, n in enumerate(traced) if phases[n] == "backward"), len(traced))
    early = dict.fromkeys(traced[:start])
    needs = {n: {*data[n], *before[n]} for n in traced}
    for n in traced:
        for writer in clobbers[n]:
            if writer in needs:
                needs[writer].add(n)
    for n in traced[start:]:
        if phases[n] == "loss" and early.keys() >= needs[n]:
            early[n] = None
    return [*early, *(n for n in traced[start:] if n not in early)]


def _ready(traced: Sequence[str], needs: Mapping[str, Sequence[str]], optimizer: set[str]) -> dict[str, int]:
    """Position in the trace of the last op outside the optimizer that each op depends on, transitively; -1 if there is none."""
    place = {n: i for i, n in enumerate(traced)}
    ready: dict[str, int] = {}
    # An update depends on the readers of its variable, which can be traced after it: the trace is not a topological order.
    for start in traced:
        stack = [start]
        while stack:
            n = stack[-1]
            if n in ready:
                stack.pop()
            elif n not in optimizer:
                ready[n] = place[n]
            else:
                missing = [m for m in needs[n] if m not in ready]
                if missing:
                    stack += missing
                else:
                    ready[n] = max((ready[m] for m in needs[n]), default=-1)
    return ready
