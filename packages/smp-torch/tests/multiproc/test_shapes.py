"""V-shaped partitions: who gets one, who is refused, and what a checkpoint decides."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from equality_cases import WIDTH, batch, mlp, regress
from reference import compare
from torch import nn
from world import pipeline, run

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.testing import Worlds
from smdistributed.modelparallel.torch.api.slot import slot
from smdistributed.modelparallel.torch.stepping import placing

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

V = pipeline(2, launcher="fork", pipeline="zero_bubble_v")
AUTO = pipeline(2, launcher="fork", pipeline="auto")
PLACING = logging.getLogger("smdistributed.modelparallel.torch.stepping.placing")


class Lines(logging.Handler):
    """What is said while models are placed."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        PLACING.addHandler(self)
        PLACING.setLevel(logging.INFO)
        return self.lines

    def __exit__(self, *exception: object) -> None:
        PLACING.removeHandler(self)


def places(model: Any) -> list[int]:
    """The partition of each layer."""
    return [
        model.holder.partition_of(layer)
        for layer in model.get_module()
        if len([*layer.parameters()])
    ]


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def compared(num_layers: int, is_bare: bool = False) -> tuple[list[int], list[str]]:
    """Compares a model with one process; returns where its layers are, and what was said."""
    torch.manual_seed(0)
    with Lines() as lines:
        build = pair if is_bare else lambda: mlp(num_layers - 1)
        model = compare(build, regress, [batch(), batch()])
    return places(model), [line for line in lines if "V-shaped" in line]


def test_auto_takes_a_v_where_that_is_faster(worlds: Worlds) -> None:
    for found, lines in run(worlds, AUTO, compared, 8):
        assert found == [0, 0, 1, 1, 1, 1, 0, 0]
        assert not lines


@pytest.mark.parametrize(
    ("is_bare", "reason"),
    [
        (True, "A V-shaped partition over 2 ranks has 3 pieces"),
        (False, "a simulation says that it would not be 1% faster"),
    ],
)
def test_auto_does_without_and_says_why(worlds: Worlds, is_bare: bool, reason: str) -> None:
    first, second = run(worlds, AUTO, compared, 2, is_bare)
    assert first[0] == second[0] == [0, 1]
    (line,) = first[1]
    assert line.startswith(f"no V-shaped partition: {reason}")
    assert not second[1]


def without_a_name(usual: str) -> tuple[list[int], str]:
    """Compares a model of a job that names no order, on what looks like GPUs where it is asked."""
    runtime = slot.get()
    assert not runtime.has_open_order
    runtime.has_open_order = True
    with (
        mock.patch.object(placing, "usual_order", return_value=usual) as asked,
        mock.patch.object(torch.cuda, "get_device_name", return_value="NVIDIA H200"),
    ):
        found, _ = compared(8)
    assert asked.call_count == 1
    assert not runtime.has_open_order
    order, runtime.order = runtime.order, runtime.config.pipeline  # others have the world next
    return found, order


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks like a host without GPUs")
@pytest.mark.parametrize(
    ("usual", "expected"),
    [("auto", [0, 0, 1, 1, 1, 1, 0, 0]), ("interleaved", [0, 0, 0, 0, 1, 1, 1, 1])],
)
def test_the_first_partition_decides_where_no_order_is_named(
    worlds: Worlds, usual: str, expected: list[int]
) -> None:
    world = pipeline(2, launcher="fork")
    assert run(worlds, world, without_a_name, usual) == ((expected, usual),) * 2


def in_v() -> list[list[int]]:
    return [compared(2, is_bare=True)[0], compared(4)[0]]


def test_who_asks_for_a_v_by_name_has_one_where_there_are_parts_enough(worlds: Worlds) -> None:
    assert run(worlds, V, in_v) == ([[0, 1], [0, 1, 1, 0]],) * 2


def trained(folder: str, is_resumed: bool) -> Any:
    """Takes three steps, or the last of them from a checkpoint that each rank has its part of."""
    torch.manual_seed(0)
    batches = [batch() for _ in range(3)]
    torch.manual_seed(5 if is_resumed else 0)
    model = smp.DistributedModel(mlp(7))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 0.01))
    if is_resumed:
        smp.resume_from_checkpoint(folder, tag="two", partial=True)
    step = smp.step(regress)
    for number, each in enumerate(batches):
        if is_resumed and number < 2:
            continue
        optimizer.zero_grad()
        loss = step(model, *each).reduce_mean().item()
        optimizer.step()
        if number == 1:
            wrapped = {"model": model, "optimizer": optimizer}
            smp.save_checkpoint(folder, tag="two", partial=True, **wrapped)
    state = model.state_dict()
    return places(model), loss, {name: tensor.cpu() for name, tensor in state.items()}


def test_parts_of_a_checkpoint_are_taken_back_where_they_were(
    worlds: Worlds, tmp_path: Path
) -> None:
    expected = run(worlds, V, trained, str(tmp_path), False)
    assert expected[0][0] == [0, 0, 1, 1, 1, 1, 0, 0]
    for world in (V, AUTO):
        for one, (found, loss, state) in zip(
            expected, run(worlds, world, trained, str(tmp_path), True), strict=True
        ):
            assert (found, loss) == (one[0], pytest.approx(one[1], rel=1e-6))
            for name, tensor in one[2].items():
                torch.testing.assert_close(state[name], tensor, rtol=1e-6, atol=1e-7)
