"""Tensors that a process lays where others of its host read them, of which only the place is sent.

TensorFlow copies what it sends to another process many times. What is large goes into a file of
the sender, in memory and without a name, which others open through ``/proc``: nothing is left of it
when processes end, however they end. Nobody waits here: what is read was laid before its place was
sent, and where no place is free yet, there is a new one.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from smdistributed.modelparallel.common.errors import SMPError

#: Where each place begins is a multiple of that; what is in none of them takes no memory.
_APART_BYTES = 1 << 40
#: Before the first place a byte for each says whether it is full; here is what tells a file.
_SECRET_AT = _APART_BYTES >> 1
_SECRET_BYTES = 16
_FREE, _FULL = b"\0", b"\1"
#: TensorFlow takes over the memory of arrays that begin at a multiple of that.
_ALIGNMENT_BYTES = 64


class Address(NamedTuple):
    """Where a mailbox is.

    Attributes:
        host: of its process.
        process: its number there.
        file: its number in that process.
        secret: what the file has in it.
    """

    host: str
    process: int
    file: int
    secret: bytes


class Mailbox:
    """What this process lays for others.

    Its file is open as long as the process: a step that has failed may still lay something.

    Raises:
        OSError: there can be no such file.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("smp_mailbox", os.MFD_CLOEXEC)
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        os.pwrite(self._file, self._secret, _SECRET_AT)
        self._sizes: list[int] = []
        self._lock = threading.Lock()

    def address(self, host: str) -> Address:
        """Returns where it is.

        Args:
            host: of this process.
        """
        return Address(host, os.getpid(), self._file, self._secret)

    def lay(self, array: Any) -> int:
        """Lays an array; returns its place, which is free again when it is taken. For any thread.

        Shape: any.
        """
        place = self._filled(array.nbytes)
        _write(self._file, memoryview(array.reshape(-1).view(np.uint8)), _begin(place))
        return place

    @property
    def num_places(self) -> int:
        """The largest number of arrays that lay here at a time."""
        return len(self._sizes)

    def _filled(self, num_bytes: int) -> int:
        """Returns a place that was free: the smallest that has had as much, else the largest."""
        sizes = self._sizes
        with self._lock:
            states = os.pread(self._file, len(sizes), 0)
            free = [place for place, state in enumerate(states) if not state]
            fitting = [place for place in free if sizes[place] >= num_bytes]
            if fitting:
                place = min(fitting, key=sizes.__getitem__)
            elif free:
                place = max(free, key=sizes.__getitem__)
                sizes[place] = num_bytes
            else:
                place = len(sizes)
                sizes.append(num_bytes)
            os.pwrite(self._file, _FULL, place)
        return place


class OpenMailbox:
    """The mailbox of another process.

    Args:
        address: of it.

    Raises:
        OSError: this process cannot open it.
    """

    def __init__(self, address: Address) -> None:
        self._file = os.open(f"/proc/{address.process}/fd/{address.file}", os.O_RDWR | os.O_CLOEXEC)
        if os.pread(self._file, _SECRET_BYTES, _SECRET_AT) != address.secret:
            os.close(self._file)
            raise OSError(f"process {address.process} is another one here")

    def take(self, place: int, shape: Sequence[int], dtype: Any) -> Any:
        """Returns the array at a place, which is free from then on. For any thread.

        Shape: ``shape``.
        """
        array = _aligned(shape, np.dtype(dtype))
        _read(self._file, memoryview(array.reshape(-1).view(np.uint8)), _begin(place))
        os.pwrite(self._file, _FREE, place)
        return array


class Mailboxes:
    """The mailbox of this process, and those of others.

    Args:
        own: that of this process, if it has one.
        readers: ranks that have opened it.
        others: those that this process has opened, by rank.
    """

    def __init__(
        self,
        own: Mailbox | None = None,
        readers: frozenset[int] = frozenset(),
        others: Mapping[int, OpenMailbox] | None = None,
    ) -> None:
        self._own = own
        self._readers = readers
        self._others = dict(others or {})

    def is_read_by(self, rank: int) -> bool:
        """Tells whether a rank takes what this one lays."""
        return rank in self._readers

    def reads(self, rank: int) -> bool:
        """Tells whether this rank takes what another one lays."""
        return rank in self._others

    @property
    def num_places(self) -> int:
        """The largest number of arrays that this process has kept for others at a time."""
        return 0 if self._own is None else self._own.num_places

    def lay(self, array: Any) -> Any:
        """Lays an array for those that read it; returns what they are to know.

        Shape: any; returns int64 of (1 + dimensions,).
        """
        assert self._own is not None
        return np.array([self._own.lay(array), *array.shape], np.int64)

    def take(self, rank: int, known: Any, dtype: Any) -> Any:
        """Returns what a rank has laid, given what it returned for it."""
        place, *shape = known.tolist()
        return self._others[rank].take(place, shape, dtype)


def connected(
    rank: int,
    ranks: Sequence[int],
    host: str,
    allgather: Callable[[Any], Sequence[Any]],
) -> Mailboxes:
    """Returns the mailboxes of processes that may send to each other. Collective: all of them.

    Args:
        rank: of this process.
        ranks: of all of them.
        host: of this process.
        allgather: returns what each of them gives it, in the order of ``ranks``.
    """
    if len(ranks) == 1:
        return Mailboxes()
    try:
        own: Mailbox | None = Mailbox()
    except OSError:  # such as of a limit to the size of files
        own = None
    addresses = allgather(None if own is None else own.address(host))
    others = {}
    for each, address in zip(ranks, addresses, strict=True):
        if each != rank and address is not None and address.host == host:
            try:
                others[each] = OpenMailbox(address)
            except OSError:  # such as of a process in another container
                continue
    opened = allgather(sorted(others))
    readers = (each for each, those in zip(ranks, opened, strict=True) if rank in those)
    return Mailboxes(own, frozenset(readers), others)


def _begin(place: int) -> int:
    return (1 + place) * _APART_BYTES


def _write(file: int, data: memoryview, begin: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], begin + done)


def _read(file: int, data: memoryview, begin: int) -> None:
    done = 0
    while done < len(data):
        count = os.preadv(file, [data[done:]], begin + done)
        if not count:
            raise SMPError("a tensor of another process ended early: report it.")
        done += count


def _aligned(shape: Sequence[int], dtype: Any) -> Any:
    """Returns an array whose memory TensorFlow takes over."""
    num_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    memory = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[begin : begin + num_bytes].view(dtype).reshape(shape)
