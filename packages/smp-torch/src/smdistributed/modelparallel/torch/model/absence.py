"""What the user's own module says when it is used as if all of it were here.

A rank keeps the tensors of its partition; those of other ranks stay in the modules, empty. Code
that runs the module by itself, or writes or copies it, would fail far away or work with a part.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime

#: What to do instead.
WHOLE_MODEL = (
    "To use the whole model, call model.cpu() of the DistributedModel on every rank, which gathers "
    "it, and then model.get_module()."
)
NOT_COPIED = (
    "a model whose partitions are on several processes cannot be pickled or copied: the tensors of "
    "the other partitions are not here. Copy it before it becomes a DistributedModel, or save "
    f"state_dict() of the DistributedModel and load that into a new model. {WHOLE_MODEL}"
)


#: What asks a user's model for its state to make a file, or a model, of the whole.
_FOR_WHOLE = frozenset(("save_pretrained", "as_original"))


def is_for_whole() -> bool:
    """Whether the state that is being read is for something that needs the whole."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in _FOR_WHOLE:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


class Calling(Protocol):
    """Has all of a model be here."""

    def begin_call(self) -> None:
        """Begins a call. Collective: PP_GROUP."""

    def end_call(self) -> None:
        """Ends it."""


class Absence:
    """Refuses what needs the whole of a model of which other ranks hold parts.

    Args:
        runtime: the state of the library in this process.

    Attributes:
        is_read: the library reads what is here.
        calling: gives what has all of the model here for a call between steps, if that lives: it is
            not kept by the model.
    """

    def __init__(self, runtime: TorchRuntime) -> None:
        self._runtime = runtime
        self.calling: Callable[[], Calling | None] = _nothing
        self._handles: list[RemovableHandle] = []
        self.is_read = False
        self._num_calls = 0

    def begin(
        self, model: nn.Module, lacking: Mapping[nn.Module, str], emptied: Container[nn.Module]
    ) -> None:
        """Watches a model.

        Args:
            model: the user's.
            lacking: its modules that are not whole on this rank, with their names.
            emptied: those in which tensors of other ranks are empty, and no absent ones.
        """
        self.end()
        self._handles.append(model.register_forward_pre_hook(_Watch(self)))
        self._handles.append(model.register_forward_hook(_EndWatch(self), always_call=True))
        self._handles += [
            module.register_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                _StateWatch(self, name, has_empty=module in emptied)
            )
            for module, name in lacking.items()
        ]

    def end(self) -> None:
        """Lets the model alone: all of it is here."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextlib.contextmanager
    def past(self) -> Iterator[None]:
        """Lets the library read what is here."""
        before, self.is_read = self.is_read, True
        try:
            yield
        finally:
            self.is_read = before

    def begin_call(self) -> None:
        """Has all of the model be here for a call outside of step functions. Collective: PP_GROUP.

        Raises:
            SMPError: gradients may be asked for.
        """
        if self._runtime.is_in_step:
            return
        calling = None if torch.is_grad_enabled() else self.calling()
        if calling is not None:
            calling.begin_call()
            self._num_calls += 1
        else:
            raise SMPError(
                f"rank {self._runtime.rank} holds one of {self._runtime.topology.pp_size} "
                "partitions of this model, so it cannot run here by itself: call the "
                "DistributedModel inside a function decorated with @smp.step, or, on every rank, "
                "inside torch.no_grad(), where each has all of it for the time of the call. "
                f"{WHOLE_MODEL}"
            )

    def end_call(self) -> None:
        """Ends what ``begin_call`` has begun."""
        if self._num_calls and (calling := self.calling()) is not None:
            self._num_calls -= 1
            calling.end_call()

    def check_state(self, name: str, *, has_empty: bool) -> None:
        """Raises if the state of a module is read that is not here.

        Between steps it has absent tensors, which a script computes with, and which no file takes.

        Raises:
            SMPError: it is, in a step, or it has empty tensors.
        """
        if not self.is_read and (has_empty or self._runtime.is_in_step):
            raise SMPError(
                f"rank {self._runtime.rank} holds one of {self._runtime.topology.pp_size} "
                f"partitions, so state_dict() of {name or 'the wrapped model'} would hold empty "
                "tensors. Call state_dict() of the DistributedModel between steps, on every rank: "
                "it gathers the whole state; local_state_dict() is what this rank holds."
            )


def _nothing(*_: Any) -> None:
    """What a copy of a model has in the place of a watch."""


class _Watch:
    """A hook that is no part of the model's state."""

    def __init__(self, absence: Absence) -> None:
        self._absence = absence

    def __call__(self, *_: Any) -> None:
        self._absence.begin_call()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """A copy of the model is none of the job: all that is done with it all ranks do."""
        return _nothing

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(NOT_COPIED)


class _EndWatch(_Watch):
    """The same, when a call has ended."""

    def __call__(self, *_: Any) -> None:
        self._absence.end_call()


class _StateWatch(_Watch):
    """The same, before the state of a module is read."""

    def __init__(self, absence: Absence, name: str, *, has_empty: bool) -> None:
        super().__init__(absence)
        self._name, self._has_empty = name, has_empty

    def __call__(self, *_: Any) -> None:
        self._absence.check_state(self._name, has_empty=self._has_empty)
