"""Places that Dynamo left out of every graph, and the action of the user for each."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from checkmate.torch._compat.dynamo import RECURRENT

_LIMIT = "Dynamo recompile limit exceeded"

# By the beginning of Dynamo's reason. The figures of the first are of torch 2.13 on one core of a CPU, with 32 time steps.
_HINTS = {
    RECURRENT: (
        "set torch._dynamo.config.allow_rnn = True to plan the layer as well: it is then traced time step by time step (32 steps "
        "of one layer: 5 to 7 s to the first step, and each step takes 5 to 8 times as long)"
    ),
    "Unsupported Tensor.item()": (
        "keep the value a tensor (torch.where in place of `if`), move the call out of the loop or out of what is compiled, or, "
        "if nothing branches on the number, set torch._dynamo.config.capture_scalar_outputs = True"
    ),
    "Data-dependent branching": (
        "replace the branch on a tensor's value by torch.where or torch.cond, or compile only the modules around it "
        "(of a mixture of experts, each expert)"
    ),
    "Dynamic shape operator": (
        "select a fixed number of elements (torch.topk, torch.where, a fixed capacity for each expert), or compile only the "
        "modules around it"
    ),
    "Failed to trace builtin operator": "move the call out of what is compiled, or at least out of the loop",
    "Skip inlining `torch.compiler.disable()`d function": "remove torch.compiler.disable, if Dynamo can trace the function",
    _LIMIT: (
        "use torch.compile(..., dynamic=True) or torch._dynamo.mark_dynamic(x, dim, min=2, max=...) for one plan for all sizes "
        "up to the largest; pad to a few lengths; or raise torch._dynamo.config.recompile_limit"
    ),
}
_OTHERWISE = "set TORCH_LOGS=graph_breaks to see all such places; torch.compile(..., fullgraph=True) stops at the first"


class Place(NamedTuple):
    """A line of the user's code at which Dynamo stopped: ops run outside of every graph."""

    function: str  # name of the function
    file: str
    line: int
    reason: str  # the first line of Dynamo's reason

    def __str__(self) -> str:
        """Function, file and line, the code of the line, and the reason."""
        code = linecache.getline(self.file, self.line).strip()
        return f"{self.where}{f', `{code[:60]}`' if code else ''}: {self.reason}"

    @property
    def where(self) -> str:
        """Function, file and line."""
        return f"`{self.function}` ({_shortest(self.file)}:{self.line})" if self.file else "a function"

    @property
    def by_limit(self) -> bool:
        """Whether Dynamo stopped only because it has compiled the function often enough."""
        return self.reason.startswith(_LIMIT)

    @property
    def hint(self) -> str:
        """An action of the user."""
        return next((hint for begin, hint in _HINTS.items() if self.reason.startswith(begin)), _OTHERWISE)


def place(function: str, file: str, line: int, reason: str) -> Place:
    """A place, with the first line of Dynamo's reason."""
    return Place(function, file, line, RECURRENT if RECURRENT in reason else next(iter(reason.strip().splitlines()), "no reason"))


def listed(places: Sequence[Place], most: int = 5) -> str:
    """The places in words."""
    more = f"; and {len(places) - most} more" if len(places) > most else ""
    return "; ".join(map(str, places[:most])) + more


def hints(places: Iterable[Place]) -> str:
    """Actions for all of the places."""
    found = dict.fromkeys(p.hint for p in places)
    specific = [hint for hint in found if hint != _OTHERWISE]
    return "; ".join(specific or found)


def _shortest(file: str) -> str:
    path, here = Path(file), Path(os.getcwd())  # noqa: PTH109 - Path.cwd() has the same meaning
    return str(path.relative_to(here)) if path.is_relative_to(here) else file
