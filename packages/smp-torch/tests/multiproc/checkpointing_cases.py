"""Activation checkpointing: the numbers stay, the memory goes."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import assert_is_split
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as native
from torch.utils.checkpoint import checkpoint_sequential as native_sequential

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint, checkpoint_sequential

WIDTH = 16
LAYERS = 8
#: Of a microbatch.
ROWS = 8
Call = Callable[..., Any]


class Block(nn.Module):
    """Draws twice itself and through a child, and keeps several activations."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8 * WIDTH)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        inner = F.dropout(torch.tanh(self.up(x)), 0.1, self.training)
        return x + F.dropout(self.down(self.drop(inner)), 0.1, self.training)


class Net(nn.Module):
    """Calls its blocks through ``call``; the dropout is one module, called several times."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.drop = nn.Dropout(0.2)
        self.call = call

    def one(self, index: int, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.blocks[index](torch.sin(x)), 0.1, self.training)
        return torch.sin(torch.sin(self.drop(torch.tanh(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(LAYERS):
            x = self.call(functools.partial(self.one, index), x)
        # One block is called twice in a forward pass.
        return self.call(self.blocks[0], x)


class Stack(nn.Module):
    """A sequence of blocks that runs as ``call`` says."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.call = call

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self.layers, x)


def plain(function: Call, *args: Any) -> Any:
    return function(*args)


def train(model: smp.DistributedModel) -> dict[str, Any]:
    """Returns what two steps give, and the most bytes that were kept for backward passes."""
    kept = Kept()

    @smp.step
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    torch.manual_seed(7)
    model.zero_grad()
    # The first step is recorded, on fakes, which keep nothing.
    losses = [*step(model, torch.randn(4 * ROWS, WIDTH)).outputs]
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
        losses += step(model, torch.randn(4 * ROWS, WIDTH)).outputs
    assert_is_split(model)
    return {
        "losses": [loss.item() for loss in losses],
        "gradients": {name: p.grad for name, p in model.local_named_parameters()},
        "bytes": kept.most,
    }


class Kept:
    """Counts the bytes of activations that autograd keeps; parameters have other shapes."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        is_activation = tensor.dim() == 2 and len(tensor) == ROWS
        num_bytes = tensor.numel() * tensor.element_size() if is_activation else 0
        return _Counted(self, tensor, num_bytes)

    @staticmethod
    def unpack(counted: Any) -> torch.Tensor:
        return counted.tensor


class _Counted:
    def __init__(self, kept: Kept, tensor: torch.Tensor, num_bytes: int) -> None:
        self.kept, self.tensor, self.num_bytes = kept, tensor, num_bytes
        kept.now += num_bytes
        kept.most = max(kept.most, kept.now)

    def __del__(self) -> None:
        self.kept.now -= self.num_bytes


def _same(
    kind: Callable[[Call], nn.Module],
    call: Call,
    prepare: Callable[[Any], object] = lambda module: None,
    usual: Call = plain,
) -> None:
    """Checkpointing gives the numbers of a run without it, and keeps less than half."""
    torch.manual_seed(1)
    module = kind(usual)
    model = smp.DistributedModel(module)
    without = train(model)
    module.call = call
    prepare(module)
    with_it = train(model)
    assert without["losses"] == with_it["losses"]
    for name, gradient in without["gradients"].items():
        # Reentrant backward passes add up in another order where a block is called twice.
        torch.testing.assert_close(with_it["gradients"][name], gradient, msg=name)
    assert with_it["bytes"] < without["bytes"] / 2, (with_it["bytes"], without["bytes"])


def case_functions_in_glue() -> None:
    _same(Net, functools.partial(native, use_reentrant=False))


def case_functions_in_glue_reentrant() -> None:
    # No gradient passes this kind without an input that has one.
    def usual(function: Call, x: torch.Tensor) -> Any:
        return function(x * torch.ones((), requires_grad=True))

    def call(function: Call, x: torch.Tensor) -> Any:
        return native(function, x * torch.ones((), requires_grad=True), use_reentrant=True)

    _same(Net, call, usual=usual)


def case_a_region_over_all_partitions() -> None:
    _same(Stack, functools.partial(native, use_reentrant=False))


def case_native_sequential() -> None:
    def call(layers: nn.Sequential, x: torch.Tensor) -> Any:
        return native_sequential(layers, LAYERS, x, use_reentrant=False)

    _same(Stack, call)


def _sequential(strategy: str) -> None:
    _same(Stack, functools.partial(checkpoint_sequential, strategy=strategy))


def _marked(strategy: str) -> None:
    def mark(module: Any) -> None:
        smp.set_activation_checkpointing(module.layers, strategy=strategy)

    _same(Stack, plain, prepare=mark)


def case_documented_forms() -> None:
    _same(Net, checkpoint)
    _sequential("group_3")


def case_strategies_of_the_other_form() -> None:
    for strategy in ("each", "contiguous"):
        _sequential(strategy)
    _marked("group_3")


def case_marked_modules() -> None:
    for strategy in ("each", "contiguous"):
        _marked(strategy)

    def mark_list(module: Any) -> None:
        smp.set_activation_checkpointing(module.layers, strategy="contiguous")

    class List(Stack):
        def __init__(self, call: Call) -> None:
            super().__init__(call)
            self.layers: Any = nn.ModuleList(self.layers)

        def forward(self, x: torch.Tensor) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    _same(List, plain, prepare=mark_list)
    with pytest.raises(ValueError, match="leave them out"):
        smp.set_activation_checkpointing(nn.Linear(1, 1), strategy="contiguous")


def case_transformers() -> None:
    hf = importlib.import_module("transformers")
    sizes = {"vocab_size": 31, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32}
    module = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, use_cache=False))
    module.train()
    model = smp.DistributedModel(module)
    runs = []
    for checkpointing in (None, False, True):
        if checkpointing is not None:
            module.gradient_checkpointing_enable({"use_reentrant": checkpointing})

        @smp.step
        def step(model: Any, tokens: torch.Tensor) -> torch.Tensor:
            loss = model(input_ids=tokens, labels=tokens).loss
            model.backward(loss)
            return loss

        torch.manual_seed(3)
        model.zero_grad()
        loss = step(model, torch.randint(31, (8, 12)))
        assert_is_split(model)
        gradients = {name: p.grad for name, p in model.local_named_parameters()}
        runs.append(([each.item() for each in loss.outputs], gradients))
    for losses, found in runs[1:]:
        assert losses == runs[0][0]
        for name, gradient in runs[0][1].items():
            torch.testing.assert_close(gradient, found[name], msg=name)


def cases() -> dict[str, Callable[[], Any]]:
    return {
        name.removeprefix("case_"): case
        for name, case in globals().items()
        if name.startswith("case_")
    }
