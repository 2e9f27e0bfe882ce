"""Consensus among the ranks of a distributed job: rank 0 decides for all, from one message of each.

Messages are keys in the ``TCPStore`` of the rendezvous of ``torch.distributed``. The protocol of decision ``n``:

1. Every rank but 0 writes its message to ``n/<rank>`` and polls ``n/answer``.
2. Rank 0 polls ``n/1``, ``n/2``, ... until it has them all. No rank waits longer than the process group's timeout.
3. Rank 0 decides and writes ``n/answer``. It then deletes the keys of decision ``n - 1``: a message for ``n`` proves that its
   sender has read the answer to ``n - 1``.

A rank that fails writes the failure in place of its message (rank 0: of its answer). Every other rank then raises `RankError`
with the reason instead of waiting.

Why not ``torch.distributed.gather_object`` over a gloo group, in 20 lines? Three things would be lost:

- A decision is made inside a compilation, which only some ranks may enter: shapes differ, or one recompiles. A rank that waits
  in a collective can check nothing, and fails after the group's timeout (30 minutes) without a reason. Here a waiting
  rank compares counts of forwards and detects within seconds that its peer runs on without compiling.
- Our collective may be issued while the user's program runs another one; two collectives in different order on two ranks
  deadlock or mix up data. Reads and writes of a store are independent of collectives.
- A rank that fails before a decision never enters the collective, and the others wait for it. Here it writes its failure to
  the store, where they find it.

A plan is one decision (`plan_on_rank0`), from the largest memory figures of all ranks. Each rank could plan alone from the same
figures, but a search with a time limit ends differently on every machine, and ranks with different plans wait for the slowest in
every collective (docs/decisions/0008).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import msgspec
import torch.distributed as dist

from checkmate.core.errors import CheckmateError
from checkmate.core.evaluate import evaluate
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.torch._compat.distributed import job_store
from checkmate.torch._compat.dynamo import TorchDynamoException

T = TypeVar("T")


class RankError(CheckmateError, RuntimeError):
    """The ranks of a distributed job cannot run one plan: all of them stop."""


class _SilentStoreError(Exception):
    """The store does not answer; no failure can be written there either."""


class _Message(msgspec.Struct, frozen=True):
    """A message of a rank to rank 0, or the answer of rank 0."""

    body: bytes = b""
    topic: str = ""  # the decision that the message is for, in words
    error: str = ""  # reason why the sender or another rank cannot take part; "" if it can
    hint: str = ""  # remedy for the user


# Created at import time: creating a decoder is not thread-safe.
_READ_MESSAGE = msgspec.msgpack.Decoder(_Message)


class Ranks:
    """This process as one of the ranks of a job.

    A peer may be ahead for some seconds before it counts as running on without compiling. A peer that is about to compile is
    ahead by one forward for moments only; ten seconds leave room for a slow data loader.
    """

    def __init__(self, rank: int, count: int, store: Callable[[], dist.Store] = job_store, grace_s: float = 10.0) -> None:
        self.rank = rank
        self.count = count
        self._store = store  # looked up each time: a process group may be destroyed and initialised again
        self._grace_s = grace_s
        self._round = 0
        self._forwards = 0
        self._broadcast_error: BaseException | None = None

    def decide(self, topic: str, mine: bytes, decider: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """Take part in a decision; all ranks must take part in the same decisions, in the same order."""
        at, self._round = self._round, self._round + 1
        try:
            if self.rank == 0:
                return self._lead(at, topic, mine, decider)
            self._send(f"{at}/{self.rank}", _Message(mine, topic))
            return self._receive(f"{at}/answer", 0, topic).body
        except BaseException as error:
            self._broadcast_error = error
            self._send_failure(at, error)
            raise

    def broadcast_failure(self, error: BaseException) -> None:
        """Send a failure to the other ranks, which raise it at their next decision; sent once."""
        if error is self._broadcast_error:
            return
        at, self._round = self._round, self._round + 1
        self._broadcast_error = error
        with suppress(RuntimeError):  # the store is gone, and with it the other ranks
            self._send_failure(at, error)

    def record_forward(self) -> None:
        """Publish that this rank runs one more planned forward; then no rank waits for it to compile that forward.

        It costs 10 to 20 microseconds a forward.
        """
        self._forwards += 1
        with suppress(RuntimeError):
            self._store().set(f"forwards/{self.rank}", str(self._forwards))

    def _lead(self, at: int, topic: str, mine: bytes, decider: Callable[[Sequence[bytes]], bytes]) -> bytes:
        gathered = [mine]
        for rank in range(1, self.count):
            message = self._receive(f"{at}/{rank}", rank, topic)
            if message.topic != topic:
                raise RankError(
                    f"rank 0 decides on {topic} and rank {rank} on {message.topic}: they do not run the same step",
                    hint="make every rank call the same compiled functions, in the same order",
                )
            gathered.append(message.body)
        body = decider(gathered)
        self._send(f"{at}/answer", _Message(body))
        if at:  # a rank that wrote a message of this decision has read the answer to the previous one
            for key in (f"{at - 1}/answer", *(f"{at - 1}/{rank}" for rank in range(1, self.count))):
                self._store().delete_key(key)
        return body

    def _send_failure(self, at: int, error: BaseException) -> None:
        """Write a failure in place of a message, as long as the store answers."""
        if isinstance(error.__cause__, _SilentStoreError):
            return
        known = isinstance(error, CheckmateError)
        text = error.message if known else f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        if not isinstance(error, RankError):  # which names the rank at fault
            text = f"rank {self.rank} stops: {text}"
        with suppress(RuntimeError):
            self._send(f"{at}/{self.rank or 'answer'}", _Message(error=text, hint=error.hint if known else ""))

    def _send(self, key: str, message: _Message) -> None:
        content = msgspec.msgpack.encode(message)
        self._asked(lambda: self._store().set(key, content))  # type: ignore[arg-type] # the stub wants str; bytes work

    def _receive(self, key: str, rank: int, topic: str) -> _Message:
        """Poll for the message of a rank; fail if the rank is ahead, because its message will not come."""
        store, forwards = self._store(), f"forwards/{rank}"
        timeout = store.timeout  # type: ignore[attr-defined] # that of the process group
        began = time.monotonic()
        ahead_since: float | None = None
        pause_s = 0.001  # short at first, as most messages are already there
        try:
            while not (message := self._asked(lambda: store.get(key) if store.check([key]) else b"")):
                now = time.monotonic()
                # It has run more planned forwards than this rank: also the forward that this rank has to compile.
                ahead = self._asked(lambda: store.check([forwards]) and int(store.get(forwards)) > self._forwards)
                ahead_since = (ahead_since or now) if ahead else None
                if ahead_since is not None and now - ahead_since > self._grace_s:
                    raise RankError(
                        f"rank {self.rank} has to compile a graph, and rank {rank} runs on without: their batches differ in "
                        "shape, or their programs",
                        hint="give every rank batches of the same shape (drop_last=True, padding), or plan on each rank "
                        "separately with the option ranks='alone'",
                    )
                if now - began > timeout.total_seconds():
                    raise RankError(
                        f"rank {rank} did not come to decide on {topic} within {timeout}",
                        hint=f"look for an error in the log of rank {rank}, and whether its machine ran out of memory; if it is "
                        "only slow, give init_process_group a longer timeout",
                    )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.05)  # 20 polls a second and rank are no load for the store
        except dist.DistError as error:
            raise RankError(
                f"the connection between the ranks is lost: {error}", hint="look for an error in the log of rank 0"
            ) from error
        found = _READ_MESSAGE.decode(message)
        if found.error:
            raise RankError(found.error, hint=found.hint)
        return found

    def _asked(self, call: Callable[[], T]) -> T:
        """The result of a call of the job's store, in a thread that is abandoned after the timeout of the process group.

        Usually rank 0 holds the store. If rank 0 is stopped, by a debugger or a full machine, no call of the store returns.
        """
        timeout = self._store().timeout  # type: ignore[attr-defined]
        done: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                done.put((call(), None))
            except Exception as error:  # noqa: BLE001 - it is raised in the thread that asks
                done.put((None, error))

        threading.Thread(target=run, daemon=True, name="checkmate-store").start()
        try:
            found, error = done.get(timeout=timeout.total_seconds())
        except queue.Empty:
            raise RankError(
                f"the store at which the ranks met has not answered for {timeout}: the process that holds it, as a rule rank 0, "
                "was stopped",
                hint="look for an error in the log of rank 0, and whether its machine ran out of memory",
            ) from _SilentStoreError()
        if error is not None:
            raise error
        return found  # type: ignore[return-value]


# The ranks of the newest job. Kept when the process group is destroyed and initialised again: a store may outlive the group, and
# new decisions numbered from 0 would find the old keys.
_JOB: list[Ranks] = []


def job_ranks() -> Ranks | None:
    """The ranks of the job that this process belongs to; None if it is the only process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if "fake" in str(dist.get_backend()):  # one process simulates all ranks
        return None
    rank, count = dist.get_rank(), dist.get_world_size()
    if not _JOB or (_JOB[0].rank, _JOB[0].count) != (rank, count):
        _JOB[:] = [Ranks(rank, count)]
    return _JOB[0]


