"""Many tensors in parts at once as whole ones, for who would ask for each of them many times.

Between steps each function of torch that gets a parameter in parts has it gathered
(``parts.at_rest``). An update that looks at whole parameters asks for all of them, and for their
gradients, again and again: here each is gathered once, all are tensors as any others, and each rank
keeps its own block of what they are in the end.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of, users_of_memory
from smdistributed.modelparallel.torch.parts.at_rest import InParts, Shown, in_parts


class Together:
    """Parameters that are whole while it is entered, with their gradients.

    Collective: the groups that have the parts; it takes memory for all of them.

    Args:
        parameters: of which ranks may have parts; others stay as they are.
        kept: gives what is kept besides, which may share memory with parameters.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        kept: Callable[[], Iterable[torch.Tensor]] = lambda: (),
    ) -> None:
        self._parameters = in_parts(list(parameters))
        self._kept = kept
        self._shown: Shown | None = None
        #: Each parameter, what its own gradient was, and what it is inside.
        self._gradients: list[tuple[Any, Any, Any]] = []

    def __enter__(self) -> None:
        seen = [(each, each.grad) for each in self._parameters]
        gradients = [gradient for _, gradient in seen if isinstance(gradient, InParts)]
        shown = Shown(in_parts([self._parameters, gradients, list(self._kept())]))
        with torch.no_grad():  # as what autograd has nothing to do with
            shown.__enter__()
        self._shown = shown
        for parameter, gradient in seen:
            own = parameter.grad
            if gradient is not None and gradient.dtype != parameter.dtype:
                gradient = gradient.to(parameter.dtype)
            parameter.grad = gradient
            self._gradients.append((parameter, own, gradient))

    def __exit__(self, failed: type[BaseException] | None, *error: object) -> None:
        shown, self._shown = self._shown, None
        assert shown is not None
        given = []
        for parameter, own, gradient in self._gradients:
            if parameter.grad is not gradient:
                given.append((parameter, parameter.grad))
            parameter.grad = own
        self._gradients.clear()
        moved = [(each, self._as_kept(data)) for each, data in shown.take_back()]
        shown.__exit__(failed, *error)
        if failed is not None:
            return
        shown.keep()
        for parameter, gradient in given:
            parameter.take_gradient(gradient)
        for parameter, data in moved:
            parameter.take_data(data)
        _check_kept(shown)

    def _as_kept(self, data: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that is kept with the memory of one, if there is such; or itself."""
        alike = (
            each
            for each in self._kept()
            if each.layout is torch.strided
            and storage_of(each) == storage_of(data)
            and each.shape == data.shape
        )
        return next(alike, data)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, they are in parts again."""
        self.__exit__(None)
        try:
            yield
        finally:
            self.__enter__()


def _check_kept(shown: Shown) -> None:
    """Raises if somebody keeps what sees the memory of a whole tensor, which goes.

    Raises:
        UnsupportedError: somebody does.
    """
    if any(users_of_memory(whole) > 1 for whole in shown.wholes.values()):
        gc.collect()
    for blocks, whole in shown.wholes.items():
        if users_of_memory(whole) > 1:
            raise UnsupportedError(
                f"the update of an optimizer keeps a view of {blocks.told_of_ranks}, so that a "
                "whole one is there while it is updated: have it keep what clone() returns."
            )
