from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.building.delayed_parameters import DelayedParameters

CPU = torch.device("cpu")
WIDTH = 64


class Initialised(nn.Module):
    """Everything that constructors do to parameters."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("trunc", "orthogonal", "kaiming", "row", "scaled"):
            self.register_parameter(name, nn.Parameter(torch.empty(WIDTH, WIDTH)))
        nn.init.trunc_normal_(self.trunc, std=0.5)
        nn.init.orthogonal_(self.orthogonal)
        nn.init.kaiming_uniform_(self.kaiming)
        self.row.data.normal_(generator=torch.Generator().manual_seed(3))
        self.row.data[5].zero_()
        with torch.no_grad():
            self.scaled.copy_(self.trunc)
            self.scaled *= torch.linspace(0, 1, WIDTH)
        self.factor = float(self.kaiming.detach().std())
        drawn = torch.empty(WIDTH, WIDTH)
        nn.init.normal_(drawn)
        self.from_drawn = nn.Parameter(drawn)
        self.in_part = nn.Parameter(torch.ones(WIDTH, WIDTH))
        with torch.no_grad():
            self.in_part[2].zero_()
        self.from_values = nn.Parameter(torch.randn(WIDTH, WIDTH) * self.factor)
        self.register_buffer("mask", torch.tril(torch.ones(WIDTH, WIDTH)).view(1, WIDTH, WIDTH))
        self.tied = self.trunc
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.layers.append(copy.deepcopy(self.layers[0]))
        self.embedding = nn.Embedding(WIDTH, WIDTH, padding_idx=3)
        self.attention = nn.MultiheadAttention(WIDTH, 4)
        self.half = nn.Linear(WIDTH, WIDTH).to(torch.float16)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def transformer(name: str) -> nn.Module:
    hf: Any = importlib.import_module("transformers")
    if name == "gpt2":
        config = hf.GPT2Config(vocab_size=99, n_embd=64, n_layer=2, n_head=2, n_positions=64)
        return hf.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]
    if name == "bert":
        config = hf.BertConfig(
            vocab_size=99,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
        )
        return hf.AutoModelForMaskedLM.from_config(config)  # type: ignore[no-any-return]
    config = hf.LlamaConfig(
        vocab_size=99,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
    )
    return hf.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def check(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(5)
    expected = build()
    following = torch.rand(3)
    torch.manual_seed(5)
    delayed = DelayedParameters()
    with delayed.delaying():
        module = build()
    assert torch.equal(torch.rand(3), following)
    tensors = [*module.parameters(), *module.buffers()]
    identities = [id(tensor) for tensor in tensors]
    waiting = [tensor for tensor in tensors if delayed.holds(tensor)]
    assert all(delayed.holds(tensor) for tensor in tensors if tensor.numel() > 1024)
    assert waiting
    # In no order: each has all it needs.
    for tensor in reversed(waiting):
        delayed.fill(tensor, CPU)
    assert [id(tensor) for tensor in (*module.parameters(), *module.buffers())] == identities
    for (name, want), got in zip(
        [*expected.named_parameters(), *expected.named_buffers()], tensors, strict=True
    ):
        assert torch.equal(want, got), name
        assert (want.dtype, want.requires_grad) == (got.dtype, got.requires_grad), name
        assert want.stride() == got.stride(), name
        assert type(want) is type(got), name
        assert vars(want) == vars(got), name


def test_values_are_those_of_an_immediate_construction() -> None:
    check(Initialised)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_transformers_from_a_configuration(name: str) -> None:
    pytest.importorskip("transformers")
    check(lambda: transformer(name))


def test_a_change_after_the_context_is_an_error() -> None:
    delayed = DelayedParameters()
    with delayed.delaying():
        layer = nn.Linear(WIDTH, WIDTH)
        made = nn.Parameter(nn.init.normal_(torch.empty(WIDTH, WIDTH)))
    for parameter in (layer.weight, made):
        nn.init.ones_(parameter)
        with pytest.raises(UnsupportedError, match="was changed after"):
            delayed.fill(parameter, CPU)


def test_a_default_device_is_of_no_account() -> None:
    delayed = DelayedParameters()
    with torch.device(CPU), delayed.delaying():
        layer = nn.Linear(WIDTH, WIDTH)
    with torch.device("meta"):
        delayed.fill(layer.weight, CPU)
    assert layer.weight.device == CPU
    assert layer.weight.detach().abs().sum() > 0


def test_a_source_that_changed_is_an_error() -> None:
    delayed = DelayedParameters()
    source = torch.ones(WIDTH, WIDTH)
    with delayed.delaying():
        layer = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            layer.weight.copy_(source)
    source += 1
    with pytest.raises(UnsupportedError, match="has been changed since"):
        delayed.fill(layer.weight, CPU)


def test_foreign_tensors_are_dropped() -> None:
    delayed = DelayedParameters()
    with delayed.delaying():
        layer = nn.Linear(WIDTH, WIDTH)
    weight = layer.weight
    delayed.drop(weight, CPU)
    assert layer.weight is weight
    assert not delayed.holds(weight)
    assert weight.numel() == 0
    assert isinstance(weight, nn.Parameter)
