"""Memory and versions of tensors, functions of many at once, beyond PyTorch's public API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CellType, FunctionType
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError


def storage_of(tensor: torch.Tensor) -> int:
    """Returns a number for the memory of a tensor; tensors that share it have the same."""
    number: int = tensor.untyped_storage()._cdata
    return number


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one piece of memory: sparse ones, and those of transforms, are not."""
    try:
        storage_of(tensor)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def overlapping(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    """Returns the pairs of tensors, by position, whose first and last bytes enclose common ones."""
    reaches = [_reach(each) for each in tensors]
    return tuple(
        (one, other)
        for other, (memory, start, end) in enumerate(reaches)
        for one, (its_memory, its_start, its_end) in enumerate(reaches[:other])
        if memory == its_memory and start < its_end and its_start < end
    )


def _reach(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Returns the memory of a tensor, and where in it it begins and ends, in bytes."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return 0, 0, 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    start = int(tensor.storage_offset()) * tensor.element_size()
    return storage_of(tensor), start, start + (last + 1) * tensor.element_size()


def is_of_leaf(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a leaf of autograd, or a view of one."""
    base = tensor if tensor._base is None else tensor._base
    return base.is_leaf


def version_of(tensor: torch.Tensor) -> int:
    """Returns how often a tensor was changed in place."""
    return 0 if tensor.is_inference() else tensor._version


class LikeTensor(torch._C._TensorMeta):
    """Has every tensor be an instance of a class, as of ``torch.Tensor``; scripts compare types."""

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, torch.Tensor)


def users_of_memory(tensor: torch.Tensor) -> int:
    """Returns how many tensors see the memory of one, itself counted."""
    storage = tensor.untyped_storage()
    users: int = torch._C._storage_Use_Count(storage._cdata)
    return users - 1  # the object in this variable


_TENSOR: Any = torch.Tensor

#: What asks for no values of a tensor, besides the public functions.
ABOUT_TENSORS = (
    torch._has_compatible_shallow_copy_type,
    _TENSOR._version.__get__,
    _TENSOR._is_view,
    _TENSOR._backward_hooks.__get__,
    _TENSOR._backward_hooks.__set__,
)


#: What changes many tensors in place, one number after the other, by numbers alone.
NUMBERS_OF_MANY = frozenset(
    {
        *(torch._foreach_zero_, torch._foreach_mul_, torch._foreach_div_, torch._foreach_neg_),
        *(torch._foreach_clamp_min_, torch._foreach_clamp_max_),
    }
)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each tensor to another one, which may have another type; a few kernels for all."""
    torch._foreach_copy_(list(targets), list(sources))


def multiply_all(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies tensors in place by a number that is on the device. Shape: scalar."""
    torch._foreach_mul_(list(tensors), factor)


def norms_of_all(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the norm of each tensor. Shape: (tensors,)."""
    return torch.stack(torch._foreach_norm(list(tensors)))


def work_of(function: Callable[..., Any]) -> CellType:
    """Returns where a function of ``torch.nn.utils`` keeps the function that does its work.

    Each is a wrapper that switches gradients off; what it wraps is in its closure. Replaced there,
    it is replaced under every name that a script has given the function.

    Raises:
        UnsupportedError: this version of torch wraps it differently.
    """
    if isinstance(function, FunctionType) and function.__code__.co_freevars == ("func",):
        assert function.__closure__ is not None
        return function.__closure__[0]
    raise UnsupportedError(
        f"torch {torch.__version__} defines {function!r} in a way that this version of smp-torch "
        "does not know, so it cannot take norms over partitions: use a torch that it was made for."
    )


def become(one: torch.Tensor, other: torch.Tensor) -> None:
    """Has an object be another tensor, for everybody who holds it, and the other way round.

    ``torch.utils.swap_tensors`` refuses where somebody has a weak reference, which stays with the
    object.
    """
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)
