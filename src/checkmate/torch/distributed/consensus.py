"""The processes of a distributed job, and how they decide together.

What is decided goes through the store that ``torch.distributed`` itself meets at, not through collectives: a rank
that has no part in a decision must not have to take one, and whoever waits can look whether it waits in vain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec
import torch.distributed as dist

from checkmate.core.errors import CheckmateError
from checkmate.torch._compat.distributed import job_store
from checkmate.torch._compat.dynamo import TorchDynamoException

_GRACE_S = 10.0  # that a rank may be ahead of one that waits for it
_LOOK_S = 0.5  # between two looks at how far it is
_PAUSE_S = (0.001, 0.05)


class RankError(CheckmateError, RuntimeError):
    """The ranks of a distributed job cannot run one plan: all of them stop."""


class _Message(msgspec.Struct, frozen=True):
    """What a rank says, or what rank 0 answers.

    Attributes:
        body: What is decided on.
        topic: What it is about.
        error: Why it cannot take part, if it cannot.
        hint: What to do about it.
    """

    body: bytes = b""
    topic: str = ""
    error: str = ""
    hint: str = ""


# Made here, since making one is not safe in several threads.
_READ_MESSAGE = msgspec.msgpack.Decoder(_Message)


class Ranks:
    """This process among those of its job.

    Args:
        rank: Which one this is.
        count: How many there are.
    """

    def __init__(self, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count
        self._round = 0
        self._forwards = 0
        self._broadcast_error: BaseException | None = None

    def decide(self, topic: str, mine: bytes, decider: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """What rank 0 decides from what every rank says; every rank takes part, in the same order of decisions.

        Args:
            topic: What is decided.
            mine: What this rank says.
            decider: What makes the decision; called by rank 0 alone, with what each rank sent.

        Raises:
            RankError: A rank failed, decides on something else or does not come.
            CheckmateError: What `decider` raised, on rank 0.
        """
        at, self._round = self._round, self._round + 1
        try:
            return self._lead(at, topic, mine, decider) if self.rank == 0 else self._follow(at, topic, mine)
        except BaseException as error:
            self._broadcast_error = error
            raise

    def broadcast_failure(self, error: BaseException) -> None:
        """Tell the others that this rank stops, unless they know: they stop at their next decision."""
        if error is self._broadcast_error:
            return
        at, self._round = self._round, self._round + 1
        self._broadcast_error = error
        with suppress(RuntimeError):  # nobody is there to be told
            self._send_failure(at, error)

    def record_forward(self) -> None:
        """Note that this rank runs a planned forward, so that nobody waits for it to compile that one."""
        self._forwards += 1
        with suppress(RuntimeError):
            job_store().set(f"forwards/{self.rank}", str(self._forwards))

    def _lead(self, at: int, topic: str, mine: bytes, decider: Callable[[Sequence[bytes]], bytes]) -> bytes:
        try:
            gathered = [mine]
            for rank in range(1, self.count):
                message = self._receive(f"{at}/{rank}", rank, topic)
                if message.error:
                    raise RankError(f"rank {rank} stops: {message.error}", hint=message.hint)
                if message.topic != topic:
                    raise RankError(
                        f"rank 0 decides on {topic} and rank {rank} on {message.topic}: they do not run the same step",
                        hint="every rank has to compile the same functions, in the same order",
                    )
                gathered.append(message.body)
            self._send(f"{at}/begun", _Message())
            body = decider(gathered)
        except BaseException as error:
            self._send_failure(at, error)
            raise
        self._send(f"{at}/answer", _Message(body))
        if at:  # whoever speaks in this round has heard the answer of the one before
            for key in (f"{at - 1}/begun", f"{at - 1}/answer", *(f"{at - 1}/{rank}" for rank in range(1, self.count))):
                job_store().delete_key(key)
        return body

    def _follow(self, at: int, topic: str, mine: bytes) -> bytes:
        try:
            self._send(f"{at}/{self.rank}", _Message(mine, topic))
            answer = self._receive(f"{at}/answer", 0, topic, f"{at}/begun")
        except BaseException as error:
            self._send_failure(at, error)
            raise
        if answer.error:
            raise RankError(answer.error if answer.topic else f"rank 0 stops: {answer.error}", hint=answer.hint)
        return answer.body

    def _send_failure(self, at: int, error: BaseException) -> None:
        known = isinstance(error, CheckmateError)
        text = error.message if known else f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        # What rank 0 says of another rank is the whole reason already.
        topic = "rank" if isinstance(error, RankError) else ""
        with suppress(RuntimeError):
            self._send(f"{at}/{self.rank or 'answer'}", _Message(b"", topic, text, error.hint if known else ""))

    def _send(self, key: str, message: _Message) -> None:
        job_store().set(key, msgspec.msgpack.encode(message))  # type: ignore[arg-type] # bytes are what it keeps

    def _receive(self, key: str, rank: int, topic: str, begun: str = "") -> _Message:
        """What a rank says under a key, as soon as it does; however long that takes if it has begun to think."""
        store = job_store()
        began = looked = time.monotonic()
        ahead_since: float | None = None
        pause, most = _PAUSE_S
        patience = store.timeout  # type: ignore[attr-defined] # that of the process group
        try:
            while not store.check([key]):
                now = time.monotonic()
                if now - looked > _LOOK_S:
                    looked = now
                    ahead_since = (ahead_since or now) if self._is_ahead(store, rank) else None
                if ahead_since is not None and now - ahead_since > _GRACE_S:
                    raise RankError(
                        f"rank {self.rank} has to compile a graph, and rank {rank} runs on without: their batches differ in "
                        "shape, or their programs",
                        hint="give every rank batches of the same shape, or let each plan for itself: ranks='alone'",
                    )
                if now - began > patience.total_seconds() and not (begun and store.check([begun])):
                    raise RankError(f"rank {rank} did not come to decide on {topic} within {patience}")
                time.sleep(pause)
                pause = min(2 * pause, most)
            return _READ_MESSAGE.decode(store.get(key))
        except dist.DistError as error:
            raise RankError(f"the connection between the ranks is lost: {error}", hint="look at what rank 0 says") from error

    def _is_ahead(self, store: dist.Store, rank: int) -> bool:
        key = f"forwards/{rank}"
        return store.check([key]) and int(store.get(key)) > self._forwards


_JOB: list[Ranks] = []  # rounds go on counting when the process group is made anew, over whatever store


def job_ranks() -> Ranks | None:
    """The ranks of the job that this process belongs to; None where it is alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if "fake" in str(dist.get_backend()):  # one process that plays all ranks
        return None
    rank, count = dist.get_rank(), dist.get_world_size()
    if not _JOB or (_JOB[0].rank, _JOB[0].count) != (rank, count):
        _JOB[:] = [Ranks(rank, count)]
    return _JOB[0]


@contextmanager
def broadcasting_failures(ranks: Ranks | None) -> Iterator[None]:
    """Tell the other ranks what is raised in a block, so that none of them waits for this one."""
    try:
        yield
    except TorchDynamoException:  # how Dynamo asks for another try
        raise
    except BaseException as error:
        if ranks is not None:
            ranks.broadcast_failure(error)
        raise
