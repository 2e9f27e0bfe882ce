"""What `checkmate doctor` prints and returns."""

from __future__ import annotations

import pytest

import checkmate.doctor
from checkmate.doctor import Check, Report

FIGURES = {
    "budget_bytes": 20 << 20,
    "planned_bytes": 19 << 20,
    "measured_bytes": 19 << 20,
    "reserved_bytes": None,
    "identical": True,
    "time_ratio": 1.061,
}
CHECKS = (
    Check(name="torch", verdict="ok", detail="2.13.0+cpu, within 2.11 to 2.13"),
    Check(
        name="stores",
        verdict="failed",
        detail="the cache folder /home/me/.cache/checkmate cannot be used: Permission denied",
        cure="make it a folder that can be written, or set CHECKMATE_CACHE to another folder",
    ),
    Check(name="transformer", verdict="ok", detail="measured 19.0 MiB within 20.0 MiB, bits equal", figures=FIGURES),
    Check(name="device", verdict="note", detail="NVIDIA T4", cure="end other processes on the GPU before you measure"),
)


@pytest.fixture
def examined(monkeypatch):
    """Replace the examination by one whose checks are given."""

    def prepare(*checks: Check) -> None:
        def examine(device, *, quick, on_check, on_start):
            for check in checks:
                on_check(check)
            return Report(device="cpu", machine=[], versions={}, checks=checks, warnings=(), elapsed_s=41.6)

        monkeypatch.setattr(checkmate.doctor, "examine", examine)

    return prepare


def test_output(run, golden, examined):
    """A line a check with its verdict, what to do, a table of the steps, and a conclusion, in 80 columns."""
    examined(*CHECKS)
    outcome = run("doctor")
    golden("doctor", f"{outcome.out}--- stderr\n{outcome.err}--- exit code {outcome.code}\n")
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_the_report_is_printed(run, examined):
    """With its cures and the exit code of the verb."""
    examined(*CHECKS)
    printed = run("doctor", "--json")
    assert printed.json["checks"][1]["cure"] == CHECKS[1].cure
    assert (printed.json["holds"], printed.code) == (False, 1)


def test_exit_codes(run, examined):
    """Notes are no faults; a wrong device is bad input."""
    examined(CHECKS[0], CHECKS[3])
    assert run("doctor").code == 0
    assert run("doctor", "--device", "tpu").code == 2
