"""Options of the backend, checked once."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from checkmate.core.budget import Budget
from checkmate.core.errors import OptionError
from checkmate.core.units import Amount, parse_bytes
from checkmate.frontend.options import PlanningOptions, PlanSource
from checkmate.solvers.session import Solver

Compiler = Literal["eager", "inductor"]
Outputs = Literal["held", "released"]
CostSource = Literal["measured", "estimated", "flops"]
"""Where costs come from; ``"flops"`` is the earlier name of ``"estimated"``."""
Checkpoints = Literal["hints", "respected"]
RanksMode = Literal["together", "alone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the backend is asked for.

    Attributes:
        budget: The most bytes on the device during forward and backward, everything included:
            ``"8GiB"``, bytes, or ``"70%"``: what is resident plus 70 % of what keeping everything
            takes above it. None keeps everything.
        compiler: ``"eager"``: the plan's exact order runs as it is. ``"inductor"``: its ops are fused; the compiled step is
            run twice on the first batch, everything it changes put back, and what it is measured to take keeps the
            budget, at the price of up to four compilations. Where none does, ``"eager"`` takes over and a warning says so.
        solver: A solver or its name; `Auto` by default.
        time_limit_s: Seconds that planning one graph may take.
        plan: A plan, or a file with one, to run instead of solving.
        device: The device whose memory counts; that of the model by default.
        outputs: ``"held"`` if the caller holds what the model returns until the backward is over,
            ``"released"`` if not.
        reserve: Memory to leave for what is allocated later, such as optimizer state.
        accumulate: Whether gradients of earlier backwards may be there when a forward begins.
        split_convolutions: Whether the gradients of a convolution's weight and input are two ops, so that
            one can wait for the other: equal to the bit, and less memory.
        no_recompute: Names of ops that run once: ``"my_library::op"``, or ``"op"`` of any library.
        checkpoints: What regions under ``torch.utils.checkpoint`` are: ``"hints"``, of which a plan keeps what it
            likes, or ``"respected"``: computed again in the backward and not held for it, the planner deciding on
            the rest. What selective checkpointing must save is computed once either way.
        ranks: In a distributed job, ``"together"``: rank 0 plans for all, which have to trace the same graphs and stop
            together if they do not or if one cannot plan; or ``"alone"``: each plans what it traces.
        costs: ``"measured"`` on the device, or ``"estimated"`` by a roofline model, with workspace taken as 0 (``"flops"``, the
            earlier name, means the same).
    """

    budget: Amount | Budget | None = None
    compiler: Compiler = "eager"
    solver: Solver | str | None = None
    time_limit_s: float | None = 30.0
    plan: PlanSource | None = None
    device: str | None = None
    outputs: Outputs = "held"
    reserve: Amount = 0
    accumulate: bool = False
    split_convolutions: bool = True
    no_recompute: Sequence[str] = ()
    checkpoints: Checkpoints = "hints"
    ranks: RanksMode = "together"
    costs: CostSource = "measured"

    def __post_init__(self) -> None:
        kinds = {"compiler": Compiler, "outputs": Outputs, "costs": CostSource, "checkpoints": Checkpoints, "ranks": RanksMode}
        for name, kind in kinds.items():
            if getattr(self, name) not in get_args(kind):
                raise OptionError(f"{name}={getattr(self, name)!r} is not one of {', '.join(get_args(kind))}")
        planning = self.planning  # unreadable text is refused before anything is traced
        for name in ("budget", "solver", "plan"):
            object.__setattr__(self, name, getattr(planning, name))
        parse_bytes(self.reserve)
        names = self.no_recompute
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise OptionError(f"no_recompute={names!r} is not a sequence of names", hint="give ('my_library::op',)")
        object.__setattr__(self, "no_recompute", tuple(names))

    @property
    def planning(self) -> PlanningOptions:
        """Which plan to look for."""
        return PlanningOptions.of(budget=self.budget, solver=self.solver, time_limit_s=self.time_limit_s, plan=self.plan)

    @property
    def reserve_bytes(self) -> int:
        """Bytes of ``reserve``."""
        return parse_bytes(self.reserve)

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Options:
        """Options from what ``torch.compile`` was given.

        Raises:
            OptionError: An option is unknown; the message names the nearest known one.
            UnitError: The budget cannot be read.
        """
        given = dict(options or {})
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
                raise OptionError(
                    f"unknown option {name!r} of backend 'checkmate'; the nearest known one is {near!r}",
                    hint=f"known options: {', '.join(known)}",
                )
        return cls(**given)
