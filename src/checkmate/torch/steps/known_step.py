"""A step that was seen: its record, its plans, and the gradients that exist before it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from checkmate.torch.distributed.consensus import Ranks
from checkmate.torch.graph.storages import CUDA_ALIGNMENT_BYTES, SCALAR_TANGENT_BYTES, storage_bytes, storage_key
from checkmate.torch.measure.device_memory import LookDue
from checkmate.torch.steps.accumulation import Origins
from checkmate.torch.steps.recorder import StepRecorder, gradient_parts
from checkmate.torch.steps.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class KnownPlan:
    """The outcome of planning a step.

    Attributes:
        plan: The plan; None where the plan that its only graph was compiled with is one of the step.
        carried: Bytes of earlier steps, and of parameters that no graph reads, that it leaves room for at each gap.
        grown: How many earlier plans did not leave enough.
    """

    plan: StepPlan | None
    carried: tuple[int, ...]
    grown: int = 0

    def leaves_room(self, carried: tuple[int, ...], ignored_bytes: int) -> bool:
        """Whether the plan keeps its budget beside so many bytes of earlier steps, or all but for a few that are ignored."""
        free = 0 if self.plan is None else max(0, self.plan.result.budget_bytes - self.plan.result.peak_bytes)
        free = max(free, ignored_bytes)
        return all(now <= then + free for now, then in zip(carried, self.carried, strict=True))


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients that exist before a step.

    Attributes:
        existing: Run and input of each that exists in the backward, too.
        accumulated: Inputs to whose gradients the backward of a run adds, for each run. Autograd adds to the others.
        cleared: Run and input of each that is set to None before the backward, as by ``optimizer.zero_grad()``.
    """

    existing: frozenset[tuple[int, int]]
    accumulated: tuple[frozenset[int], ...]
    cleared: frozenset[tuple[int, int]] = frozenset()


