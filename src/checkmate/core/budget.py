"""A memory budget, from the text that a user writes to an exact number of bytes, and the memory that no plan can change."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from fractions import Fraction

from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.simulate import simulate
from checkmate.core.units import MOST_BYTES, Amount, format_at_least, format_bytes, parse_bytes, parse_percentage


def keep_all_bytes(graph: Graph) -> int:
    """Peak of computing every op once in the graph's own order, resident bytes included."""
    return simulate(graph, Plan.from_order(graph, range(len(graph.ops)))).peak_bytes


def result_bytes(graph: Graph) -> int:
    """Bytes that the step leaves at its end: of each storage that is kept, and was not on the host before the step."""
    kept = {graph.root[v] for v, value in enumerate(graph.values) if value.kept and not value.on_host}
    return sum(graph.values[v].size_bytes for v in kept)


def fixed_bytes(graph: Graph) -> int:
    """Bytes that no plan can change: resident bytes, and each storage that is kept to the end of the step, counted once.

    Kept storages include gradients that the step leaves and outputs that its caller holds. At its end a whole step has consumed
    its gradients.
    """
    return graph.resident_bytes + result_bytes(graph) + sum(value.size_bytes for value in graph.values if value.on_host)


@dataclass(frozen=True, slots=True)
class Budget:
    """A memory budget as the user wrote it: a total, or a share of the bytes that a plan can change.

    A share P refers to the whole step: ``fixed + P * (keep_all - fixed)``. No plan can change ``fixed`` (`fixed_bytes`):
    parameters, buffers, inputs, optimizer state, gradients that exist or that the step leaves, and outputs that are held.
    ``keep_all`` is the peak of keeping everything (`keep_all_bytes`).

    `parse` reads the text once, and `resolve` turns it into bytes once the graph is known.

    Attributes:
        text: The budget as the user wrote it.
        total_bytes: The total in bytes, resident bytes included; None for a share.
        percentage: The share in per cent; None for a total.
        share_of: The two amounts that a share with a known total refers to: ``fixed`` and ``keep_all``.

    Examples:
        >>> chain = Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)], kept=[1], resident_bytes=10)
        >>> fixed_bytes(chain), keep_all_bytes(chain)
        (12, 16)
        >>> Budget.parse("1KiB").resolve(chain), Budget.parse("50%").resolve(chain)
        (1024, 14)
    """

    text: str
    total_bytes: int | None = None
    percentage: float | None = None
    share_of: tuple[int, int] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if (self.total_bytes is None) == (self.percentage is None):
            raise OptionError("a budget is either a total or a share", hint="use Budget.parse('8GiB') or Budget.parse('70%')")

    def __str__(self) -> str:
        return self.text

    @property
    def keeps_everything(self) -> bool:
        """Whether the budget is the share of 100 %, which a step without a plan keeps too."""
        return self.percentage is not None and self.percentage >= 100

    @classmethod
    def parse(cls, amount: Amount) -> Budget:
        """The budget for a text or a number.

        Args:
            amount: Bytes, or text: ``"8GiB"`` is a total, resident bytes included; ``"70%"`` is the bytes that no plan
                can change plus 70 % of the additional bytes that keeping everything needs.

        Raises:
            UnitError: The text cannot be read, or the amount is negative or not whole.
        """
        if isinstance(amount, str) and amount.strip().endswith("%"):
            return cls(amount.strip(), percentage=parse_percentage(amount))
        total = parse_bytes(amount)
        return cls(amount.strip() if isinstance(amount, str) else f"{total} bytes", total_bytes=total)

    @property
    def is_share(self) -> bool:
        """Whether the user wrote a share, even if its total is known by now."""
        return self.text.endswith("%")

    @property
    def has_no_unit(self) -> bool:
        """Whether the user wrote a number of bytes without a unit, perhaps by mistake."""
        return self.text.removesuffix(" bytes")[-1:].isdigit()

    def describe(self, budget_bytes: int, keep_all_bytes: int) -> str:
        """The budget in words: a total in the unit that reads best, a share as itself.

        Args:
            budget_bytes: The budget as `resolve` gave it.
            keep_all_bytes: Peak of keeping everything, resident bytes included.

        Examples:
            >>> Budget.parse("50%").describe(6 * 2**30, 9 * 2**30), Budget.parse("8 GiB").describe(8 * 2**30, 9 * 2**30)
            ('50% of what can be given up: 6.00 GiB of 9.00 GiB in all', '8.00 GiB')
        """
        budget = format_bytes(budget_bytes)
        if not self.is_share:
            return budget
        return f"{self.text} of what can be given up: {budget} of {format_bytes(keep_all_bytes)} in all"

    def with_total(self, total_bytes: int, of: Graph | None = None) -> Budget:
        """The same budget, in the same words, with known bytes.

        Args:
            total_bytes: The bytes, resident ones included.
            of: The graph that a share refers to, if variants of this graph will be planned.
        """
        return Budget(self.text, total_bytes=total_bytes, share_of=self.share_of if of is None else self.reference(of))

    def reference(self, graph: Graph) -> tuple[int, int]:
        """The two amounts that a share refers to, computed from a graph if they are not stored; zeros for a total."""
        if not self.is_share:
            return 0, 0
        return self.share_of or (fixed_bytes(graph), keep_all_bytes(graph))

    def at_least(self, size_bytes: int, graph: Graph) -> str:
        """The amount that hints suggest to fit a number of bytes: a share if the user wrote a share and a share can fit them.

        A number of bytes fits one step; a share also works in a script whose steps differ.

        Args:
            size_bytes: Bytes needed, resident bytes included.
            graph: The graph that the budget refers to, if it is not stored.

        Examples:
            >>> chain = Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)], kept=[1], resident_bytes=10)
            >>> Budget.parse("10%").at_least(15, chain), Budget.parse("12").at_least(15, chain)
            ('75% (15B)', '15B')
        """
        fixed, most = self.reference(graph)
        if not fixed < size_bytes < most:
            return format_at_least(size_bytes)
        tenths = -(-1000 * (size_bytes - fixed) // (most - fixed))
        return f"{tenths / 10:g}% ({format_at_least(size_bytes)})"

    def resolve(self, graph: Graph) -> int:
        """Bytes of the budget for a graph, resident bytes included; a share is rounded down."""
        if self.total_bytes is not None:
            return self.total_bytes
        return self.within(fixed_bytes=fixed_bytes(graph), keep_all_bytes=keep_all_bytes(graph))

    def within(self, *, fixed_bytes: int, keep_all_bytes: int) -> int:
        """Bytes of the budget, given the two amounts that a share refers to.

        Args:
            fixed_bytes: Bytes that no plan can change.
            keep_all_bytes: Peak of keeping everything, resident bytes included.

        Examples:
            >>> Budget.parse("50%").within(fixed_bytes=100, keep_all_bytes=300)
            200
        """
        if self.total_bytes is not None:
            return self.total_bytes
        assert self.percentage is not None
        share = Fraction(str(self.percentage))  # 75.1 as a float is less, by which a suggested share would fall a byte short
        return min(fixed_bytes + (keep_all_bytes - fixed_bytes) * share // 100, MOST_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentMemory:
    """Bytes by purpose that are allocated before, during and after a step, and that no plan can change.

    Attributes:
        parameters_bytes: Parameters of the model.
        inputs_bytes: Buffers of the model, the batch and all other inputs of the graph.
        gradients_bytes: Gradients that exist when a step begins.
        optimizer_bytes: State of the optimizer, including the state that its first step creates.
        wrappers_bytes: Buckets and gathered parameters of DistributedDataParallel and FSDP.
        in_flight_bytes: Tensors that other graphs hold for their backward passes.
        reserve_bytes: Bytes that the user asked to leave free.
        other_bytes: Other bytes allocated on the device.

    Examples:
        >>> memory = ResidentMemory(parameters_bytes=3 * 2**20, gradients_bytes=2**20)
        >>> memory.total_bytes, str(memory)
        (4194304, '4.00 MiB resident: parameters 3.00 MiB, gradients 1.00 MiB')
    """

    parameters_bytes: int = 0
    inputs_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    wrappers_bytes: int = 0
    in_flight_bytes: int = 0
    reserve_bytes: int = 0
    other_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of all amounts."""
        return sum(getattr(self, part.name) for part in fields(self))

    def __str__(self) -> str:
        parts = [(part.name.removesuffix("_bytes").replace("_", " "), getattr(self, part.name)) for part in fields(self)]
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)
        return f"{format_bytes(self.total_bytes)} resident" + (f": {listed}" if listed else "")
