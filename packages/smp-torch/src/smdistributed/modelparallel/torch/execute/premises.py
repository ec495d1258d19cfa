"""What captured passes rely on: everything that the Python in them would look at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.backward import (
    hooks_after_accumulation,
    hooks_on_gradient,
)
from smdistributed.modelparallel.torch.execute.functions_of_torch import FunctionsOfTorch
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
        code: what else runs in the passes, or is given to modules: functions, classes, objects.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        attributes: Sequence[tuple[nn.Module, str]],
        device: torch.device,
        code: Iterable[Any] = (),
    ) -> None:
        self._device = device
        self._attributes = attributes
        self._modules = list(dict.fromkeys(inner for each in modules for inner in each.modules()))
        hooks = [hook for hooks in _HOOKS_OF_ALL for hook in hooks.values()]
        for parameter in (each for module in self._modules for each in module.parameters(False)):
            hooks += hooks_on_gradient(parameter)
        self._functions = FunctionsOfTorch(self._modules)
        self._seen = Snapshot(self._modules, [*hooks, *code, *self._functions.of_others])
        self._tensors = {id(each): each for each in self._seen.tensors()}
        self._ordered = self._seen.ordered()
        self._before = self._read()

    def check_all_are_seen(self) -> None:
        """Refuses what cannot be compared.

        Raises:
            UnsupportedError: there is some.
        """
        if self._seen.sees_any_module:
            raise UnsupportedError("code reaches modules of Python by names that it makes up")

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
            ("a function of PyTorch", self._functions.are_current()),
            ("a hook of all modules", [tuple(each.values()) for each in _HOOKS_OF_ALL]),
            ("the order of a dict", list(map(list, self._ordered))),
            ("the class of a module", [type(each) for each in self._modules]),
            (
                "a hook of a module's backward pass",
                [
                    (*each._backward_pre_hooks.values(), *each._backward_hooks.values())
                    for each in self._modules
                ],
            ),
            ("an attribute of the model", [(id(each), _place(each)) for each in read]),
            ("the memory or a hook of a tensor", [_place(each) for each in self._tensors.values()]),
        ]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns where a tensor is, and what becomes of its gradient."""
    is_strided = tensor.layout is torch.strided
    return (
        (tensor.data_ptr(), tensor.stride()) if is_strided else (),
        (tensor.shape, tensor.dtype, tensor.is_conj(), tensor.is_neg()),
        tensor.requires_grad,
        hooks_on_gradient(tensor),
        hooks_after_accumulation(tensor),
    )
