"""Read a pickle of plain data without running any code of it."""

from __future__ import annotations

import io
import pickle
import re
from typing import Any, NoReturn

from checkmate.core.errors import FileFormatError

_WIDTHS = {
    **dict.fromkeys(b"N\x88\x89)]}(aesu\x94", 0),  # None, booleans, empty containers, marks, appends, items, memo
    **dict.fromkeys(b"Khq\x80", 1),  # one-byte integer, memo, protocol
    ord("M"): 2,
    **dict.fromkeys(b"Jj", 4),
    **dict.fromkeys(b"G\x95", 8),  # float, frame
}
"""Bytes of the argument of each opcode of plain data whose argument has a fixed length."""

_LONGS = b"|".join(b"\x8a%c.{%d}" % (length, length) for length in range(1, 10)) + b"|\x8a\x00"
_FIXED = b"|".join(re.escape(bytes([code])) + b".{%d}" % width for code, width in _WIDTHS.items())
# Python hashes a tuple recursively and without a limit, so that a deep one as a key would overflow the C stack. Tuples are
# therefore accepted only as up to three numbers: a memory snapshot has pairs, the numbers of memory pools.
_NUMBER = b"(?:K.|M.{2}|J.{4}|[N\x88\x89]|" + _LONGS + b")"
_TUPLES = b"|".join(_NUMBER + b"{%d}" % length + code for length, code in ((1, b"\x85"), (2, b"\x86"), (3, b"\x87")))
_RUN = re.compile(b"(?:" + b"|".join((_TUPLES, _FIXED, _LONGS)) + b")*+", re.DOTALL)
_TEXTS = {0x8C: 1, ord("X"): 4}  # opcodes of text, and the bytes of its length
_LONG_PUT, _STOP = ord("r"), ord(".")
_CODE = {
    b"c": "GLOBAL", b"\x93": "STACK_GLOBAL", b"R": "REDUCE", b"b": "BUILD", b"i": "INST", b"o": "OBJ", b"\x81": "NEWOBJ",
    b"\x92": "NEWOBJ_EX", b"P": "PERSID", b"Q": "BINPERSID", b"\x82": "EXT1", b"\x83": "EXT2", b"\x84": "EXT4",
}  # fmt: skip
"""Opcodes that import, call or build objects."""


class _NoClasses(pickle.Unpickler):
    """The second of two locks: `_check` has already refused every opcode that looks up a name."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it has a persistent id")


def loads(data: bytes) -> Any:
    r"""Read a pickle that consists of lists, dictionaries, text, numbers, booleans, None, and tuples of numbers.

    All opcodes are checked before the first of them is interpreted.

    Args:
        data: A pickle of protocol 2 or later.

    Raises:
        FileFormatError: The pickle has any other object, or is damaged.

    Examples:
        >>> loads(pickle.dumps({"sizes": [1, 2], "pool": (0, 1)}))
        {'sizes': [1, 2], 'pool': (0, 1)}
        >>> loads(b"\x80\x02cposix\nsystem\n.")
        Traceback (most recent call last):
            ...
        checkmate.core.errors.FileFormatError: the pickle would import or call something (GLOBAL at byte 2): not read
        <BLANKLINE>
        hint: give a file written by `torch.cuda.memory._dump_snapshot`
    """
    _check(data)
    try:
        return _NoClasses(io.BytesIO(data)).load()
    except Exception as error:  # noqa: BLE001  (a damaged pickle raises nearly any error)
        raise _refusal(f"the pickle is damaged: {error or type(error).__name__}") from None


def _check(data: bytes) -> None:
    """Refuse a pickle with any opcode but those of plain data.

    Runs of opcodes with short arguments are matched by one expression, 20 times faster than a loop over the opcodes.
    """
    end, position = len(data), 0
    while True:
        run = _RUN.match(data, position)
        position = position if run is None else run.end()
        if position >= end:
            raise _refusal("the pickle is cut short")
        code = data[position]
        if code == _STOP:
            return
        if code in _TEXTS:
            start = position + 1 + _TEXTS[code]
            position = start + int.from_bytes(data[position + 1 : start], "little")
        elif code == _LONG_PUT:
            index = int.from_bytes(data[position + 1 : position + 5], "little")
            # The memo is an array, numbered in order. Each entry after the first 256 takes six bytes of the file or more; a
            # larger number would make Python allocate up to 64 GiB.
            if index > 256 + position // 6:
                raise _refusal(f"the pickle is damaged: object {index} of the memo at byte {position}")
            position += 5
        elif (name := _CODE.get(data[position : position + 1])) is not None:
            raise _refusal(f"the pickle would import or call something ({name} at byte {position}): not read")
        else:
            raise _refusal(f"the pickle has more than plain data (opcode 0x{code:02x} at byte {position}): not read")


def _refusal(message: str) -> FileFormatError:
    return FileFormatError(message, hint="give a file written by `torch.cuda.memory._dump_snapshot`")
