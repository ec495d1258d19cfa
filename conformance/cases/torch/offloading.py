"""PyTorch: activations in host memory, and how far ahead of their use they come back."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from conformance.cases.common.configuration import start
from conformance.registry import torch_case

LAYERS = 6
WIDTH = 8
MICROBATCHES = 2
BYTES = WIDTH * 4


def _made(smp: Any, checkpointed: bool = True) -> tuple[Any, Any]:
    """Returns a model whose layers change what they were given, and a step that trains it."""
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            return torch.tanh(self.linear(x)) + x

    torch.manual_seed(0)
    layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), layers)
    if checkpointed:
        smp.set_activation_checkpointing(module[1])
    model = smp.DistributedModel(module)

    @smp.step
    def train(model: Any, x: Any) -> Any:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    return model, train


def _batch(adapter: Any) -> Any:
    rows = [[0.1 * (i + j) - 0.4 for i in range(WIDTH)] for j in range(MICROBATCHES)]
    return adapter.tensor(rows).float()


def _offloading(adapter: Any, **parameters: Any) -> Any:
    start(adapter, microbatches=MICROBATCHES, offload_activations=True, **parameters)
    return adapter.smp


@torch_case("config.offload_activations", worlds=("new",))
def offloaded_activations_leave_the_device_and_the_numbers_alone(adapter: Any) -> None:
    import torch

    model, train = _made(_offloading(adapter, activation_loading_horizon=1))
    for _ in range(2):
        model.zero_grad()
        outputs = train(model, _batch(adapter)).outputs
    memory = train.activation_memory()
    assert memory.peak_host_bytes == (LAYERS - 1) * BYTES
    assert memory.peak_device_bytes == 2 * BYTES
    assert memory.num_late == 0
    # The same modules, without checkpointing, in one process.
    found = [each.grad.clone() for each in model.parameters()]
    module = model.get_module()
    module.zero_grad()
    for layer in module[1]:
        vars(layer).pop("forward", None)
    vars(module[1]).pop("forward", None)
    losses = [module(each).square().mean() for each in _batch(adapter).chunk(MICROBATCHES)]
    torch.stack(losses).mean().backward()
    for one, other in zip(outputs, losses, strict=True):
        torch.testing.assert_close(one, other.detach())
    for one, each in zip(found, module.parameters(), strict=True):
        torch.testing.assert_close(one, each.grad)


@torch_case("config.activation_loading_horizon", worlds=("new",))
def the_horizon_says_how_many_activations_are_back_before_their_use(adapter: Any) -> None:
    model, train = _made(_offloading(adapter, activation_loading_horizon=3))
    for _ in range(2):
        train(model, _batch(adapter))
        assert train.activation_memory().peak_device_bytes == 4 * BYTES


@torch_case("config.activation_loading_horizon", worlds=("new",))
def by_default_four_activations_are_back_before_their_use(adapter: Any) -> None:
    model, train = _made(_offloading(adapter))
    train(model, _batch(adapter))
    assert train.activation_memory().peak_device_bytes == 5 * BYTES


@torch_case("config.C09", worlds=("new",))
def offloading_without_checkpointing_is_warned_of_once(adapter: Any) -> None:
    model, train = _made(_offloading(adapter), checkpointed=False)
    with pytest.warns(UserWarning, match="offload_activations has an effect only on"):
        train(model, _batch(adapter))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, _batch(adapter))
    assert train.activation_memory().stored_bytes == 0
