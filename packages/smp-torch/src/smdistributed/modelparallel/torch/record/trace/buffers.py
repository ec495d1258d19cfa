"""Buffers of split modules that code between modules changes: counters, averages, codebooks.

Such a buffer is on every rank. A microbatch whose code changes it, in place or by an assignment,
reads a copy of it on one rank, which takes the place of the buffer for all that the microbatch
computes: the backward pass sees what its own forward pass saw. Where the last change is made, the
rank keeps the result for the next microbatch, and when the step is over all ranks keep it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor
from smdistributed.modelparallel.torch.record.fakes import Slot
from smdistributed.modelparallel.torch.record.ir import (
    ChangedBuffer,
    Graph,
    Node,
    NodeKind,
    Value,
    changed_attributes,
)
from smdistributed.modelparallel.torch.record.scene import Scene
from smdistributed.modelparallel.torch.record.trace.values import Values


class OwnBuffer(NamedTuple):
    """A buffer of a split module, or of one that may turn out to be split.

    Attributes:
        module, name: where it is.
        fake: that stands there at the start of a microbatch.
    """

    module: nn.Module
    name: str
    fake: torch.Tensor


def own_buffers(scene: Scene) -> dict[str, OwnBuffer]:
    """Returns the buffers of modules that are not whole, by names that all ranks know."""
    return {
        f"{model.draw_name(module)}.{name}": OwnBuffer(module, name, fake)
        for model in scene.models
        for (module, name), fake in model.slots.items()
        if name in module._buffers and module not in scene.leaf_of
    }


def take_assigned(buffers: Mapping[str, OwnBuffer]) -> dict[str, torch.Tensor | None]:
    """Returns what code has assigned to buffers in a microbatch, and puts their fakes back."""
    found = {}
    for key, (module, name, fake) in buffers.items():
        now = module._buffers.get(name)
        if now is not fake:
            found[key] = now
            module._buffers[name] = fake
    return found


def changed_in(
    graph: Graph, buffers: Mapping[str, OwnBuffer], assigned: Mapping[str, torch.Tensor | None]
) -> dict[str, torch.Tensor | None]:
    """Returns the tensors that stand in the end for buffers which a microbatch has changed.

    Args:
        graph: of the microbatch.
        buffers: of split modules.
        assigned: what it has assigned to them.

    Raises:
        UnsupportedError: a checkpointed call changes one.
    """
    written: set[tuple[nn.Module, str]] = set()
    for node in graph.nodes:
        slots = {value.node.target for value in changed_attributes(node)}
        written |= slots
        if node.region is not None and any(name in module._buffers for module, name in slots):
            raise _checkpointed(node.name)
    return {
        key: assigned.get(key, each.fake)
        for key, each in buffers.items()
        if key in assigned or (each.module, each.name) in written
    }


def keep_changed(
    values: Values,
    known: Values,
    buffers: Mapping[str, OwnBuffer],
    changed: Mapping[str, torch.Tensor | None],
) -> None:
    """Writes into the graph of a microbatch that it keeps what it has made of buffers.

    Args:
        values: of the graph, in which these buffers are on one rank.
        known: of the same microbatch, with buffers on all ranks.
        buffers: of split modules.
        changed: the tensors that stand for those that it has changed.

    Raises:
        UnsupportedError: a buffer would be kept that is no longer like it was.
    """
    graph = values.graph
    for key, tensor in changed.items():
        module, name, fake = buffers[key]
        title = key.partition(":")[2].lstrip(".")
        if not isinstance(tensor, torch.Tensor):
            raise _refused(title, "something else than a tensor")
        value, before = values.of(tensor), values.first_spec(fake)
        form = value.shape, value.dtype
        if form != (before.shape, before.dtype):
            raise _refused(title, f"a tensor of {form[1]} and shape {form[0]}")
        if value.requires_grad:
            raise _refused(title, "a tensor that requires a gradient")
        if value.node.region is not None:
            raise _checkpointed(f"an assignment to {title}")
        replicated = known.of(tensor if isinstance(tensor, FakeTensor) else fake)
        graph.buffers[module, name] = ChangedBuffer(
            value, replicated if replicated.replicated else None
        )
        _add_keeping(graph, (module, name), title)


def keep_on(graph: Graph, slot: Slot, title: str, rank: int) -> None:
    """Has a microbatch read a buffer on one rank, where others of its step change it.

    Args:
        graph: of the microbatch, which may change it, too.
        slot: of the buffer.
        title: its name.
        rank: the rank.
    """
    if slot in graph.buffers:
        graph.buffers[slot] = graph.buffers[slot]._replace(rank=rank)
        return
    for node in graph.nodes:
        is_it = node.kind is NodeKind.ATTRIBUTE and node.target == slot
        if is_it:
            graph.buffers[slot] = ChangedBuffer(node.outputs[0], None, rank, is_same=True)
        if is_it or (node.replicated and not all(value.replicated for value in node.inputs)):
            node.replicated = False
            for value in node.outputs:
                value.replicated = False
    if slot in graph.buffers:
        _add_keeping(graph, slot, title)


def _add_keeping(graph: Graph, slot: Slot, title: str) -> None:
    """Adds a call that keeps what a microbatch has made of a buffer."""
    value = graph.buffers[slot].value
    node = Node(0, NodeKind.CALL, KeptBuffer(*slot), f"{title} is kept", (value,))
    node.grad_enabled = False
    graph.nodes.insert(_place_behind(graph, value), node)
    graph.number()
    graph.kept = list(dict.fromkeys((*graph.kept, value)))


def _place_behind(graph: Graph, value: Value) -> int:
    """Returns the position behind the last node that makes a value, or writes to it."""
    return 1 + max(
        position
        for position, node in enumerate(graph.nodes)
        if node is value.node or value in node.changes or value in node.aliases
    )


def _checkpointed(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} changes a buffer in a checkpointed call that is split over partitions, which "
        "would change it again when it is computed again. Change it outside the checkpointed "
        "call, or put the module on one partition."
    )


def _refused(title: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{title}, a buffer of a module that is split over partitions, becomes {what} while a "
        "pipelined step runs; a buffer keeps its shape and type, and has no gradient there. Use "
        "detach(), or an attribute that is no buffer, or put the module on one partition."
    )


@dataclass(frozen=True)
class KeptBuffer:
    """Keeps a tensor in the place of a buffer."""

    module: nn.Module
    name: str

    def __call__(self, tensor: torch.Tensor) -> None:
        """Copies it there."""
        buffer = self.module._buffers[self.name]
        assert buffer is not None
        buffer.detach().copy_(tensor)
