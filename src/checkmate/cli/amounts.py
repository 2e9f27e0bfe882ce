"""Format shares, graphs and budgets for the terminal."""

from __future__ import annotations

from checkmate.core.budget import Budget
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.plan import HostMemory
from checkmate.core.units import format_bytes
from checkmate.cost.device import load_device


def host_memory(amount: str | None, device: str | None) -> HostMemory | None:
    """The host of ``--host`` with the bus of ``--device``; None without the former.

    Raises:
        OptionError: Only one of the two is given, or the device's profile has no bus.
    """
    if amount is None and device is None:
        return None
    if amount is None or device is None:
        raise OptionError(
            "--host and --device belong together: how much memory of the host may be used, and over which bus",
            hint="give both, such as --host 32GiB --device H100",
        )
    return load_device(device).host_memory(amount)


def format_share(share: float | None, digits: int = 1) -> str:
    """Format a share as a percentage, or None as a dash.

    Examples:
        >>> format_share(0.0042, 2), format_share(None)
        ('0.42%', '-')
    """
    return "-" if share is None else f"{100 * share:.{digits}f}%"


def describe_graph(graph: Graph, path: object) -> str:
    """Describe a graph in one line: file, number of ops and values, digest."""
    digest = graph.digest.removeprefix("sha256:")[:8]
    return f"{path}  {len(graph.ops)} ops, {len(graph.values)} values, sha256 {digest}"


def one_word(budget: str) -> str:
    """A budget without its spaces, as a shell takes it and `Budget.parse` reads it.

    Examples:
        >>> one_word("8 GiB"), one_word(" 50 % ")
        ('8GiB', '50%')
    """
    return "".join(budget.split())


def describe_budget(budget_bytes: int, keep_all_bytes: int, asked: Budget | None = None) -> str:
    """Describe a budget in one line, relative to the peak of keeping everything; a share that was asked for as itself."""
    if asked is not None and asked.is_share:
        return asked.describe(budget_bytes, keep_all_bytes)
    budget, keep_all = format_bytes(budget_bytes), format_bytes(keep_all_bytes)
    if budget_bytes > keep_all_bytes:
        return f"{budget}, more than the {keep_all} that keeping everything needs"
    return f"{budget}, {100 * budget_bytes / max(1, keep_all_bytes):.1f}% of the {keep_all} that keeping everything needs"