@contextmanager
def broadcasting_failures(ranks: Ranks | None) -> Iterator[None]:
    """Send an exception raised in the block to the other ranks, and therefore none of them waits for this one."""
    try:
        yield
    except TorchDynamoException:  # Dynamo restarts its analysis by raising: not a failure
        raise
    except BaseException as error:
        if ranks is not None:
            ranks.broadcast_failure(error)
        raise


class _RankMemory(msgspec.Struct, frozen=True):
    """Figures that may differ between ranks although they traced the same graph."""

    workspace_bytes: tuple[int, ...]  # workspace of each op. Shape ``[op]``
    resident_bytes: int
    recomputable: tuple[bool, ...]  # whether each op may be computed again; tested for custom ops. Shape ``[op]``

    def applied_to(self, graph: Graph, costs: Sequence[int]) -> Graph:
        """The graph with these memory figures and costs."""
        ops = tuple(
            msgspec.structs.replace(op, workspace_bytes=workspace, cost=cost, recomputable=recomputable)
            for op, workspace, recomputable, cost in zip(graph.ops, self.workspace_bytes, self.recomputable, costs, strict=True)
        )
        return msgspec.structs.replace(graph, ops=ops, resident_bytes=self.resident_bytes)


class _Request(msgspec.Struct, frozen=True):
    """Message of a rank: the digest of its graph without memory and costs, its objective and memory figures."""

    digest: str
    objective: str
    memory: _RankMemory


