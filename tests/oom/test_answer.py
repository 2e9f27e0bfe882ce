"""What filled the memory, why an allocation failed and what would fit, from recordings whose truth is known."""

from __future__ import annotations

import pickle
import random

import pytest

from checkmate import FileFormatError, OptionError, parse_bytes
from checkmate.oom import OutOfMemory, of_snapshot, of_text, read_oom, read_snapshot, stacks
from checkmate.oom.replay import moment_of
from checkmate.oom.snapshot import Event, Segment, Snapshot, frames_of
from tests.growth import MOST, growth
from tests.oom.recording import BASE, FORWARD, MIB, OPTIMIZER, PARAMETERS, TORCH, Recording, failed_run, stack

NEW = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.00 GiB is free. "
    "Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the allocated memory 76.00 GiB is allocated by "
    "PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
POOLS = NEW.replace("and 512", "with 3.00 GiB allocated in private pools (e.g., CUDA Graphs), and 512")
OTHERS = NEW.replace(
    "Including non-PyTorch memory, this process has", "Process 2752205 has 500.00 MiB memory in use. Process 7 has"
)
FRACTION = NEW.replace("Of the allocated", "77.00 GiB allowed; Of the allocated")
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; 15.78 GiB total capacity; 12.50 GiB already "
    "allocated; 19.00 MiB free; 14.00 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting "
    "max_split_size_mb to avoid fragmentation."
)
XPU = (
    "XPU out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 7.00 GiB of which 3.00 GiB is free. "
    "Of the allocated memory 1.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. "
    "Please use `empty_cache` to release all unoccupied cached memory."
)

WINDOWS = r"C:\site-packages\torch\nn\modules\module.py"


def read(recording: Recording, tmp_path, last: int | None = None) -> OutOfMemory:
    return of_snapshot(read_snapshot(recording.dump(tmp_path / "s.pickle", last)))


