"""Copies that a save writes while training goes on."""

from __future__ import annotations

import torch

from smdistributed.modelparallel.torch.checkpoint import held_copies
from smdistributed.modelparallel.torch.checkpoint.held_copies import HeldCopy


def test_a_copy_keeps_what_was_there_and_shares_what_was_shared() -> None:
    weight = torch.arange(6.0).view(2, 3)
    state = {"a": weight, "b": [weight.detach(), 3], "c": weight.t(), "d": torch.zeros(0)}
    copy = HeldCopy(state)
    weight.zero_()
    found = copy.to_host()
    assert found["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["b"][0] is found["a"]
    assert found["b"][1] == 3
    assert torch.equal(found["c"], found["a"].t())
    assert copy.state is None


def test_pieces_make_the_whole(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    class Stream:
        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    copy = HeldCopy({})
    copy._piece = torch.empty(64, dtype=torch.uint8)
    for tensor in (torch.randn(5, 9), torch.arange(40), torch.tensor(3.0), torch.randn(16)):
        assert torch.equal(copy._brought(tensor, Stream()), tensor)  # type: ignore[arg-type]
    assert held_copies._PIECE % 16 == 0