_READ_REQUEST = msgspec.msgpack.Decoder(_Request)
_READ_ANSWER = msgspec.msgpack.Decoder(tuple[_RankMemory, tuple[int, ...], Result])


def plan_on_rank0(ranks: Ranks, graph: Graph, objective: str, plan: Callable[[Graph], Result]) -> tuple[Graph, Result]:
    """Plan, on rank 0, a graph that every rank has traced.

    The objective is the request in words, for example "a budget of 8GiB"; it must be equal on all ranks. The plan is for the
    returned graph: with the costs of rank 0, and the largest workspace and resident bytes of any rank.
    """
    memory = _RankMemory(
        tuple(op.workspace_bytes for op in graph.ops), graph.resident_bytes, tuple(op.recomputable for op in graph.ops)
    )
    none = (0,) * len(graph.ops)
    shape = _RankMemory(none, 0, (False,) * len(graph.ops)).applied_to(graph, none)
    request = _Request(shape.digest, objective, memory)

    def decide(gathered: Sequence[bytes]) -> bytes:
        requests = [_READ_REQUEST.decode(each) for each in gathered]
        _refuse_different(requests)
        most = _RankMemory(
            tuple(map(max, *(a.memory.workspace_bytes for a in requests))),
            max(a.memory.resident_bytes for a in requests),
            tuple(map(all, zip(*(a.memory.recomputable for a in requests), strict=True))),
        )
        costs = tuple(op.cost for op in graph.ops)
        return msgspec.msgpack.encode((most, costs, plan(most.applied_to(graph, costs))))

    body = ranks.decide("the plan of a graph", msgspec.msgpack.encode(request), decide)
    most, costs, result = _READ_ANSWER.decode(body)
    agreed = most.applied_to(graph, costs)
    evaluate(agreed, result.plan)  # checks digest, validity and both accounts of memory on every rank
    return agreed, result


def _refuse_different(requests: Sequence[_Request]) -> None:
    first = requests[0]
    for rank, request in enumerate(requests):
        if request.objective != first.objective:
            raise RankError(
                f"rank 0 asks for {first.objective} and rank {rank} for {request.objective}",
                hint="give every rank the same options",
            )
        if request.digest != first.digest:
            raise RankError(
                f"rank 0 and rank {rank} traced different graphs",
                hint="give every rank batches of the same shape (drop_last=True, padding), or mark the dimension as dynamic: "
                "torch._dynamo.mark_dynamic(x, dim, min=2, max=...); where ranks differ on purpose, as in a pipeline, plan on "
                "each rank separately with the option ranks='alone'",
            )