def test_a_failed_run(tmp_path):
    """Everything as it was at the error, although blocks were freed before the snapshot was taken."""
    found = read(failed_run(), tmp_path)
    assert (found.requested_bytes, found.device_free_bytes) == (12 * MIB, MIB)
    assert found.allocated_bytes == (16 + 16 + 20 + 2) * MIB
    assert found.reserved_bytes == 80 * MIB
    assert found.largest_free_bytes == 6 * MIB
    assert found.cause == "fragmentation"
    assert "expandable_segments:True" in found.advice()[0]
    kinds = {holder.kind: (holder.size_bytes // MIB, holder.blocks) for holder in found.by_kind()}
    assert kinds == {stacks.FORWARD: (20, 5), stacks.PARAMETERS: (16, 2), stacks.OPTIMIZER: (16, 1), stacks.NO_STACK: (2, 1)}
    assert found.holders[0].place == "gpt/model.py:12 forward"
    assert found.budget is not None
    assert 0.969 * 81 * MIB < parse_bytes(found.budget) <= 0.98 * 81 * MIB
    assert found.line == f'model = torch.compile(model, backend="checkmate", options={{"budget": "{found.budget}"}})'
    assert found.line in found.render()


@pytest.mark.parametrize("seed", range(8))
def test_the_state_at_the_error_is_found_from_any_recording(seed, tmp_path):
    """Random actions before and after an error; the recording may begin at any of them, as its buffer is limited."""
    chance = random.Random(seed)
    recording = Recording()
    live: list[int] = []

    def act() -> None:
        if live and chance.random() < 0.45:
            recording.free(live.pop(chance.randrange(len(live))))
        else:
            live.append(recording.allocate(chance.randint(1, 60) * MIB // 8, chance.choice([FORWARD, OPTIMIZER, PARAMETERS, []])))
        empty = [a for a, size in recording.segments.items() if not any(a <= b < a + size for b in recording.blocks)]
        if empty and chance.random() < 0.3:
            recording.release(empty[0])

    for _ in range(60):
        act()
    recording.fail(100 * MIB, 3)
    blocks, segments = dict(recording.blocks), dict(recording.segments)
    for _ in range(20):
        act()
    since_error = next(k for k, e in enumerate(reversed(recording.events), 1) if e["action"] == "oom")
    last = chance.choice([len(recording.events), since_error, chance.randint(since_error, len(recording.events))])
    moment = moment_of(read_snapshot(recording.dump(tmp_path / "s.pickle", last)))
    assert {b.address: b.size_bytes for b in moment.held} == {a: size for a, (size, _) in blocks.items()}
    assert dict(moment.segments) == segments
    if last == len(recording.events):
        assert {b.address: b.frames for b in moment.held} == {a: frames for a, (_, frames) in blocks.items()}
    taken = sorted((a, a + size) for a, (size, _) in blocks.items())
    free = 0
    for start, size in segments.items():
        marks = [start, *(x for a, b in taken if start <= a < start + size for x in (a, b)), start + size]
        free = max(free, *(b - a for a, b in zip(marks[::2], marks[1::2], strict=True)))
    assert moment.largest_free_bytes == free


def test_without_an_error_it_is_the_largest_use(tmp_path):
    """A recording of a run that did not fail: its peak, and no budget, since no free memory of the device is recorded."""
    recording = Recording()
    first = recording.allocate(8 * MIB, FORWARD)
    recording.allocate(8 * MIB, FORWARD)
    recording.free(first)
    found = read(recording, tmp_path)
    assert (found.allocated_bytes, found.cause, found.budget) == (16 * MIB, "no error recorded", None)


def test_without_events_it_is_the_snapshot(tmp_path):
    """History off: blocks in use without stacks."""
    found = read(failed_run(), tmp_path, last=0)
    assert found.allocated_bytes == 34 * MIB
    recording = failed_run()
    recording.blocks = {address: (size, []) for address, (size, _) in recording.blocks.items()}
    found = read(recording, tmp_path, last=0)
    assert [holder.kind for holder in found.by_kind()] == [stacks.BEFORE]
    assert any("_record_memory_history" in sentence for sentence in found.advice())


def test_expandable_segments_grow_and_shrink(tmp_path):
    """Mapped ranges are joined and cut; the state at the error has the memory that was mapped then."""
    recording = Recording()
    recording.segments = {BASE: 20 * MIB}
    recording.note("segment_map", 20 * MIB, [], addr=BASE)
    recording.note("segment_map", 20 * MIB, [], addr=BASE + 20 * MIB)
    recording.fail(64 * MIB, 0)
    recording.note("segment_unmap", 10 * MIB, [], addr=BASE + 10 * MIB)
    recording.note("segment_unmap", 10 * MIB, [], addr=BASE + 30 * MIB)
    recording.segments = {BASE: 10 * MIB, BASE + 20 * MIB: 10 * MIB}
    snapshot = recording.snapshot()
    for segment in snapshot["segments"]:
        segment["is_expandable"] = True
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(snapshot))
    found = of_snapshot(read_snapshot(tmp_path / "s.pickle"))
    assert (found.reserved_bytes, found.largest_free_bytes) == (40 * MIB, 40 * MIB)
    recording.fail(16 * MIB, 0)
    snapshot["device_traces"] = [recording.events]
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(snapshot))
    found = of_snapshot(read_snapshot(tmp_path / "s.pickle"))
    assert (found.reserved_bytes, found.largest_free_bytes, found.cause) == (20 * MIB, 10 * MIB, "fragmentation")
    assert not any("expandable_segments:True" in sentence for sentence in found.advice())


@pytest.mark.parametrize("seed", range(10))
def test_expandable_segments_at_the_error_are_what_was_mapped_then(seed, tmp_path):
    """Pages are mapped and unmapped anywhere, before and after; neighbours are one segment."""
    chance = random.Random(seed)
    recording, pages = Recording(), set[int]()

    def act() -> None:
        first, count = chance.randrange(40), chance.randint(1, 12)
        wanted = set(range(first, first + count))
        mapping = chance.random() < 0.6
        while wanted:  # as PyTorch does it: only what is not mapped is mapped, only what is mapped is unmapped
            at = min(wanted)
            end = next(k for k in range(at, first + count + 1) if k not in wanted or (k in pages) != (at in pages))
            if (at in pages) != mapping:
                recording.note("segment_map" if mapping else "segment_unmap", (end - at) * MIB, [], addr=BASE + at * MIB)
                (pages.update if mapping else pages.difference_update)(range(at, end))
            wanted -= set(range(at, end))

    def runs() -> dict[int, int]:
        starts = [k for k in sorted(pages) if k - 1 not in pages]
        ends = [k + 1 for k in sorted(pages) if k + 1 not in pages]
        return {BASE + a * MIB: (b - a) * MIB for a, b in zip(starts, ends, strict=True)}

    for _ in range(15):
        act()
    recording.fail(100 * MIB, 3)
    at_error = runs()
    for _ in range(chance.choice([0, 1, 15])):
        act()
    recording.segments = runs()
    snapshot = recording.snapshot()
    for segment in snapshot["segments"]:
        segment["is_expandable"] = True
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(snapshot))
    assert dict(moment_of(read_snapshot(tmp_path / "s.pickle")).segments) == at_error


def test_reading_expandable_segments_takes_time_in_proportion_to_the_events():
    """A snapshot of a megabyte has ten thousand segments and as many events."""

    def made(n: int) -> Snapshot:
        events = [Event(action="oom", size=1)]
        events += [Event(action=f"segment_{'un' * (k % 2)}map", addr=10**9 + 16 * k, size=8) for k in range(n)]
        segments = [Segment(address=16 * k, total_size=8, blocks=[], is_expandable=True) for k in range(n)]
        return Snapshot(segments=segments, device_traces=[events])

    assert growth(made, moment_of, 1500) < MOST


def test_one_long_name_is_not_written_for_each_block(tmp_path):
    """A file shares the text of a name among its blocks; the answer has it once for each line of the code."""
    name, recording = "f" * 100_000, Recording()
    for line in range(1000):
        recording.allocate(MIB, stack((f"/x/{name}.py", name, line)))
    path = recording.dump(tmp_path / "s.pickle")
    found = of_snapshot(read_snapshot(path))
    assert len(found.holders) == 1000
    assert sum(len(holder.place) for holder in found.holders) < path.stat().st_size


def test_the_device_is_that_of_the_error(tmp_path):
    """Several devices: the one that failed, or the one asked for."""
    failed, other = failed_run().snapshot(), Recording()
    other.allocate(500 * MIB, FORWARD)
    segments = [{**segment, "device": 1} for segment in failed["segments"]]
    both = {"segments": [*other.snapshot()["segments"], *segments], "device_traces": [other.events, *failed["device_traces"], []]}
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(both))
    snapshot = read_snapshot(tmp_path / "s.pickle")
    assert (of_snapshot(snapshot).device, of_snapshot(snapshot).reserved_bytes) == (1, 80 * MIB)
    assert of_snapshot(snapshot, 0).allocated_bytes == 500 * MIB
    with pytest.raises(OptionError, match="nothing of device 2"):
        of_snapshot(snapshot, 2)


