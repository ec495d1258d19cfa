"""What a job is told of its memory before it trains."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smdistributed.modelparallel.torch.device_memory import telling
from smdistributed.modelparallel.torch.device_memory.report import MemoryReport


@pytest.mark.parametrize(
    ("device", "ranks", "told"),
    [("cpu", 1, ""), ("cpu", 2, " for 2 ranks"), ("cuda", 2, ""), ("cpu", 4, " for 4 ranks")],
)
def test_ranks_that_do_not_fit_together_are_warned(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: str,
    ranks: int,
    told: str,
) -> None:
    found = MemoryReport(0, device, 2**30, {"parameters": 6 * 2**27}, 0, {})
    runtime: Any = SimpleNamespace(
        rank=0, device=torch.device(device), transport=SimpleNamespace(local_size=ranks)
    )
    monkeypatch.setattr(telling, "report", lambda runtime: found)
    monkeypatch.setattr(telling, "explanation", lambda found, runtime: "why")
    with caplog.at_level(logging.WARNING):
        telling._tell(runtime)
    assert bool(caplog.messages) is bool(told)
    assert told in "".join(caplog.messages)
