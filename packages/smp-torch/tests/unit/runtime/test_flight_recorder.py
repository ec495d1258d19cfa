"""PyTorch's own analyzer reads what smprun writes of where ranks are."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
import torch
from torch.distributed.flight_recorder import fr_trace

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.launcher import flight_recorder
from smdistributed.modelparallel.common.launcher.status import Told
from smdistributed.modelparallel.common.whereabouts import Activity, Exchange, Whereabouts

pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.11."), reason="its analyzer knows exchanges of NCCL alone"
)
SIZE = 6


def told(exchanges: dict[int, Exchange | None]) -> Told:
    """Returns what ranks say that are in some exchanges, as another process gets it."""
    answers = {
        rank: Whereabouts(rank, "vm", "a.py:1", (Activity("what", 1.0, each),))
        for rank, each in exchanges.items()
    }
    return Told.unpacked(Told("", SIZE, answers).packed())


def missing(folder: Path, caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """Returns by the exchange which ranks the analyzer misses in it."""
    caplog.clear()
    try:
        with caplog.at_level("INFO"):
            fr_trace.main([str(folder)])
    finally:
        gc.enable()  # the analyzer leaves it off
    found: dict[str, str] = {}
    group = ""
    for record in caplog.records:
        what, _, text = record.getMessage().partition(": ")
        if what == "group info":
            group = text
        elif what == "missing ranks":
            found.setdefault(group, text)
    return found


def test_who_has_not_come_to_an_exchange_is_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(0)
    for trial in range(60):
        ranks = tuple(sorted(draw.sample(range(SIZE), draw.randint(2, SIZE))))
        there = sorted(draw.sample(ranks, draw.randint(1, len(ranks))))
        exchange = Exchange("summing with", ranks, draw.choice((1, 7, 4000)))
        # The others compute, do not answer, or are at the exchange before this one.
        before = Exchange("summing with", ranks, exchange.number - 1)
        late = [rank for rank in ranks if rank not in there]
        others = {rank: draw.choice((None, before)) for rank in late if draw.random() < 0.7}
        folder = tmp_path / str(trial)
        flight_recorder.write(told({**dict.fromkeys(there, exchange), **others}), folder)
        found = missing(folder, caplog)
        if not late:
            assert not found
            continue
        (name,) = found
        assert name.startswith("summing with [ranks ")
        # Of two that are at two exchanges each one misses the other.
        at_before = {rank for rank, each in others.items() if each is not None}
        assert found[name] in (str(set(late)), str(set(ranks) - at_before))


def test_two_that_send_and_receive_have_met(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sends, receives = (Exchange("tensors", (1, 4), sends=each) for each in (True, False))
    flight_recorder.write(told({1: sends, 4: receives}), tmp_path / "met")
    assert not missing(tmp_path / "met", caplog)
    flight_recorder.write(told({1: None, 4: receives}), tmp_path / "waits")
    assert missing(tmp_path / "waits", caplog) == {"tensors [ranks 1, 4]": "{1}"}


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"no other files; .* has notes.txt: name a new one"):
        flight_recorder.write(told({}), tmp_path)
