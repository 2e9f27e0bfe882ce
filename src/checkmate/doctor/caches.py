"""Folders and files that Checkmate and Inductor keep between processes: whether they can be written, and are intact."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from checkmate.core.errors import OptionError
from checkmate.core.units import format_bytes
from checkmate.cost.database import Database, cache_folder
from checkmate.cost.store import CostStore
from checkmate.doctor.check import Check
from checkmate.frontend.plan_store import PlanStore
from checkmate.frontend.solved_plans import SolvedPlans

_LEAST_FREE: Final = 1 << 30
"""Free bytes on a disk below which a check says so: the code that Inductor builds for one model takes some hundred MiB."""


def check_cache_folder() -> Check:
    """The folder of the measured costs and of the plans."""
    try:
        folder = cache_folder()
    except OptionError as error:
        return Check(name="cache folder", verdict="failed", detail=error.message, cure=error.hint)
    return check_folder("cache folder", folder, "set CHECKMATE_CACHE to another one")


def check_folder(name: str, folder: Path, other: str) -> Check:
    """A folder that is to be written.

    Args:
        name: Name of the check.
        folder: The folder; it is made if it does not exist.
        other: How another one is chosen, as an imperative.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as error:
        return Check(
            name=name,
            verdict="failed",
            detail=f"{folder} cannot be written: {error.strerror or error}",
            cure=f"make it a folder that can be written, or {other}",
        )
    free = shutil.disk_usage(folder).free
    if free < _LEAST_FREE:
        return Check(
            name=name,
            verdict="note",
            detail=f"{folder} has {format_bytes(free)} free",
            cure=f"free space on its disk, or {other}",
        )
    return Check(name=name, verdict="ok", detail=f"{folder} can be written, {format_bytes(free)} free")


def databases() -> dict[str, Database]:
    """The stores of this user, by what they keep."""
    return {
        "cost store": CostStore().database,
        "store of solved plans": SolvedPlans().database,
        "store of compiled plans": PlanStore("").database,
    }


def check_stores(stores: Mapping[str, Database] | None = None) -> list[Check]:
    """The stores: one check for all that are intact, and one for each that is not.

    Args:
        stores: Stores by what they keep; those of the user by default.
    """
    stores = databases() if stores is None else stores
    checks: list[Check] = []
    intact: list[str] = []
    for name, database in stores.items():
        fault = database.fault()
        if fault is None:
            intact.append(name)
        else:
            detail = f"{fault.place} cannot be {fault.used}: {fault.reason}"
            cure = f"{fault.cure}, or set CHECKMATE_CACHE to another folder"
            checks.append(Check(name=name, verdict="failed", detail=detail, cure=cure))
    if intact:
        checks.insert(0, Check(name="stores", verdict="ok", detail=f"intact: {', '.join(intact)}"))
    return checks
