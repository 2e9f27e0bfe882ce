"""A file is written where its path leads; what cannot be written is known before the work, in the system's words."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from checkmate.core.files import check_writable, is_special, write_atomically, write_bytes


def written(path: Path) -> None:
    """Write to a path without a check."""
    write_bytes(path, b"data")


@pytest.mark.parametrize("linked", [False, True])
def test_an_open_file_is_written_where_it_stands(tmp_path, linked):
    """As `/dev/stdout`: a file to which a shell redirects loses no line before or after."""
    with (tmp_path / "redirected").open("wb", buffering=0) as stream:
        stream.write(b"before\n")
        path = Path(f"/dev/fd/{stream.fileno()}")
        if linked:
            (tmp_path / "link").symlink_to(path)
            (tmp_path / "other").symlink_to("link")
            path = tmp_path / "other"
        check_writable(path, 5)
        write_bytes(path, b"data\n")
        stream.write(b"after\n")
    assert (tmp_path / "redirected").read_bytes() == b"before\ndata\nafter\n"


def test_an_open_pipe_has_no_name_and_is_written(tmp_path):
    """The process that reads it gets the data; no file can be made beside it."""
    reader, writer = os.pipe()
    check_writable(Path(f"/dev/fd/{writer}"), 4)
    written(Path(f"/dev/fd/{writer}"))
    assert os.read(reader, 100) == b"data"
    os.close(reader)
    os.close(writer)
    with pytest.raises(OSError, match="Bad file descriptor"):
        check_writable(Path(f"/dev/fd/{writer}"))


def test_a_pipe_with_a_name_stays_a_pipe(tmp_path):
    """A file in its place would have no reader."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    check_writable(tmp_path / "pipe", 4)
    written(tmp_path / "pipe")
    assert os.read(reader, 100) == b"data"
    assert is_special(tmp_path / "pipe")
    os.close(reader)


def test_a_number_is_the_name_of_a_file(tmp_path):
    """In the folder of a process's open files alone it is one of these."""
    assert not is_special(tmp_path / "1")
    check_writable(tmp_path / "1")
    written(tmp_path / "1")
    assert (tmp_path / "1").read_bytes() == b"data"
    check_writable(tmp_path / "1")
    assert not is_special(tmp_path / "1")


@pytest.mark.parametrize("call", [check_writable, written])
@pytest.mark.parametrize(
    ("name", "number"), [("folder", errno.EISDIR), ("loop", errno.ELOOP), ("protected", errno.EACCES), ("no/file", errno.ENOENT)]
)
def test_a_fault_is_the_systems_error_with_the_path(tmp_path, monkeypatch, call: Callable[[Path], None], name, number):
    """A check finds the same faults as the write, and changes nothing."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "protected").write_text("before")
    access = os.access
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "protected" and access(path, mode))
    with pytest.raises(OSError, match=r".") as caught:
        call(tmp_path / name)
    assert (caught.value.errno, caught.value.strerror) == (number, os.strerror(number))
    assert str(caught.value.filename).startswith(str(tmp_path / name.partition("/")[0]))
    assert (tmp_path / "protected").read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "loop", "protected"}


def test_a_file_keeps_its_permissions(tmp_path):
    """A private plan does not become public because it is planned again."""
    (tmp_path / "plan").touch(0o600)
    write_atomically(tmp_path / "plan", b"data")
    assert stat.S_IMODE((tmp_path / "plan").stat().st_mode) == 0o600


def test_a_check_takes_the_bytes_from_the_disk_for_a_moment(tmp_path, monkeypatch):
    """Then a disk that is too full is found before the work; without a size nothing is taken."""
    taken: list[int] = []
    allocate = os.posix_fallocate

    def look(descriptor: int, begin: int, size: int) -> None:
        allocate(descriptor, begin, size)
        taken.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr("os.posix_fallocate", look)
    check_writable(tmp_path / "new")
    check_writable(tmp_path / "new", 1000)
    assert taken == [1000]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_a_file_system_that_cannot_allocate_is_no_fault(tmp_path, fails, number):
    """The write may still succeed; only a full disk is known to refuse it."""
    calls = fails("os.posix_fallocate", OSError(number, os.strerror(number)))
    check_writable(tmp_path / "new", 1000)
    assert len(calls) == 1
    fails("os.posix_fallocate", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    check_writable(tmp_path / "new")  # asks for nothing, which is refused by no disk
    with pytest.raises(OSError, match="No space left on device"):
        check_writable(tmp_path / "new", 1000)