def test_the_text_of_an_error():
    """The figures of a message; of a release before 2.1, which Checkmate does not support, only the request."""
    found = of_text(NEW)
    gib = 2**30
    assert (found.device, found.requested_bytes, found.total_bytes) == (1, 2 * gib, round(79.15 * gib))
    assert (found.allocated_bytes, found.reserved_bytes, found.device_free_bytes) == (76 * gib, 76.5 * gib, gib)
    assert (found.cause, found.missing_bytes) == ("too little memory", gib // 2)
    assert of_text(POOLS).missing_bytes == of_text(OTHERS).missing_bytes == found.missing_bytes
    assert of_text(OTHERS).device_free_bytes == gib
    limited = of_text(FRACTION)
    assert (limited.total_bytes, limited.device_free_bytes) == (77 * gib, gib // 2)
    assert (of_text(OLD).requested_bytes, of_text(OLD).cause) == (512 * MIB, "not known")
    xpu = of_text(XPU)
    assert (xpu.cause, xpu.budget) == ("larger than the device", None)
    assert of_text(f"epoch 1\n{OLD}\nTraceback\n{NEW}\n").requested_bytes == 2 * gib
    assert of_text("CUDA out of memory. Tried to allocate 20.00 MiB.").cause == "not known"
    with pytest.raises(FileFormatError, match="no out-of-memory error"):
        of_text("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("amount", ["1e308 GiB", "1e999 GiB", f"{'9' * 400} bytes", "9999999999999 GiB"])
def test_an_amount_that_cannot_be_one_is_not_known(amount):
    """A log may have anything: the error before counts, and figures beside are left out."""
    broken = NEW.replace("2.00 GiB", amount)
    with pytest.raises(FileFormatError, match="no out-of-memory error"):
        of_text(broken)
    assert of_text(f"{OLD}\n{broken}").requested_bytes == 512 * MIB
    found = of_text(NEW.replace("79.15 GiB", amount).replace("1.00 GiB is free", f"{amount} is free"))
    assert (found.requested_bytes, found.total_bytes, found.device_free_bytes) == (2 << 30, None, None)
    assert found.render()


def test_error_and_snapshot_together(tmp_path):
    """The text has the size of the device, the snapshot has what filled it."""
    text = NEW.replace("GPU 1", "GPU 0")
    found = read_oom(RuntimeError(text), snapshot=failed_run().dump(tmp_path / "s.pickle"))
    assert found.total_bytes == round(79.15 * 2**30)
    assert (found.allocated_bytes, found.requested_bytes) == (54 * MIB, 12 * MIB)
    assert found.holders


def test_a_budget_is_never_above_what_is_available():
    """In text that is read back; the last digit is rounded up, into the share that is left for fragmentation."""
    chance = random.Random(0)
    for _ in range(500):
        reserved = round(10 ** chance.uniform(0, 13))
        found = OutOfMemory(moment="", requested_bytes=1, allocated_bytes=reserved, reserved_bytes=reserved)
        assert found.budget is not None
        assert 0.9 * reserved - 1 <= parse_bytes(found.budget) <= 0.98 * reserved + 1


def test_control_characters_of_a_file_are_escaped(tmp_path):
    """A terminal would obey an escape sequence in a function's name."""
    recording = Recording()
    recording.allocate(MIB, stack(("/x/\x1b]0;owned\x07.py", "f\n\x1b[31m\u202e", 1)))
    text = read(recording, tmp_path).render()
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "\\x1b[31m" in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "no list of segments"),
        ({"segments": 3}, "segments"),
        ({"segments": [], "device_traces": [[{"action": "alloc", "size": -1}]]}, "size"),
        ({"segments": [], "device_traces": [[{"action": "alloc", "size": 2**70}]]}, "not a memory snapshot"),
        ({"segments": [{"address": 0, "total_size": 1}]}, "blocks"),
    ],
)
def test_another_pickle_is_refused(content, said, tmp_path):
    """Plain data that is no snapshot: which part is wrong."""
    (tmp_path / "s.pickle").write_bytes(pickle.dumps({**content, "padding": "x" * 99} if isinstance(content, dict) else content))
    with pytest.raises(FileFormatError, match=said):
        read_snapshot(tmp_path / "s.pickle")


