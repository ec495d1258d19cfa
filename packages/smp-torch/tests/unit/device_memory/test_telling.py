"""What a job is told of its memory before it trains."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smdistributed.modelparallel.common.search.rank_memory import RankMemory
from smdistributed.modelparallel.torch.device_memory import telling
from smdistributed.modelparallel.torch.device_memory.report import MemoryReport
from smdistributed.modelparallel.torch.planning.passes_held import PassesHeld


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
        rank=0,
        device=torch.device(device),
        transport=SimpleNamespace(local_size=ranks),
        topology=SimpleNamespace(pp_size=1),
    )
    monkeypatch.setattr(telling, "report", lambda runtime: found)
    monkeypatch.setattr(telling, "explanation", lambda found, runtime: "why")
    with caplog.at_level(logging.WARNING):
        telling._tell(runtime)
    assert bool(caplog.messages) is bool(told)
    assert told in "".join(caplog.messages)


def test_one_line_says_what_the_fullest_rank_takes() -> None:
    mib = 2.0**20
    ranks = [
        RankMemory(3 * mib, 3 * mib, 6 * mib, 10 * mib, mib),
        RankMemory(2 * mib, 2 * mib, 4 * mib, 40 * mib, mib),
    ]
    held = [PassesHeld(10 * mib, 4 * mib, 3, mib), PassesHeld(40 * mib, 18 * mib, 2, mib)]
    line = telling.line_of(ranks, held)
    assert line == (
        "memory in training: partition 1 takes most, 49.0 MiB: parameters 2.0 MiB, gradients "
        "2.0 MiB, optimizer 4.0 MiB, activations 40.0 MiB (18.0 MiB of each of at most 2 "
        "microbatches in flight, and what passes make), messages and inputs 1.0 MiB; all 2 "
        "partitions take 72.0 MiB"
    )
    assert "partition" not in telling.line_of(ranks[:1], held[:1])
