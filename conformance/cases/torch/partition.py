"""PyTorch: which rank has what, and how it was decided."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from conformance.adapters.base import WIDTH
from conformance.cases.torch.model import trained, wanted_gradients
from conformance.cases.torch.state import names_of
from conformance.registry import torch_case


@torch_case("smp.partition", "config.C06", "config.auto_partition", worlds=("manual",))
def contexts_decide_the_partition(adapter: Any) -> None:
    from torch import nn

    smp = adapter.smp
    with smp.partition(0):
        first = nn.Linear(WIDTH, WIDTH)
        with smp.partition(1):
            second = nn.Linear(WIDTH, WIDTH)
        third = nn.Linear(WIDTH, WIDTH)
    rest = nn.Linear(WIDTH, WIDTH)
    model = smp.DistributedModel(nn.Sequential(first, second, third, rest))
    trained(adapter, model)
    names = names_of(adapter, model, "parameters")
    assert [{name[0] for name in own} for own in names] == [{"0", "2"}, {"1", "3"}]
    for index in (-1, 2):
        with pytest.raises(ValueError, match=r"0|1"), smp.partition(index):
            pass


@torch_case("smp.partition", "config.C06", worlds=("pipeline",))
def contexts_are_ignored_where_the_library_decides(adapter: Any) -> None:
    with adapter.smp.partition(7):
        model = adapter.model()
    trained(adapter, model)
    assert all(names_of(adapter, model, "parameters"))


@torch_case(
    "torch.in_use.smp_set_partition", "compat.set_partition_after_wrapping", worlds=("manual",)
)
def set_partition_moves_modules_of_a_finished_model(adapter: Any) -> None:
    model = adapter.model()
    adapter.smp.set_partition(model.get_module().layers[2], 0)
    trained(adapter, model)
    names = names_of(adapter, model, "parameters")
    assert names[0] == ["layers.2.weight", "layers.2.bias"]
    with pytest.raises((RuntimeError, ValueError), match="partition"):
        adapter.smp.set_partition(model.get_module().layers[1], 0)
    other = adapter.model().get_module().layers[0]
    for index in (-1, 2):
        with pytest.raises(ValueError, match=r"0|1"):
            adapter.smp.set_partition(other, index)


@torch_case("torch.manual_shared", worlds=("manual",))
def shared_parameters_stay_together(adapter: Any) -> None:
    model = adapter.model()
    layers = model.get_module().layers
    layers[0].weight = layers[3].weight
    adapter.smp.set_partition(layers[0], 0)
    with pytest.raises(ValueError, match=r"layers\.[03]"):
        trained(adapter, model)


@torch_case("torch.revisits", worlds=("manual",))
def a_microbatch_may_come_back_to_a_rank(adapter: Any) -> None:
    import torch

    model = adapter.model()
    for index in (0, 3):
        adapter.smp.set_partition(model.get_module().layers[index], 0)
    trained(adapter, model)
    wanted, _ = wanted_gradients(adapter)
    assert names_of(adapter, model, "parameters")[0][0] == "layers.0.weight"
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name])


@torch_case("torch.gradients", "torch.revisits", worlds=("manual",))
def shared_values_gather_their_gradients(adapter: Any) -> None:
    """What several partitions read has the sum of their gradients."""
    import torch
    from torch import nn

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Any) -> Any:
            first = self.layers[0](x)
            second = torch.tanh(self.layers[1](first))
            third = torch.tanh(self.layers[2](second + first))
            return self.layers[3](third + first + second)

    net, plain = Skipping(), Skipping()
    model = adapter.smp.DistributedModel(net)
    for index in (0, 2):
        adapter.smp.set_partition(model.get_module().layers[index], 0)
    trained(adapter, model)
    plain(torch.from_numpy(adapter.batch(8))).square().mean().backward()
    wanted = {name: each.grad for name, each in plain.named_parameters()}
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad.cpu(), wanted[name])


@contextmanager
def log_of() -> Iterator[io.StringIO]:
    """Gives what the library says meanwhile."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("smdistributed.modelparallel")
    former = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        logger.removeHandler(handler)
        logger.setLevel(former)


@torch_case("torch.partition_tree", worlds=("pipeline",))
def the_partition_is_balanced_and_logged(adapter: Any) -> None:
    with log_of() as log:
        model, _ = trained(adapter)
    assert [len(names) for names in names_of(adapter, model, "parameters")] == [4, 4]
    if adapter.smp.rank() == 0:
        _, _, assignments = log.getvalue().partition("Partition assignments:")
        for name in ("layers.[0-1]", "layers.[2-3]"):
            assert name in assignments
