"""The steps that were seen, their plans, and which of them is expected when a graph begins."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from checkmate.core.budget import Budget, keep_all_bytes
from checkmate.core.errors import CheckmateError, InfeasibleBudgetError, OptionError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.units import format_bytes
from checkmate.torch.graph.storages import current_bytes, unique_bytes
from checkmate.torch.measure.device_memory import device_memory, state_to_come_bytes
from checkmate.torch.measure.resident import beyond_room
from checkmate.torch.steps.accumulation import Origins
from checkmate.torch.steps.known_step import Gradients, KnownPlan, KnownStep
from checkmate.torch.steps.program import PlannedGraph, Program, Share, key_of
from checkmate.torch.steps.recorder import StepRecorder
from checkmate.torch.steps.step_plan import StepPlan, plan_step
from checkmate.torch.steps.survivors import Survivors

_log = logging.getLogger("checkmate.torch")

_FEW_SCALARS = 64
"""Scalars that are no reason to plan a step again: a script that keeps its losses has one more in every step."""

_LOSS_SCALARS = 4
"""Scalars of eager code that no plan leaves room for: the gradient of a loss, a loss and the like."""

_HELD = "where they are held until this step is over"


class KnownSteps:
    """The steps that were seen, and their plans.

    Attributes:
        origins: What is known of where gradients come from.
    """

    def __init__(self) -> None:
        self.origins = Origins()
        self._survivors = Survivors()
        self._known: dict[int, list[KnownStep]] = {}  # by the identity of the first graph, the newest last
        self._newest: KnownStep | None = None
        self._expected: KnownStep | None = None  # whose plan the step runs that is under way
        self._followed: dict[tuple[int, int], KnownStep] = {}  # by the identities of the step before and of the first graph
        self._shares: dict[str, Share] = {}
        self._traces_again = False
        self._warned: set[int] = set()

    def close(self, recorder: StepRecorder) -> None:
        """End a record, and note what its step leaves.

        Args:
            recorder: The record, whether its step is complete or not.
        """
        recorder.close()
        self._survivors.add(recorder)

    def add(self, recorder: StepRecorder) -> bool:
        """Take over a step that is over. It is planned when it begins again, since what exists then is known.

        Args:
            recorder: The step, which is complete.

        Returns:
            Whether eager code was seen in such a step, and this is not the first one: another kind may follow that, such as the
            next micro batch.
        """
        recorder.close()
        first = id(recorder.forwards[0].planned)
        known = self._known.setdefault(first, [])
        before = step = next((k for k in known if k.recorder.sequence == recorder.sequence), None)
        if step is not None:
            self._note_outlived(step, recorder)
        if step is None or (recorder.watched and not step.recorder.watched):
            step = KnownStep(recorder)
            if not all(run.planned.replaceable for run in recorder.runs):
                self._compile_again(step)
        self._note_cleared(step, recorder)
        known[:] = [*(k for k in known if k is not before), step]
        self._followed[id(self._newest), first] = step
        self._newest = step
        return before is not None and step.recorder.watched

    def _note_outlived(self, step: KnownStep, recorder: StepRecorder) -> None:
        ignored_bytes = _FEW_SCALARS * step.scalar_bytes
        if self._survivors.outlived(recorder, ()) <= ignored_bytes:
            return  # as after nearly every step: gradients need not be looked up
        gradients = step.gradient_storages()
        if self._survivors.outlived(recorder, gradients) <= ignored_bytes:
            return
        gc.collect()  # cycles that compilation leaves hold outputs too
        outlived = self._survivors.outlived(recorder, gradients)
        if outlived <= ignored_bytes:
            return
        self._survivors.expect_held(recorder)
        plans = [known.plan.result for known in step.plans.values() if known.plan is not None]
        if outlived > min((result.budget_bytes - result.peak_bytes for result in plans), default=0):
            self._warn_once(
                step,
                "outputs of the step before were held until this step was over, which may have exceeded its budget of %s by %s: "
                "later steps leave room for them",
                recorder.runs[0].planned.budget,
                format_bytes(outlived),
            )

    def _note_cleared(self, step: KnownStep, recorder: StepRecorder) -> None:
        if not recorder.existing:
            return
        missed_bytes = step.note_cleared(recorder)
        if self._expected not in (None, step) and _kind(self._expected.recorder) == _kind(recorder):
            missed_bytes += self._expected.note_cleared(recorder)  # of equal graphs, from which its plan is
        if missed_bytes:
            _log.warning(
                "gradients that were expected to be set to None before the backward were not, which may have exceeded the budget "
                "of %s by %s: later steps leave room for them",
                recorder.runs[0].planned.budget,
                format_bytes(missed_bytes),
            )

    def plan(self, first: PlannedGraph, args: Sequence[Any], *, watched: bool) -> StepPlan | None:
        """The plan of the step that probably begins with a graph: the kind that followed the same step before, or the newest.

        Args:
            first: The graph.
            args: Its arguments.
            watched: Whether eager code is seen in this step. One of which it was not seen before, nor of an equal one, is then
                planned when it begins again: until then nothing is known of what its eager code takes.

        Returns:
            The plan; None for a first step, and where the plan that the graph was compiled with is one of the step.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget.
            PlanNotFoundError: No plan was found in time.
            OptionError: Inductor compiled several graphs for sizes that change.
        """
        known = self._known.get(id(first)) or self._compiled_before(first, args)
        step = self._followed.get((id(self._newest), id(first)), known[-1]) if known else None
        if step is not None and not step.recorder.watched and not step.is_alone:
            kind = _kind(step.recorder)
            before = [*known, *self._compiled_before(first, args)]
            seen = (known for known in before if known.recorder.watched and _kind(known.recorder) == kind)
            step = next(seen, None if watched else step)
        self._expected = step
        if step is not None and step.recorder.forwards[0].planned is not first:
            step.note_compiled_again()
        return None if step is None else self._plan_of(step, args)

    def note_compiled_again(self) -> None:
        """Note that the step that is under way runs a graph that is equal to the one in its plan, and not the same."""
        if self._expected is not None:
            self._expected.note_compiled_again()

    @property
    def eager_bytes(self) -> int:
        """The most that eager code took in the newest step."""
        return 0 if self._newest is None else self._newest.recorder.eager_peak_bytes

    @property
    def keep_all_bytes(self) -> int:
        """Peak of keeping everything in the largest step that was planned; 0 before the first."""
        plans = (known.plan for steps in self._known.values() for step in steps for known in step.plans.values())
        return max((keep_all_bytes(plan.graph) for plan in plans if plan is not None), default=0)

    @property
    def begin_as_compiled(self) -> bool:
        """Whether no graph has to be compiled for the plan of a step that was seen."""
        return not self._shares and not self._traces_again

    def share(self, graph: Graph, budget: Budget) -> Share | None:
        """The part of a graph in the plan of a step whose graphs have to be compiled again for it."""
        return self._shares.get(key_of(graph, budget))

    def _compiled_before(self, first: PlannedGraph, args: Sequence[Any]) -> list[KnownStep]:
        """Steps that began with a graph equal to one that Dynamo has compiled again, and with the same parameters."""
        if not first.replaceable or first.ranks is not None:
            return []
        leaves = {id(a) for a in args if isinstance(a, torch.Tensor) and a.is_leaf and a.requires_grad}
        known = [(step, step.recorder.forwards[0]) for steps in self._known.values() for step in steps]
        return [step for step, run in known if run.planned.key == first.key and {id(leaf()) for _, leaf in run.leaves} == leaves]

    def _plan_of(self, step: KnownStep, args: Sequence[Any]) -> StepPlan | None:
        gradients = step.gradients(self.origins)
        storages = step.gradient_storages()
        before, ignored_bytes = step.plans.get(gradients), _FEW_SCALARS * step.scalar_bytes
        counted = step.recorder.runs[0].planned.device.type == "cuda"  # by the allocator
        if counted:
            self._look(step, storages, args)
        carried = self._carried(step, storages, gradients)
        room = before is not None and before.leaves_room(carried, ignored_bytes)
        if (not counted and step.look) or (any(carried) and not room):
            gc.collect()  # compilation leaves cycles of frames, which hold outputs of the first step
            self._look(step, storages, args)
            carried = self._carried(step, storages, gradients)
        if before is None:
            step.plans[gradients] = self._first_plan(step, gradients, storages, carried)
        elif not before.leaves_room(carried, ignored_bytes):
            step.plans[gradients] = self._planned_beside(step, gradients, step.kept_bytes(gradients, storages), carried, before)
        return step.plans[gradients].plan

    def _first_plan(self, step: KnownStep, gradients: Gradients, storages: dict[int, int], carried: tuple[int, ...]) -> KnownPlan:
        """A plan beside what earlier steps left; where there is none, one for which that is freed in time."""
        clearing = step.gradients(self.origins, cleared=gradients.existing | gradients.cleared)
        kept_bytes, ways, by_call = step.kept_bytes(gradients, storages), [], self._survivors.released(step.recorder, storages)
        for fewer, held, each, what in (
            (gradients, True, {}, ""),
            (clearing, True, {}, "gradients of the step before: it may be exceeded by %s where they exist in the backward"),
            (gradients, False, {}, f"outputs of the step before: it may be exceeded by %s {_HELD}"),
            (clearing, False, {}, f"gradients and outputs of the step before: it may be exceeded by %s {_HELD}"),
            (clearing, False, by_call, f"gradients and outputs of the step before: it may be exceeded by %s {_HELD}"),
        ):
            freed, left_bytes = self._carried(step, storages, fewer, held=held), step.kept_bytes(fewer, storages)
            excess = kept_bytes - left_bytes + max(now - then for now, then in zip(carried, freed, strict=True))
            excess += _freed_before_last_call(step.recorder, each)
            if not ways or (excess > 0 and step.ranks is None):
                ways.append((fewer, left_bytes, freed, each, what, excess))
        lacking, last, plans = 0, len(ways) - 1, dict[int, KnownPlan]()
        # The last one frees the most: where none is found for it, those between are not tried.
        for at in dict.fromkeys((0, last, *range(last))):
            fewer, left_bytes, freed, each, _, excess = ways[at]
            if lacking > excess and at < last:
                continue  # this frees no more than its excess, and more than that is proven to be lacking
            try:
                with beyond_room(at == last):
                    planned = self._planned(step, fewer, left_bytes, freed, each, final=at == last)
            except (InfeasibleBudgetError, PlanNotFoundError) as error:
                if at == last:
                    raise
                if isinstance(error, InfeasibleBudgetError):
                    lacking = max(lacking, excess + error.floor_bytes - error.budget_bytes)
                continue
            plans[at] = planned
            if at < last or planned.plan is None:
                break  # of one that is compiled again the first is taken
        at = min(plans)
        fewer, *_, what, excess = ways[at]
        if what:
            budget = step.recorder.runs[0].planned.budget
            _log.warning("no plan keeps the budget of %s beside the " + what, budget, format_bytes(excess))
            step.plans[fewer] = plans[at]
        return replace(plans[at], carried=carried)

    def _look(self, step: KnownStep, gradients: dict[int, int], args: Sequence[Any]) -> None:
        """Find out what exists besides a step that is about to begin: optimizer state, copies, data, other models.

        The inputs of the step are taken to exist already, and to be as large as they were when it was recorded.
        """
        record, first = step.recorder, step.recorder.runs[0].planned
        memory = device_memory(first.device)
        step.look.looked(memory.total_bytes)
        known = gradients | self._survivors.alive(record, gradients)
        inputs = record.input_bytes + record.early_bytes
        if first.dynamic:  # recorded with the most bytes that they can have
            now = [a for a in args if isinstance(a, torch.Tensor)]
            inputs += unique_bytes(now, current_bytes) - sum(record.sizes[s] for s in {*record.runs[0].given} if s is not None)
        outside = memory.besides(known) - inputs - first.counted_bytes - self._survivors.unseen_bytes(record)
        leaves = [leaf for run in record.runs for _, leaf in run.leaves]
        trained = [t for leaf in (*leaves, *record.eager_leaves.values()) if (t := leaf()) is not None]
        step.outside_bytes = max(0, outside) + state_to_come_bytes(trained, first.device)

    def _carried(self, step: KnownStep, storages: dict[int, int], gradients: Gradients, *, held: bool = True) -> tuple[int, ...]:
        """Bytes besides what the step is given and makes, at each gap; gradients that are cleared in it among them."""
        carried = [step.outside_bytes + size for size in self._survivors.carried(step.recorder, storages, held=held)]
        for size, last in step.cleared_storages(gradients).values():
            carried[: last + 1] = [before + size for before in carried[: last + 1]]
        # Ranks agree on resident bytes, and stop if their graphs differ.
        return tuple(carried) if step.ranks is None else (max(carried),) * len(carried)

    def _planned_beside(
        self, step: KnownStep, gradients: Gradients, gradient_bytes: int, carried: tuple[int, ...], before: KnownPlan
    ) -> KnownPlan:
        """A plan that leaves room for more tensors of earlier steps than the plan before; that one if there is no other."""
        # Where more and more is held, such as a list of predictions, more room after each plan makes planning rare.
        more = max(0, *(now - then for now, then in zip(carried, before.carried, strict=True)))
        ahead = more * (2**before.grown - 1)
        rooms = [tuple(now + ahead for now in carried), carried] if ahead else [carried]
        for room in rooms if step.ranks is None else []:  # other ranks may have no reason to plan
            with contextlib.suppress(InfeasibleBudgetError, PlanNotFoundError):
                return replace(self._planned(step, gradients, gradient_bytes, room), grown=before.grown + 1)
        self._warn_once(
            step,
            "tensors besides the step, such as optimizer state, copies of the model or outputs that are held, take %s more than "
            "when the step was planned, and no plan was found that keeps the budget of %s beside them: the plan before is used, "
            "and may exceed it by as much",
            format_bytes(more),
            step.recorder.runs[0].planned.budget,
        )
        return KnownPlan(before.plan, carried, grown=before.grown + 1)

    def _warn_once(self, step: KnownStep, message: str, *args: Any) -> None:
        if id(step) not in self._warned:
            self._warned.add(id(step))
            _log.warning(message, *args)

    def _planned(
        self,
        step: KnownStep,
        gradients: Gradients,
        gradient_bytes: int,
        carried: tuple[int, ...],
        by_call: Mapping[int, Mapping[int, int]] = MappingProxyType({}),
        *,
        final: bool = True,
    ) -> KnownPlan:
        runs = step.recorder.runs
        if any(run.planned.options.plan is not None for run in runs):
            return KnownPlan(None, carried)  # a plan that the user gave is for one of the graphs
        fixed = any(run.planned.dynamic and not run.planned.replaceable for run in runs)
        alone = len(runs) == 1 and (runs[0].planned.alone or fixed) and not runs[0].undefined
        alone = alone and gradient_bytes <= runs[0].planned.planned_gradient_bytes
        if alone and _same_accumulation(runs[0].planned.own, gradients):
            memory, known = runs[0].planned.own.memory, self._shares.get(runs[0].planned.key)
            # What it was compiled to take in the plan of its step leaves room for eager code already.
            free = _free_bytes(step) if known is None or known.order is None else known.limit.peak_bytes
            if memory.forward_peak_bytes + carried[1] <= free and memory.backward_peak_bytes + carried[2] <= free:
                return KnownPlan(None, carried)
            if not fixed and step.ranks is None and self._compiled_for_less(runs[0].planned, free - max(carried)):
                return KnownPlan(None, carried)
        compiled_again = [run.planned.key for run in runs if not run.planned.replaceable]
        if compiled_again and all(key in self._shares for key in compiled_again):
            return KnownPlan(None, carried)  # they were compiled for the plan of this step
        if fixed:
            # Compiled again it would be for the sizes of the next batch, whatever sizes were announced.
            if len(runs) > 1:
                raise OptionError(
                    f"this step runs {len(runs)} graphs, and compiler='inductor' plans only one graph for sizes that change",
                    hint="compile the model with its loss as one graph, or compile with dynamic=False, or with compiler='eager'",
                )
            self._warn_once(
                step,
                "gradients and outputs of earlier steps, or eager code, take more than a step compiled by Inductor leaves room "
                "for; with dynamic sizes it is not compiled again, and may exceed its budget of %s: accumulate=True leaves room "
                "for gradients, reserve for everything else",
                runs[0].planned.budget,
            )
            return KnownPlan(None, carried)
        from_cache = [run.planned for run in runs if run.planned.joint is None]
        if from_cache:
            _log.info("compiled again for its step: the code of %d graphs came from a cache", len(from_cache))
            self._traces_again = True
            for planned in from_cache:
                if planned.recompile is not None:
                    planned.recompile()
            return KnownPlan(None, carried)
        plan = plan_step(
            step.recorder,
            gradient_bytes,
            gradients.existing,
            gradients.accumulated,
            carried,
            by_call=by_call,
            whole_ops=step.compiled_again,
            final=final,
        )
        _log.info("the step runs %d graphs: planned as one, peak %s", len(runs), format_bytes(plan.result.peak_bytes))
        if all(planned.replaceable for planned in plan.graphs):
            return KnownPlan(plan, carried)
        for planned, program in zip(plan.graphs, plan.programs, strict=True):
            if program is None:
                continue
            free = plan.result.budget_bytes - plan.result.peak_bytes
            if len(runs) == 1:  # nothing runs beside it but eager code, and what it saves may differ from the plan
                most, order = program.memory.peak_bytes + free, program.result.plan.order
                self._shares[planned.key] = Share.of_only_graph(most, order, _eager_bytes(step))
            else:
                self._shares[planned.key] = Share.of(program, free)
            if planned.recompile is not None:
                planned.recompile()
        return KnownPlan(None, carried)

    def _compiled_for_less(self, planned: PlannedGraph, most_bytes: int) -> bool:
        """Whether the only graph of a step is compiled again by Inductor, to take at most so many bytes."""
        known = self._shares.get(planned.key)
        known_bytes = None if known is None else known.limit.peak_bytes
        if planned.replaceable or most_bytes <= 0 or (known_bytes is not None and known_bytes <= most_bytes):
            return False
        _log.info("compiled again for %s beside what earlier steps hold", format_bytes(most_bytes))
        self._shares[planned.key] = Share.of_only_graph(most_bytes)
        if planned.recompile is not None:
            planned.recompile()
        return True

    def _compile_again(self, step: KnownStep) -> None:
        """Plan a step now: those of its graphs that have to be compiled again are so when they are called next."""
        gradients = step.gradients(self.origins, step.recorder.existing)
        nothing = (step.recorder.runs[0].planned.outside_bytes,) * (len(step.recorder.windows) + 1)
        with contextlib.suppress(CheckmateError):  # raised when the step begins again
            step.plans[gradients] = self._planned(step, gradients, step.recorder.gradient_bytes, nothing)


def _kind(recorder: StepRecorder) -> list[tuple[str, int, frozenset[int] | None]]:
    """Identity of a step where graphs that are equal are the same."""
    runs = recorder.runs
    return [(runs[r].planned.key, r, runs[r].undefined if back else None) for r, back in recorder.windows]


def _freed_before_last_call(recorder: StepRecorder, by_call: Mapping[int, Mapping[int, int]]) -> int:
    """The most that earlier calls of compiled functions free in a gap in which another call takes memory."""
    last = {gap: max(peaks) for gap, peaks in recorder.call_peaks.items()}
    before = (sum(size for call, size in of.items() if call < last.get(gap, 0)) for gap, of in by_call.items())
    return max(before, default=0)


def _free_bytes(step: KnownStep) -> int:
    """The most that the only graph of a step and tensors of earlier steps may take, above what is resident."""
    planned = step.recorder.runs[0].planned
    own = planned.own
    if planned.replaceable:
        free = own.result.budget_bytes - own.result.peak_bytes + own.memory.peak_bytes
    else:  # what fused ops take was measured, and is not what the plan predicts
        free = own.result.budget_bytes - planned.interface.graph.resident_bytes
    eager_bytes = _eager_bytes(step)
    free -= eager_bytes if eager_bytes > _LOSS_SCALARS * step.scalar_bytes else 0
    return free + planned.outside_bytes  # which are carried, and in the peak of the plan


def _eager_bytes(step: KnownStep) -> int:
    """The most that eager code takes in a step, with what it was given."""
    return step.recorder.eager_peak_bytes + step.recorder.eager_input_bytes


def _same_accumulation(program: Program, gradients: Gradients) -> bool:
    """Whether a program of a step of one graph adds to exactly those existing gradients that it can add to."""
    return {k for k in program.accumulated if (0, k) in gradients.existing} == gradients.accumulated[0]
