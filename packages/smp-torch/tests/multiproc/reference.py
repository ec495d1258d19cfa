"""The numbers of one process, and how a distributed run is held against them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.compat.private.below import operated_by

Body = Callable[..., Any]
Batch = Sequence[torch.Tensor]

MICROBATCHES = 4
LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5


class Plain:
    """A module with what scripts use of a DistributedModel."""

    training = True

    def __init__(self, module: nn.Module, weight: float) -> None:
        self.module = module
        self.weight = weight
        self.parameters = module.parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        if isinstance(tensors, torch.Tensor):
            tensors, grad_tensors = [tensors], [grad_tensors]
        weighted = [tensor * self.weight for tensor in tensors]
        torch.autograd.backward(weighted, grad_tensors)


def split(batch: Batch, axes: Sequence[int | None]) -> tuple[list[list[torch.Tensor]], list[float]]:
    """Returns the microbatches of a batch and the share of it that each one holds."""
    parts = [
        [tensor] * MICROBATCHES if axis is None else tensor.tensor_split(MICROBATCHES, axis)
        for tensor, axis in zip(batch, axes, strict=True)
    ]
    first = next(position for position, axis in enumerate(axes) if axis is not None)
    sizes = [part.shape[axes[first] or 0] for part in parts[first]]
    return [list(one) for one in zip(*parts, strict=True)], [size / sum(sizes) for size in sizes]


def own_share(batch: Batch, axes: Sequence[int | None]) -> list[torch.Tensor]:
    """Returns the part of a global batch that belongs to this data-parallel rank."""
    return [
        tensor if axis is None else tensor.chunk(smp.dp_size(), axis)[smp.dp_rank()]
        for tensor, axis in zip(batch, axes, strict=True)
    ]


def run_plain(
    reference: nn.Module, body: Body, batch: Batch, axes: Sequence[int | None] | None = None
) -> list[Any]:
    """Runs the global batch on one process; returns the results of this rank's microbatches."""
    axes = axes or [0] * len(batch)
    own = []
    for dp_rank in range(smp.dp_size()):
        share = [
            tensor if axis is None else tensor.chunk(smp.dp_size(), axis)[dp_rank]
            for tensor, axis in zip(batch, axes, strict=True)
        ]
        microbatches, weights = split(share, axes)
        results = [
            body(Plain(reference, weight / smp.dp_size()), *microbatch)
            for microbatch, weight in zip(microbatches, weights, strict=True)
        ]
        if dp_rank == smp.dp_rank():
            own = results
    return own


def empty(batch: Batch) -> list[torch.Tensor]:
    """Returns what a rank without data passes: tensors [B, 0]."""
    return [torch.empty(len(tensor), 0) for tensor in batch]


def assert_same_results(got: Any, expected: Sequence[Any]) -> None:
    """``got`` holds StepOutputs where each of ``expected`` holds tensors."""
    outputs = pytree.tree_leaves(got)
    leaves = [pytree.tree_leaves(one) for one in expected]
    assert len(outputs) == len(leaves[0]) > 0
    for position, output in enumerate(outputs):
        assert isinstance(output, smp.StepOutput)
        assert len(output.outputs) == len(expected)
        for microbatch, tensor in enumerate(output.outputs):
            want = leaves[microbatch][position].detach()
            assert tensor.shape == want.shape
            assert not tensor.requires_grad
            difference = (tensor - want).abs().max().item()
            assert difference <= LOSS_TOLERANCE, (position, microbatch, difference)


def assert_same_gradients(model: smp.DistributedModel, reference: nn.Module) -> None:
    """Each gradient, on the rank that has it; every parameter is on exactly one rank."""
    expected = dict(reference.named_parameters(remove_duplicate=False))
    own = dict(model.local_named_parameters())
    # Before any assertion, so that a failure on one rank leaves the others in step.
    everywhere = [name for part in smp.allgather(list(own), smp.PP_GROUP) for name in part]
    for name, parameter in own.items():
        assert_close(parameter.grad, expected[name].grad, name)
    assert sorted(everywhere) == sorted(name for name, _ in reference.named_parameters())


def assert_close(got: torch.Tensor | None, want: torch.Tensor | None, name: str) -> None:
    if want is None or not want.any():
        assert got is None or not got.any(), f"{name} has a gradient; expected none"
        return
    assert got is not None, f"{name} has no gradient"
    difference, largest = (got - want).abs().max().item(), want.abs().max().item()
    assert difference <= GRADIENT_TOLERANCE * largest, (name, difference, largest)


def assert_is_split(model: smp.DistributedModel) -> None:
    """Every rank computes something, else a comparison proves nothing, and keeps its own only."""
    if smp.pp_size() > 1:
        placement = model.holder.placement
        partitions = {placement.partition_of[module] for module in placement.leaves}
        assert partitions == set(range(smp.pp_size())), model.holder.partition_by_name()
        own = {id(parameter) for parameter in model.local_parameters()}
        others = [each for each in model.parameters() if id(each) not in own]
        assert others
        assert all(map(operated_by, others))  # which tells of what has no memory


def compare(
    build: Callable[[], nn.Module],
    body: Body,
    batches: Sequence[Batch],
    *,
    axes: Sequence[int | None] | None = None,
    options: Mapping[str, Any] | None = None,
    prepare: Callable[[nn.Module], object] = lambda module: None,
) -> smp.DistributedModel:
    """Runs batches on both sides, gradients cleared before each, and compares everything.

    Args:
        build: makes the module; called once, on every rank with the same seed.
        body: of the step function: (model, *tensors) -> tensors.
        batches: global batches; ranks with pp_rank > 0 pass empty tensors instead where all axes
            are 0.
        axes: batch axis of each tensor; None where it is not split.
        options: of ``smp.step``.
        prepare: does to each of the two models what a script does before a step.
    """
    torch.manual_seed(1)
    module = build()
    reference = copy.deepcopy(module)
    model = smp.DistributedModel(module)
    step = smp.step(**(options or {}))(body)
    for batch in batches:
        every_axis = axes or [0] * len(batch)
        prepare(model)
        prepare(reference)
        model.zero_grad()
        reference.zero_grad()
        expected = run_plain(reference, body, batch, every_axis)
        share = own_share(batch, every_axis)
        got = step(model, *(share if smp.pp_rank() == 0 or axes else empty(share)))
        assert_same_results(got, expected)
        assert_same_gradients(model, reference)
        for name, buffer in model.local_named_buffers():
            if smp.dp_size() == 1 and name in reference.state_dict():
                torch.testing.assert_close(buffer, reference.state_dict()[name])
    assert_is_split(model)
    return model
