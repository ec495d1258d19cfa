"""What comes before a question, cut into parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import nn

from smdistributed.modelparallel.torch.record.questions.question import Before
from smdistributed.modelparallel.torch.stepping.computed_ahead import _apart_from
from smdistributed.modelparallel.torch.stepping.question_plans import QuestionPlans


class Counting(nn.Module):
    """Adds to a buffer, if it is told to, between two modules."""

    counts = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        if self.counts:
            self.total.add_(1)
        return self.last(self.first(x) * self.total)


@pytest.mark.parametrize("counts", [False, True])
def test_state_that_code_between_modules_writes_to_stays_in_one_part(counts: bool) -> None:
    """On a GPU, where parameters of a model without partition come part by part."""
    net = Counting()
    net.counts = counts
    recorded = Recorded(net, {"first": 0, "last": 1})
    way = recorded.passes(net, torch.ones(2, 4)).way
    assert way is not None
    graph = way.graph
    runtime: Any = SimpleNamespace(
        device=torch.device("cuda"), coordinates=SimpleNamespace(pp_rank=1)
    )
    plans = QuestionPlans(runtime, lambda graph: pytest.fail("it has no partition"))
    ready = plans.ready(Before(graph, len(graph.nodes)), [], "there", placed=False)
    parts = plans.parts(ready, 0, placed=False)
    assert (len(parts) == 1) is counts


def test_what_shows_state_that_is_put_back_is_copied() -> None:
    state = torch.ones(3)
    assert _apart_from([state], view := state[:2]) is not view
    assert _apart_from([state], other := torch.ones(3)) is other
