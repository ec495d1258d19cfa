"""What captured passes rely on: everything that the Python in them would look at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from smdistributed.modelparallel.torch.compat.private.backward import (
    hooks_after_accumulation,
    hooks_on_gradient,
)
from smdistributed.modelparallel.torch.record.switches import positions
from smdistributed.modelparallel.torch.record.undo import Snapshot

_HOOKS_OF_ALL: list[dict[int, Any]] = [
    module_hooks._global_forward_pre_hooks,
    module_hooks._global_forward_hooks,
    module_hooks._global_backward_pre_hooks,
    module_hooks._global_backward_hooks,
]


class Premises:
    """What modules see in Python, where their tensors lie, and what holds around the passes.

    Args:
        modules: that are called.
        attributes: tensors that are read of others, as the module and a name in it.
        device: where it is computed: the numbers in tensors there are read anew.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        attributes: Sequence[tuple[nn.Module, str]],
        device: torch.device,
    ) -> None:
        self._device = device
        self._attributes = attributes
        self._seen = Snapshot(inner for each in modules for inner in each.modules())
        self._tensors = {id(each): each for each in self._seen.tensors()}
        self._before = self._read()

    def broken_by(self) -> str:
        """Returns what is another now; "" if everything is as it was."""
        if path := self._seen.first_other(self._device):
            return f"{path} has changed"
        for (what, before), (_, now) in zip(self._before, self._read(), strict=True):
            if before != now:
                return f"{what} has changed"
        return ""

    def put_back(self) -> None:
        """Puts back what has changed in Python, before the passes run again.

        Raises:
            UnsupportedError: that cannot be done.
        """
        for growth in self._seen.put_back_all(self._device):
            growth.remove()

    def _read(self) -> list[tuple[str, Any]]:
        read = [getattr(module, name) for module, name in self._attributes]
        return [
            ("a switch of PyTorch", (positions(), torch.get_default_dtype())),
            (
                "whether algorithms are deterministic",
                torch.are_deterministic_algorithms_enabled(),
            ),
            ("a hook of all modules", [tuple(each.values()) for each in _HOOKS_OF_ALL]),
            ("an attribute of the model", [(id(each), _place(each)) for each in read]),
            ("the memory or a hook of a tensor", [_place(each) for each in self._tensors.values()]),
        ]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns where a tensor is, and what becomes of its gradient."""
    return (
        tensor.data_ptr() if tensor.layout is torch.strided else 0,
        tensor.requires_grad,
        hooks_on_gradient(tensor),
        hooks_after_accumulation(tensor),
    )