@dataclass(eq=False, slots=True)
class KnownStep:
    """A step that was recorded, with its plans.

    Attributes:
        recorder: The record.
        plans: Plans by the gradients that exist before the step.
        look: Whether the tensors of the process have to be looked up when the step begins.
        outside_bytes: Tensors that belong to no step that was seen, and the state that optimizers will make.
        cleared: Run and input of gradients that existed before such steps and were set to None before the backward.
        kept: Those that were not, in some step.
        compiled_again: Whether Dynamo compiled a graph of it again, into an equal one.
    """

    recorder: StepRecorder
    plans: dict[Gradients, KnownPlan] = field(default_factory=dict)
    look: LookDue = field(default_factory=LookDue)
    outside_bytes: int = 0
    cleared: set[tuple[int, int]] = field(default_factory=set)
    kept: set[tuple[int, int]] = field(default_factory=set)
    compiled_again: bool = False

    def note_compiled_again(self) -> None:
        """Note that graphs of such steps are compiled again: what runs in pieces was made from the nodes of one of them."""
        self.compiled_again = True
        self.plans = {of: known for of, known in self.plans.items() if known.plan is None or not known.plan.in_pieces}

    def gradients(
        self, origins: Origins, existing: Set[tuple[int, int]] | None = None, *, cleared: Set[tuple[int, int]] | None = None
    ) -> Gradients:
        """The gradients before the step.

        Args:
            origins: What is known of where gradients come from.
            existing: Run and input of each; those that exist now by default.
            cleared: Those of them that are set to None before the backward; by default those that always were.
        """
        leaves = [(r, k, t) for r, run in enumerate(self.recorder.runs) for k, leaf in run.leaves if (t := leaf()) is not None]
        if existing is None:
            existing = {(r, k) for r, k, t in leaves if t.grad is not None}
        replaceable = all(run.planned.replaceable for run in self.recorder.runs)
        cleared = existing & (self.cleared if cleared is None else cleared) - self.kept if replaceable else frozenset()
        existing = existing - cleared
        added = {(r, k) for r, k, t in leaves if replaceable and (r, k) in existing and origins.accumulates(t)}
        of_run = tuple(frozenset(k for other, k in added if other == r) for r in range(len(self.recorder.runs)))
        return Gradients(frozenset(existing), of_run, frozenset(cleared))

    def note_cleared(self, recorder: StepRecorder) -> int:
        """Note which gradients a step of this kind set to None before its backward.

        Args:
            recorder: The step, which is over.

        Returns:
            Bytes of those that were not, for which no plan left room.
        """
        if recorder.existing <= self.kept | (self.cleared & recorder.cleared):
            return 0  # as known, in nearly every step
        places: dict[int, set[tuple[int, int]]] = {}  # by leaf, which several runs may be given
        sizes: dict[tuple[int, int], int] = {}
        for r, run in enumerate(recorder.runs):
            for k, leaf in run.leaves:
                if (t := leaf()) is not None:
                    places.setdefault(id(t), set()).add((r, k))
                    sizes[r, k] = storage_bytes(t)
        expected = {place for gradients in self.plans for place in gradients.cleared}
        missed_bytes = 0
        for of in places.values():
            if of & recorder.cleared:
                self.cleared |= of
            elif of & recorder.existing:
                self.kept |= of
                missed_bytes += max((sizes[place] for place in of & expected), default=0)
        if missed_bytes:
            self.plans.clear()
        return missed_bytes

    def cleared_storages(self, gradients: Gradients) -> dict[int, tuple[int, int]]:
        """Bytes and last gap of each gradient that exists now and is cleared in the step, by the key of its storage.

        Args:
            gradients: The gradients before the step.
        """
        record, found = self.recorder, dict[int, tuple[int, int]]()
        cleared = {r for r, _ in gradients.cleared}
        places = [(r, [leaf for k, leaf in record.runs[r].leaves if (r, k) in gradients.cleared]) for r in cleared]
        if not record.keeps_eager_gradients:  # the new ones that the record has take their place
            own = {id(t) for run in record.runs for _, leaf in run.leaves if (t := leaf()) is not None}
            eager = [leaf for key, leaf in record.eager_leaves.items() if key not in own]
            places.append((next((r for r, backward in record.windows if backward), 0), eager))
        for r, leaves in places:
            gap = record.windows.index((r, True)) if leaves else 0
            for part in gradient_parts(leaves):
                _, last = found.get(storage_key(part), (0, gap))
                found[storage_key(part)] = storage_bytes(part), min(last, gap)
        return found

    def kept_bytes(self, gradients: Gradients, storages: dict[int, int]) -> int:
        """Bytes of the gradients that exist before the step and in its backward.

        Args:
            gradients: The gradients before the step.
            storages: Bytes of each, by the key of its storage.
        """
        cleared = self.cleared_storages(gradients)
        return sum(size for key, size in storages.items() if key not in cleared)

    @property
    def is_alone(self) -> bool:
        """Whether the step is one graph that is taken for a whole step."""
        return len(self.recorder.runs) == 1 and self.recorder.runs[0].planned.alone

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that plan together, or None."""
        return self.recorder.runs[0].planned.ranks

    @property
    def scalar_bytes(self) -> int:
        """Bytes that an allocator hands out for a scalar."""
        tangents = (tangent for run in self.recorder.runs for tangent in run.planned.interface.tangents)
        return CUDA_ALIGNMENT_BYTES if any(t.device.type == "cuda" for t in tangents) else SCALAR_TANGENT_BYTES

    def gradient_storages(self) -> dict[int, int]:
        """Bytes of each gradient that exists now, by the key of its storage."""
        record = self.recorder
        leaves = [leaf for run in (*record.runs, *record.abandoned) for _, leaf in run.leaves]
        parts = gradient_parts([*leaves, *record.eager_leaves.values()])
        return {storage_key(part): storage_bytes(part) for part in parts}