def test_a_stack_that_is_none_is_refused(tmp_path):
    """Stacks are checked when they are read."""
    for frames in ("main", [{"name": "f"}], [3], [{"name": "f", "filename": "a.py", "line": "3"}]):
        recording = Recording()
        recording.allocate(MIB, frames)
        with pytest.raises(FileFormatError, match="a stack"):
            read(recording, tmp_path)


def test_a_file_above_the_limit_is_refused(tmp_path):
    """A snapshot takes ten times its size in memory."""
    path = failed_run().dump(tmp_path / "s.pickle")
    with pytest.raises(OptionError, match="larger than"):
        read_snapshot(path, path.stat().st_size - 1)
    assert read_snapshot(path, path.stat().st_size)
    with pytest.raises(OptionError, match="No such file"):
        read_snapshot(tmp_path / "none.pickle")


@pytest.mark.parametrize(
    ("frames", "place", "kind"),
    [
        (stack(("??", "at::empty", 0), ("/x/engine.cpp", "torch::autograd::Engine::thread_main", 0)), "", stacks.BACKWARD),
        (stack((f"{TORCH}/nn/init.py", "normal_", 1), ("/p/a/b/c.py", "g", 2)), "b/c.py:2 g", stacks.PARAMETERS),
        (stack(("/tmp/torchinductor_me/ab/cab.py", "call", 9), ("t.py", "step", 3)), "t.py:3 step", stacks.OTHER),
        (stack((WINDOWS, "_call_impl", 1), (r"C:\t.py", "f", 3)), "C:/t.py:3 f", stacks.FORWARD),
        (stack(("/v/site-packages/transformers/gpt2/m.py", "forward", 5)), "transformers/gpt2/m.py:5 forward", stacks.OTHER),
        (stack(("<ipython-input-3-a>", "<module>", 2)), "<ipython-input-3-a>:2 <module>", stacks.OTHER),
        (stack((f"{TORCH}/nn/functional.py", "linear", 7)), "torch/nn/functional.py:7 linear", stacks.OTHER),
    ],
)  # fmt: skip
def test_origins(frames, place, kind):
    """The innermost line outside PyTorch, on each system."""
    assert stacks.origin_of(frames_of(frames)) == (place, kind)
