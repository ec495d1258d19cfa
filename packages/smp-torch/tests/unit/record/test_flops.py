"""A formula of PyTorch that refuses a call neither ends a step nor leaves the call uncounted."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from recorded import Recorded
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from smdistributed.modelparallel.common.planning.pass_costs import OPERATIONS_A_BYTE
from smdistributed.modelparallel.torch.compat.private.modes import past_recording
from smdistributed.modelparallel.torch.record.costs import flops
from smdistributed.modelparallel.torch.record.costs.flops import FlopCounter
from smdistributed.modelparallel.torch.record.costs.meter import Meter, _may_draw
from smdistributed.modelparallel.torch.tensors.writes import writes_of

aten = torch.ops.aten
BATCH, HEADS, KEY_HEADS, QUERIES, KEYS, WIDTH = 2, 8, 2, 5, 7, 16
ATTENTION = 2 * 2 * BATCH * HEADS * QUERIES * KEYS * WIDTH


def refuse(*_: Any, **__: Any) -> int:
    raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")


@pytest.fixture
def _refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    for packet in (aten.mm, aten.addmm, attention, backward):
        monkeypatch.setitem(flop_registry, packet, refuse)


def grouped_attention(key_heads: int = KEY_HEADS) -> torch.Tensor:
    query = torch.randn(BATCH, HEADS, QUERIES, WIDTH, requires_grad=True)
    key, value = (torch.randn(BATCH, key_heads, KEYS, WIDTH, requires_grad=True) for _ in "kv")
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def counted(step: Any) -> int:
    with Meter() as meter:
        step()
    return meter.flops


@pytest.mark.usefixtures("_refusing")
def test_attention_with_shared_key_heads_is_counted_by_its_shapes() -> None:
    assert counted(grouped_attention) == ATTENTION


@pytest.mark.usefixtures("_refusing")
def test_refused_attention_counts_what_pytorch_counts_where_it_does() -> None:
    shapes = [(BATCH, HEADS, length, WIDTH) for length in (QUERIES, KEYS, KEYS)]
    tensors = [torch.randn(shape) for shape in shapes]
    output = tensors[0].clone()
    forward = aten._scaled_dot_product_flash_attention
    backward = aten._scaled_dot_product_flash_attention_backward
    expected = flop_registry[forward](*tensors, out_val=output)
    with Meter() as meter:
        loss = grouped_attention(HEADS).sum()
        assert meter.flops == expected
        loss.backward()
    assert meter.flops - expected == flop_registry[backward](output, *tensors, out_val=None)


@pytest.mark.usefixtures("_refusing")
def test_other_operations_count_the_bytes_that_they_move() -> None:
    left, right = torch.randn(3, 4), torch.randn(4, 5)
    assert counted(lambda: left @ right) == 4 * (3 * 4 + 4 * 5 + 3 * 5)


def test_what_the_formulas_take_is_counted_as_pytorch_counts_it() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Conv1d(3, 2, 3)), torch.randn(2, 3, 4)
    with FlopCounterMode(display=False) as theirs:
        model(x)
    assert counted(lambda: model(x)) == theirs.get_total_flops() > 0


@pytest.mark.usefixtures("_refusing")
def test_a_refusal_is_said_once_of_each_operation(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="smdistributed.modelparallel.torch")
    counter, ones = FlopCounter(), torch.ones(2, 2)
    for _ in range(3):
        counter.count(aten.mm.default, (ones, ones), {}, ones)
        counter.count(aten.addmm.default, (ones, ones, ones), {}, ones)
    said = [record.getMessage() for record in caplog.records]
    assert [message.split()[0] for message in said] == ["aten.mm.default", "aten.addmm.default"]
    assert all("query/key/value shapes are incompatible" in message for message in said)


class GroupedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * 4)
        self.key = nn.Linear(WIDTH, KEY_HEADS * 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x).unflatten(-1, (HEADS, 4)).transpose(1, 2)
        key = self.key(x).unflatten(-1, (KEY_HEADS, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(query, key, key, enable_gqa=True).mean()


@pytest.mark.usefixtures("_refusing")
def test_a_step_is_recorded_where_a_formula_refuses() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), GroupedAttention())
    recorded = Recorded(model, {"0": 0, "1": 1})

    def train(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x)
        recorded.backward(loss)
        return loss

    assert recorded.plan(train, torch.randn(BATCH, QUERIES, WIDTH)).segments


def test_fakes_are_written_to_where_real_tensors_would_be() -> None:
    """The mode of fakes computes with numbers and real tensors for real."""
    mode, real = FakeTensorMode(allow_non_fake_inputs=True), torch.ones(5000)
    before = writes_of(real)
    with mode, Meter(mode):
        real.mul_(2)
        torch.add(real, 1, out=real)
        assert writes_of(real) != before
        with past_recording():
            real[:1].add_(1)
    assert real.sum() == 5001


@pytest.fixture
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "_is_on_gpu", lambda out: True)


@pytest.mark.usefixtures("_on_gpu")
def test_on_a_gpu_what_is_no_product_counts_by_its_bytes() -> None:
    x = torch.randn(8, 16)
    moved = 2 * x.numel() * x.element_size()
    assert counted(lambda: x.exp()) == OPERATIONS_A_BYTE * moved
    assert counted(lambda: x.t()[1:]) == 0


@pytest.mark.usefixtures("_on_gpu")
@pytest.mark.parametrize(
    ("dtype", "precision", "longer"),
    [(torch.half, "highest", 1), (torch.float, "high", 2), (torch.float, "highest", 14)],
)
def test_on_a_gpu_products_of_wider_numbers_count_more(
    dtype: torch.dtype, precision: str, longer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    x = torch.randn(8, 16).to(dtype)
    assert counted(lambda: x @ x.t()) == longer * 2 * 8 * 8 * 16


@pytest.mark.usefixtures("_on_gpu")
def test_on_a_gpu_attention_in_half_precision_is_no_product_of_wider_numbers() -> None:
    """Its sums of exponentials are in single precision."""
    query = torch.empty(1, 2, 8, 4, dtype=torch.half)
    sums = torch.empty(1, 2, 8)
    attention = aten._scaled_dot_product_flash_attention.default
    flops, moved, *_ = FlopCounter().count(attention, (query,) * 3, {}, (query, sums))
    assert (flops, moved) == (4 * 2 * 8 * 8 * 4, 0)


@pytest.mark.parametrize(("dropout", "draws"), [(0.0, False), (0.5, True)])
def test_recurrent_layers_on_a_gpu_draw_if_they_drop_something(dropout: float, draws: bool) -> None:
    cudnn = aten._cudnn_rnn.default
    names = [argument.name for argument in cudnn._schema.arguments]
    args: list[Any] = [None] * len(names)
    args[names.index("dropout")] = dropout
    assert _may_draw(cudnn, args, {}) is draws
    assert _may_draw(aten.native_dropout.default, args, {})
