"""Remembering what a leaf returned on fakes, so that recording again is quick.

When Python state has changed, the step is recorded again: the glue is what may differ, while the
leaves, which cost nearly all of a recording, return tensors of the same kinds as before. A leaf is
remembered if it had no effect but its result; it is run again when its arguments, or the Python
state that its own code read, are others.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private import FakeTensorMode
from smdistributed.modelparallel.torch.record.nested import equal, fill, template
from smdistributed.modelparallel.torch.record.python_state import StateWatch


class _Kind(NamedTuple):
    """What a leaf can see of a tensor while it runs on fakes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_parameter: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> _Kind:
        return _Kind(
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            isinstance(tensor, nn.Parameter),
        )

    def make(self, mode: FakeTensorMode) -> torch.Tensor:
        with mode:
            tensor = torch.empty_strided(
                self.shape, self.stride, dtype=self.dtype, device=self.device
            )
            # The result of a computation, not a leaf of autograd.
            return tensor.requires_grad_().clone() if self.requires_grad else tensor


@dataclass
class LeafCall:
    """One remembered call.

    Attributes:
        arguments: template of its arguments, with kinds for tensors.
        state: grad mode and the like.
        result: template of what it returned.
        watch: the Python state that it read.
        flops: that it cost.
        draws: random draws that it made.
    """

    arguments: Any
    state: tuple[object, ...]
    result: Any
    watch: StateWatch
    flops: int
    draws: int


class LeafMemory:
    """The remembered calls of leaves."""

    def __init__(self) -> None:
        self._calls: dict[nn.Module, list[LeafCall]] = defaultdict(list)
        self._forgotten: set[nn.Module] = set()

    def forget(self, module: nn.Module) -> None:
        """Never remembers a leaf: it has effects that a remembered call would not have."""
        self._forgotten.add(module)
        self._calls.pop(module, None)

    @staticmethod
    def key(args: Any, kwargs: Any) -> Any:
        """Returns what decides whether two calls are alike."""
        return template((tuple(args), dict(kwargs)), _Kind.of, lambda obj: obj)

    def find(self, module: nn.Module, arguments: Any, state: tuple[object, ...]) -> LeafCall | None:
        """Returns a remembered call that still holds."""
        calls = self._calls[module]
        for call in list(calls):
            if call.state == state and equal(call.arguments, arguments, _same):
                if call.watch.changed() is None:
                    return call
                calls.remove(call)
        return None

    def add(
        self,
        module: nn.Module,
        arguments: Any,
        state: tuple[object, ...],
        result: Any,
        watch: StateWatch,
        flops: int,
        draws: int,
    ) -> None:
        """Remembers a call; ``result`` with its fakes."""
        if module in self._forgotten:
            return
        kept = template(result, _Kind.of, lambda obj: obj)
        self._calls[module].append(LeafCall(arguments, state, kept, watch, flops, draws))

    @staticmethod
    def result(call: LeafCall, mode: FakeTensorMode) -> Any:
        """Returns the result of a remembered call, on new fakes."""
        return fill(call.result, _Kind, lambda kind: kind.make(mode))


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) if isinstance(one, _Kind) else one is other
