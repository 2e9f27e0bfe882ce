"""No code of a pickle runs, whatever is in the file, and plain data is read as pickle reads it."""

from __future__ import annotations

import collections
import contextlib
import datetime
import os
import pickle
import random
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate import FileFormatError
from checkmate.oom.snapshot import plain_data, snapshot_of
from tests.oom.recording import failed_run

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(max_size=300)
    | st.tuples(st.integers(0, 2**40), st.integers(-3, 3)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 5), inner),
    max_leaves=20,
)  # fmt: skip


@given(PLAIN, st.integers(2, 5))
def test_plain_data_is_read_as_pickle_reads_it(value, protocol):
    """Every protocol with binary opcodes, so that files of all releases of PyTorch are read."""
    assert plain_data(pickle.dumps(value, protocol)) == value


class Runs:
    """Pickled, it is a call."""

    def __init__(self, call, *args):
        self.call = call, args

    def __reduce__(self):
        return self.call


class Slots:
    __slots__ = ("x",)


def build(path):
    """Pickles that import, call, or build objects."""
    touch = f"touch {path}"
    with_state = Slots()
    with_state.x = 1
    return {
        "system": pickle.dumps(Runs(os.system, touch)),
        "system-protocol-2": pickle.dumps(Runs(os.system, touch), 2),
        "eval-inside-a-snapshot": pickle.dumps({"segments": [Runs(eval, f"open({str(path)!r}, 'w')")], "device_traces": []}),
        "global": b"\x80\x02cposix\nsystem\n.",
        "text-protocol": b"cposix\nsystem\n(S'" + touch.encode() + b"'\ntR.",
        "inst": b"\x80\x02(S'" + touch.encode() + b"'\niposix\nsystem\n.",
        "obj": b"\x80\x02(cposix\nsystem\nX" + struct.pack("<I", len(touch)) + touch.encode() + b"o.",
        "extension": b"\x80\x02\x82\x01.",
        "persistent": b"\x80\x02Pid\n.",
        "binary-persistent": b"\x80\x02K\x01Q.",
        "state": pickle.dumps(with_state, 2),
        "ordered": pickle.dumps(collections.OrderedDict(a=1)),
        "date": pickle.dumps(datetime.date(2026, 1, 1)),
    }


@pytest.mark.parametrize("name", build("x"))
def test_a_pickle_with_objects_is_refused_and_nothing_runs(name, tmp_path):
    """No import, no call, no state."""
    path = tmp_path / "ran"
    with pytest.raises(FileFormatError, match="not read"):
        plain_data(build(path)[name])
    assert not path.exists()


def test_a_file_cannot_take_memory_out_of_proportion():
    """A memo index of four bytes makes Python allocate 64 GiB, and a length of text more than there is."""
    for data in (
        b"\x80\x02]r\xff\xff\xff\xff.",
        b"\x80\x04\x8b\xff\xff\xff\x7f.",
        b"\x80\x04\x8d" + b"\xff" * 8 + b".",
        b"\x80\x04X\xff\xff\xff\x7f.",
    ):
        began = time.process_time()
        with contextlib.suppress(FileFormatError):
            assert plain_data(data) == []  # the index itself is harmless
        assert time.process_time() - began < 1


def test_damaged_files_are_refused():
    """Any error of a damaged file is one of ours: 1,500 mutations of a real one."""
    data = pickle.dumps(failed_run().snapshot())
    assert snapshot_of(plain_data(data)).segments
    chance = random.Random(0)
    refused = 0
    for _ in range(1500):
        changed = bytearray(data[: chance.randrange(len(data))] if chance.random() < 0.2 else data)
        for _ in range(chance.randint(1, 4)):
            if changed:
                changed[chance.randrange(len(changed))] = chance.randrange(256)
        try:
            snapshot_of(plain_data(bytes(changed)))
        except FileFormatError:
            refused += 1
    assert refused > 700
