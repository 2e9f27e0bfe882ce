"""Compares a source distribution, the wheel built from it, and the wheel built from the folder; called by `.ci/package`."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

from packaging.metadata import Metadata


def only(folder: Path, pattern: str) -> Path:
    """The one file of a folder that matches."""
    (found,) = folder.glob(pattern)
    return found


def differences(name: str, found: set[str], expected: set[str]) -> list[str]:
    """What is missing and what is too much, as lines."""
    lines = [f"{name}: {path} is missing" for path in sorted(expected - found)]
    return lines + [f"{name}: {path} should not be there" for path in sorted(found - expected)]


def main(committed: Path, built: Path, direct: Path) -> int:
    """Print what is wrong, or one line for each file that is right."""
    sdist, wheel = only(built, "*.tar.gz"), only(built, "*.whl")
    with tarfile.open(sdist) as archive:
        in_sdist = {PurePosixPath(*PurePosixPath(member.name).parts[1:]).as_posix() for member in archive if member.isfile()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
        metadata = archive.read(next(name for name in in_wheel if name.endswith(".dist-info/METADATA")))
    with zipfile.ZipFile(only(direct, "*.whl")) as archive:
        in_direct = set(archive.namelist())

    tracked = set(committed.read_text().splitlines())
    code = {path.removeprefix("src/") for path in tracked if path.startswith("src/checkmate/")}
    wrong = differences(sdist.name, in_sdist, tracked | {"PKG-INFO"})
    wrong += differences(wheel.name, {path for path in in_wheel if ".dist-info/" not in path}, code)
    wrong += differences(f"{wheel.name}, built from the folder", in_direct, in_wheel)
    print(*wrong, sep="\n", end="\n" if wrong else "")

    parsed = Metadata.from_email(metadata, validate=True)  # raises if a field is not valid
    print(f"{sdist.name}: {len(in_sdist)} files; {wheel.name}: {len(in_wheel)} files; {parsed.name} {parsed.version}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
