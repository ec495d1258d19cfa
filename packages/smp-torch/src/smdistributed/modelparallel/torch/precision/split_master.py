"""Masters in fp32 of which the parameters of the model are one half.

A parameter in bf16 is the upper 16 bits of its master, rounded to the nearest. So a master keeps
the lower 16 bits alone, as a signed difference: 2 bytes a number in place of 4, which are 6.2 GiB
of a model of 6.7 billion parameters over two GPUs. With 0x3F80 in bf16, which is 1.0, and a rest of
-3 the master is 0x3F7FFFFD, which is 0.99999982.

The kernel of ``one_pass_adam`` reads and writes both parts. Anybody else who uses such a master, as
a script that asks for its norm, finds an ordinary tensor: it becomes whole at once, and is split
again by the next update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private.below import without_memory
from smdistributed.modelparallel.torch.compat.private.modes import past_subclass_functions
from smdistributed.modelparallel.torch.parts.at_rest import ABOUT_PARTS
from smdistributed.modelparallel.torch.tensors.nested import tensors_in

_GRAD: Any = torch.Tensor.grad
_ASKS_NO_VALUES = ABOUT_PARTS | {_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__}
#: The largest difference there is room for. A number halfway between two of bf16 may be one more,
#: and becomes the one before it in fp32.
_LARGEST = (1 << 15) - 1


class SplitMaster(nn.Parameter):
    """See the module.

    Attributes:
        upper: what it is a master of, in bf16, contiguous.
        rest: what lacks, flat, in 16 bits; None while it is whole.
    """

    upper: torch.Tensor
    rest: torch.Tensor | None

    @classmethod
    def of(cls, source: torch.Tensor) -> SplitMaster:
        """Returns a master that is exactly what it is a master of."""
        made: Any = nn.Parameter(torch.empty(0, dtype=torch.float32, device=source.device))
        made.data = _vacant(source)
        made.__class__ = cls
        made.upper = source
        made.rest = torch.zeros(source.numel(), dtype=torch.int16, device=source.device)
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch that got one."""
        kwargs = kwargs or {}
        if func is torch.zeros_like and not kwargs.keys() - {"memory_format"}:
            (like,) = args  # the moments of an optimizer
            return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        if func not in _ASKS_NO_VALUES:
            _make_whole((args, kwargs))
        with past_subclass_functions():
            return func(*args, **kwargs)

    @classmethod
    def operate(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation that came past ``__torch_function__``; see ``compat.private.below``."""
        _make_whole((args, kwargs))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        """Returns a parameter as any other."""
        if id(self) not in memo:
            memo[id(self)] = self._copied()
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Is written as such a parameter."""
        return self._copied().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _copied(self) -> nn.Parameter:
        return nn.Parameter(values_of(self).clone(), self.requires_grad)


def follow(master: SplitMaster) -> None:
    """Has a master become what it is a master of, which somebody has written to."""
    if master.rest is not None:
        master.rest.zero_()
    else:
        master.copy_(master.upper)


def split(master: SplitMaster) -> None:
    """Has a master keep the rest alone, when its numbers have been written to the upper halves."""
    if master.rest is None:
        with past_subclass_functions(), torch.no_grad():
            master.rest = rest_of(master.upper, master.data)
            master.data = _vacant(master.upper)


def is_split(master: torch.Tensor) -> bool:
    """Whether a master has no memory of its own but for the rest."""
    return isinstance(master, SplitMaster) and master.rest is not None


def values_of(master: torch.Tensor) -> torch.Tensor:
    """Returns the numbers of a master, which stays as it is."""
    if isinstance(master, SplitMaster) and master.rest is not None:
        return merged(master.upper, master.rest)
    return master.detach()


def merged(upper: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Returns numbers in fp32.

    Args:
        upper: in bf16, contiguous.
        rest: of each number the difference in units of the last bit. Shape: (numbers,), int16.
    """
    bits = upper.detach().view(-1).view(torch.int16).to(torch.int32)
    bits.bitwise_left_shift_(16).add_(rest)
    return bits.view(torch.float32).view(upper.shape)


def rest_of(upper: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns what ``merged`` needs besides; both have the same shape and are contiguous."""
    bits = upper.detach().view(-1).view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    lower = values.detach().view(-1).view(torch.int32) - bits
    return lower.clamp_(max=_LARGEST).to(torch.int16)


def _make_whole(structure: Any) -> None:
    """Gives masters memory of their own."""
    for each in tensors_in(structure):
        if isinstance(each, SplitMaster) and each.rest is not None:
            values, each.rest = merged(each.upper, each.rest), None
            with past_subclass_functions():
                each.data = values


def _vacant(source: torch.Tensor) -> torch.Tensor:
    return without_memory(source.shape, torch.float32, source.device, SplitMaster)
