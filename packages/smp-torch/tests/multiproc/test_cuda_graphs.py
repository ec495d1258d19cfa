"""``smp.step(cuda_graphs=True)``: the numbers of passes that run as they are."""

from __future__ import annotations

import pytest
import torch
from graph_cases import MOMENTS, NETS, compare
from world import pipeline, replicas, run

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(180)]

WORLDS = {
    "interleaved": pipeline(2, launcher="fork"),
    "zero_bubble": pipeline(2, launcher="fork", pipeline="zero_bubble"),
}


@pytest.mark.parametrize("order", WORLDS)
@pytest.mark.parametrize("name", NETS)
def test_models(worlds: Worlds, name: str, order: str) -> None:
    for same, _, _ in (found := run(worlds, WORLDS[order], compare, name, "nothing")):
        assert same
    reason = NETS[name][1]
    if name == "dropout" and torch.cuda.is_available():
        reason = ""
    told = [line for _, _, lines in found for line in lines]
    if reason:
        assert any(reason in line for line in told), told
        assert max(count for _, count, _ in found) > 0
    else:
        assert not told
        # The third, fourth, fifth and sixth step, and the last of the size that came first.
        assert [count for _, count, _ in found] == [5, 5]


HALF = {
    kind: pipeline(2, launcher="fork", pipeline="zero_bubble", **{kind: True})
    for kind in ("bf16", "fp16")
}


@pytest.mark.parametrize("kind", HALF)
def test_half_precision(worlds: Worlds, kind: str) -> None:
    for same, count, told in run(worlds, HALF[kind], compare, "plain", "nothing"):
        assert same
        assert (count, told) == (5, [])


REPLICAS = {
    "together": replicas(2, 2),
    "owners": replicas(2, 2, shard_optimizer_state=True, pipeline="zero_bubble"),
}


@pytest.mark.parametrize("kind", REPLICAS)
@pytest.mark.parametrize("moment", ["nothing", "accumulated", "gradients_kept"])
def test_replicas(worlds: Worlds, kind: str, moment: str) -> None:
    found = run(worlds, REPLICAS[kind], compare, "normed", moment)
    for same, count, _ in found:
        assert same
        assert count > 0


@pytest.mark.parametrize("moment", MOMENTS)
def test_between_steps(worlds: Worlds, moment: str) -> None:
    found = run(worlds, WORLDS["interleaved"], compare, "factor", moment)
    for same, count, _ in found:
        assert same
        assert count > 0
