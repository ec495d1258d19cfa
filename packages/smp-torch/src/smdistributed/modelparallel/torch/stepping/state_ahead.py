"""What modules keep, while microbatches are computed ahead of a step.

In one process a microbatch finds what the one before it has left: a spectral norm its vectors, a
codebook its averages, a counter its number. So does each computation ahead of the step: it finds
what the last one has left. After it everything is what it was before the step, which computes all
of it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.planning.segments import SegmentNodes
from smdistributed.modelparallel.torch.record.ir import NodeKind, changed_attributes
from smdistributed.modelparallel.torch.record.questions.ahead import depends_on_values
from smdistributed.modelparallel.torch.state import holders
from smdistributed.modelparallel.torch.state.snapshot import Difference, Snapshot
from smdistributed.modelparallel.torch.tensors.contents import contents_kept
from smdistributed.modelparallel.torch.trial.turns import keeps_state

#: A table of parameters or buffers, and a name in it.
Place = tuple[dict[str, Any], str]


class StateAhead:
    """What computations ahead of a step have left in modules."""

    def __init__(self) -> None:
        #: By identity, tensors of modules, and what is left in them.
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        #: Other things that can be changed, with what was in them before the step and what is left.
        self._others: dict[tuple[int, Callable[..., Any]], Difference] = {}

    @contextlib.contextmanager
    def found(self, nodes: SegmentNodes, where: str) -> Iterator[dict[int, torch.Tensor]]:
        """Inside, nodes find what is left. What they leave is kept, and all is put back.

        Args:
            nodes: that are computed.
            where: who asks, for messages.

        Yields:
            the parameters and buffers that they may write to, by identity.

        Raises:
            UnsupportedError: a module changes state that cannot be put back.
        """
        stateful = _stateful(nodes)
        keeping = [each for each, names in stateful.items() if keeps_state({each: names})]
        with self._others_found():
            written = {
                id(tensor): tensor
                for module, names in stateful.items()
                for name in names
                if (tensor := module._buffers.get(name, module._parameters.get(name))) is not None
            }
            with self._tensors_found(nodes, written), contextlib.ExitStack() as stack:
                if keeping:
                    snapshot = Snapshot(keeping, moved=written)
                    stack.enter_context(self._others_kept(snapshot, where))
                yield written

    @contextlib.contextmanager
    def _tensors_found(
        self, nodes: SegmentNodes, written: dict[int, torch.Tensor]
    ) -> Iterator[None]:
        """Inside, tensors of modules are as they were left; what is left then is kept."""
        read = (table[name] for table, name in places_of(nodes))
        left = [each for each in read if id(each) in self._tensors]
        before = [
            (tensor, tensor.detach().clone())
            for tensor in {**written, **{id(each): each for each in left}}.values()
        ]
        for tensor in left:
            tensor.detach().copy_(self._tensors[id(tensor)][1])
        try:
            yield
            kept = {key: (each, each.detach().clone()) for key, each in written.items()}
            self._tensors.update(kept)
        finally:
            for tensor, former in before:
                tensor.detach().copy_(former)

    @contextlib.contextmanager
    def _others_found(self) -> Iterator[None]:
        """Inside, everything else is as it was left."""
        try:
            for holder, now in self._others.values():
                _fill(holder, now)
            yield
        finally:
            for holder, _ in reversed(self._others.values()):
                _fill(holder, holder.before)

    @contextlib.contextmanager
    def _others_kept(self, before: Snapshot, where: str) -> Iterator[None]:
        """Keeps what has changed then since a snapshot, and puts it back."""
        try:
            doing = f"{where}: what comes before writes to a tensor of layout {{}}"
            with contents_kept(before.tensors(), doing):
                yield
        finally:
            before.note_changes()
            for holder, _ in reversed(before.noted):
                _fill(holder, holder.before)
        for holder, now in before.noted:
            if holder.put_back is None or holder.read is holders.TENSOR.read:
                raise depends_on_values(
                    where,
                    f"a module keeps state in {holder.path}, which each microbatch moves on, and "
                    "which is neither a buffer nor can be put back",
                )
            key = id(holder.obj), holder.read
            first = self._others[key].holder if key in self._others else holder
            self._others[key] = Difference(first, now)


def _fill(holder: holders.Holder, contents: Any) -> None:
    if holder.put_back is not None:
        holder.put_back(holder.obj, contents)


def _stateful(nodes: SegmentNodes) -> dict[nn.Module, set[str]]:
    """Returns the modules that nodes change, and the names of what they change."""
    found: dict[nn.Module, set[str]] = {}
    for node in nodes.nodes:
        for module, names in node.stateful.items():
            found.setdefault(module, set()).update(names)
        for value in changed_attributes(node):
            module, name = value.node.target
            found.setdefault(module, set()).add(name)
    return found


def places_of(nodes: SegmentNodes) -> Iterator[Place]:
    """Yields where nodes have parameters and buffers."""
    for node in nodes.nodes:
        if node.kind is NodeKind.LEAF:
            for module in node.modules:
                for table in (module._parameters, module._buffers):
                    yield from ((table, name) for name in table)
        elif node.kind is NodeKind.ATTRIBUTE:
            module, name = node.target
            yield module._parameters if name in module._parameters else module._buffers, name
