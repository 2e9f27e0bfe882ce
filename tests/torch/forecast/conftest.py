"""Searches on a busy machine."""

from __future__ import annotations

import pytest

from checkmate.torch.forecast.tracer import DeviceTracer


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trace is left out for lack of time, and no search has more than four seconds."""
    share_s = DeviceTracer.share_s
    generous = {"has_time_for": lambda *_: True, "share_s": lambda self, share: min(4.0, max(2.0, share_s(self, share)))}
    for name, method in generous.items():
        monkeypatch.setattr(DeviceTracer, name, method)
