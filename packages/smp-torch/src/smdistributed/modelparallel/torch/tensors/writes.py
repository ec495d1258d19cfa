"""Which tensors have been written to, also where no version of theirs counts it.

What goes through ``data``, and the running statistics of batch normalisation, change no version.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor, past_recording
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of, version_of
from smdistributed.modelparallel.torch.tensors.memory import MemoryNotes

#: Elements of a tensor whose content is compared; of larger ones it would take too long.
SMALL = 1 << 12

#: Methods of tensors that let NumPy and others see their memory.
_GIVING = ("numpy", "__dlpack__")

#: By memory, how many writes the dispatcher has seen. Whoever compares two counts has a tensor with
#: that memory all the while, so that it is not another's meanwhile.
_written: collections.Counter[int] = collections.Counter()


#: Of a fake that is a view of a real tensor, the memory of the latter.
_views = MemoryNotes[int]()


def note_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Counts a write to each of some tensors."""
    for memory in map(_memory_of, tensors):
        _written[memory] += 1
        if (viewed := _views.get(memory)) is not None:
            _written[viewed] += 1


def note_view(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Takes note that a fake, which has memory of its own, is a view of a real tensor."""
    if fake.layout is torch.strided and real.layout is torch.strided:
        _views[fake] = storage_of(real)


def writes_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Returns what is another when an operation has written to a tensor, or replaced its memory."""
    memory = _memory_of(tensor)
    return version_of(tensor), memory, _written[memory]


@contextlib.contextmanager
def large_arrays_copied() -> Iterator[None]:
    """Inside, other libraries get copies of large tensors, which count as written.

    Nobody sees whether they are. For a run that must leave no trace.
    """

    def copying(give: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(give)
        def copied(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensor, FakeTensor) or not _sees_large(tensor):
                return give(tensor, *args, **kwargs)
            note_writes([tensor])
            with past_recording():
                return give(tensor.clone(), *args, **kwargs)

        return copied

    with _given_by(copying):
        yield


def arrays_as_they_are() -> contextlib.AbstractContextManager[None]:
    """Inside such a run, lets others see tensors again: for code that is no part of it."""
    return _given_by(inspect.unwrap)


@contextlib.contextmanager
def _given_by(change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, what gives tensors to other libraries is changed."""
    former = {name: getattr(torch.Tensor, name) for name in _GIVING}
    for name, give in former.items():
        setattr(torch.Tensor, name, change(give))
    try:
        yield
    finally:
        for name, give in former.items():
            setattr(torch.Tensor, name, give)


def _sees_large(tensor: torch.Tensor) -> bool:
    """Whether a tensor, which may be a small part, lies in more memory than is compared."""
    if tensor.layout is not torch.strided:
        return tensor.numel() > SMALL
    return tensor.untyped_storage().nbytes() > SMALL * tensor.itemsize


def _memory_of(tensor: torch.Tensor) -> int:
    return storage_of(tensor) if tensor.layout is torch.strided else 0
