"""A tensor but for its values.

``TensorSpec.of(torch.zeros(2, 3))`` has shape (2, 3), strides (3, 1), the dtype, the device and
whether a gradient is wanted. A fake is made from it, a promise, and what ranks compare of their
arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.torch.compat.private.modes import attributes_of

_OWN_PACKAGE = __name__.partition(".")[0]


def attributes_shown(tensor: torch.Tensor) -> dict[str, Any]:
    """Returns the attributes that a script has given a tensor, or a fake."""
    if not (given := vars(tensor)):
        return {}  # of what it has now, and not of what it will have
    own = attributes_of(tensor)
    return {
        name: value
        for name, value in given.items()
        if name not in own and not _is_of_library(value)
    }


def _is_of_library(value: Any) -> bool:
    return str(type(value).__module__).startswith(_OWN_PACKAGE)


def show_attributes(tensor: torch.Tensor, items: Mapping[str, Any]) -> None:
    """Gives a tensor, or a fake, the attributes of another one, and no more."""
    before = attributes_shown(tensor)
    if before.keys() == items.keys() and all(value is items[key] for key, value in before.items()):
        return
    for name in before.keys() - items.keys():
        del vars(tensor)[name]
    vars(tensor).update(items)


class TensorSpec(NamedTuple):
    """What code can see of a tensor without its values, at one moment.

    A fake stands for all versions of a tensor that is written to in place, in all microbatches, and
    shows one of them at most: what is said of a tensor at a moment comes from its spec of then.

    Attributes:
        shape, stride, dtype, device, requires_grad: as of the tensor; a tensor that has no strides
            lies in the order of its dims.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Returns the spec of a tensor."""
        is_strided = tensor.layout is torch.strided
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride() if is_strided else range(tensor.dim(), 0, -1)),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
        )

    @property
    def on_every_rank(self) -> TensorSpec:
        """The same without the number of the device, which ranks have for themselves."""
        return self._replace(device=torch.device(self.device.type))

    def empty(self, device: torch.device) -> torch.Tensor:
        """Returns a tensor like it; a fake inside a mode of fakes.

        Args:
            device: where it is; what is on the host stays there.
        """
        place = self.device if self.device.type == "cpu" else device
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=place)
        return made.requires_grad_(self.requires_grad)

    def give(self, fake: torch.Tensor, *, forgets: bool = True) -> None:
        """Makes a fake look so again, after operations in place.

        Args:
            fake: of the same dtype, on the same device.
            forgets: that it requires a gradient may be taken back.
        """
        if fake.requires_grad and not self.requires_grad and forgets:
            fake.detach_() if fake.grad_fn is not None else fake.requires_grad_(False)
        if (tuple(fake.shape), tuple(fake.stride())) != (self.shape, self.stride):
            with torch.no_grad():
                fake.as_strided_(self.shape, self.stride)
        if self.requires_grad and not fake.requires_grad:
            one = torch.ones((), dtype=fake.dtype, device=fake.device, requires_grad=True)
            with torch.enable_grad():
                fake.mul_(one)  # not as a leaf, to which nobody might write
