"""The order in which ops are listed: as traced, and every variable's update as soon as its gradient is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def listed_order(
    traced: Sequence[str],
    data: Mapping[str, Sequence[str]],
    before: Mapping[str, Sequence[str]],
    clobbers: Mapping[str, Sequence[str]],
    late: set[str],
) -> list[str]:
    """Ops in the order of the trace, with those of the optimizer where the gradients are born.

    A gradient then dies in its update instead of living to the end of the backward pass. An op of the
    optimizer that no gradient leads to (weight decay, a slot's decay) waits for the op that needs it. A norm over all
    gradients rightly keeps everything in its place.

    Args:
        traced: Ops as traced.
        data: Ops whose values each op reads.
        before: Ops that must run before each op.
        clobbers: Ops that overwrite what each op reads.
        late: Ops of the optimizer.

    Returns:
        The same ops; what each op needs comes before it.
    """
    needs = {n: [*data[n], *before[n]] for n in traced}
    for n in traced:
        for writer in clobbers[n]:
            if writer in needs:
                needs[writer].append(n)
    ready = _ready(traced, needs, late)
    place = {n: i for i, n in enumerate(traced)}
    wanted = {m for n in traced for m in needs[n]}
    # Sinks pull what they need behind them: an op goes as late as its first user lets it. A counter, which waits for
    # nothing, goes last.
    ready = {n: at if at >= 0 else len(traced) for n, at in ready.items()}
    sinks = sorted((n for n in traced if n in late and n not in wanted), key=lambda n: (ready[n], place[n]))
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
        if n in late:
            continue
        emit(n)
        while next_sink < len(sinks) and ready[sinks[next_sink]] <= place[n]:
            emit(sinks[next_sink])
            next_sink += 1
    for n in sinks[next_sink:]:
        emit(n)
    return order


def _ready(traced: Sequence[str], needs: Mapping[str, Sequence[str]], late: set[str]) -> dict[str, int]:
    """Number of the last op outside the optimizer that each op of the optimizer waits for, directly or not."""
    place = {n: i for i, n in enumerate(traced)}
    ready: dict[str, int] = {}
    # An update waits for readers that may be traced after it, so the trace is no order of the needs.
    for start in traced:
        stack = [start]
        while stack:
            n = stack[-1]
            if n in ready:
                stack.pop()
            elif n not in late:
                ready[n] = place[n]
            else:
                missing = [m for m in needs[n] if m not in ready]
                if missing:
                    stack += missing
                else:
                    ready[n] = max((ready[m] for m in needs[n]), default=-1)
    return ready
