"""What one process lays another one takes, once, and nothing is kept."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from smdistributed.modelparallel.tensorflow.execute import mailboxes
from smdistributed.modelparallel.tensorflow.execute.mailboxes import (
    Mailbox,
    Mailboxes,
    OpenMailbox,
    connected,
)

HOST = "here"


@pytest.fixture
def own() -> Mailbox:
    return Mailbox()


@pytest.fixture
def opened(own: Mailbox) -> OpenMailbox:
    return OpenMailbox(own.address(HOST))


@pytest.mark.parametrize("dtype", ["bool", "float16", "float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (300, 7, 11)])
def test_an_array_arrives(
    own: Mailbox, opened: OpenMailbox, dtype: str, shape: tuple[int, ...]
) -> None:
    array = np.random.default_rng(1).integers(0, 100, shape).astype(dtype)
    taken = opened.take(own.lay(array), shape, dtype)
    assert taken.dtype == array.dtype
    np.testing.assert_array_equal(taken, array)


def test_places_are_filled_again_when_they_are_empty(own: Mailbox, opened: OpenMailbox) -> None:
    first, second = own.lay(np.arange(3)), own.lay(np.arange(300))
    assert (first, second) == (0, 1)
    np.testing.assert_array_equal(opened.take(first, [3], "int64"), np.arange(3))
    # The larger array goes where there is room for one, though it was larger before.
    assert own.lay(np.arange(400)) == first
    np.testing.assert_array_equal(opened.take(second, [300], "int64"), np.arange(300))
    assert own.lay(np.arange(2)) == second
    np.testing.assert_array_equal(opened.take(first, [400], "int64"), np.arange(400))
    assert own.num_places == 2


def test_a_place_is_chosen_that_has_had_as_much(own: Mailbox, opened: OpenMailbox) -> None:
    for size in (500, 5, 50):
        own.lay(np.zeros(size))
    for place, size in enumerate((500, 5, 50)):
        opened.take(place, [size], "float64")
    assert [own.lay(np.zeros(size)) for size in (40, 5, 600)] == [2, 1, 0]


def test_what_goes_in_parts_arrives_whole(
    own: Mailbox, opened: OpenMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel moves two GiB at a time at most."""
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(
        mailboxes.os, "pwrite", lambda file, data, begin: write(file, bytes(data)[:7], begin)
    )
    monkeypatch.setattr(
        mailboxes.os, "preadv", lambda file, data, begin: read(file, [data[0][:5]], begin)
    )
    array = np.arange(40)
    np.testing.assert_array_equal(opened.take(own.lay(array), [40], "int64"), array)


def test_nothing_has_a_name_in_the_file_system(own: Mailbox) -> None:
    name = os.readlink(f"/proc/self/fd/{own.address(HOST).file}")
    assert name.startswith("/memfd:")
    assert not os.get_inheritable(own.address(HOST).file)


def test_a_file_of_another_process_is_not_taken_for_it(own: Mailbox) -> None:
    address = own.address(HOST)
    with pytest.raises(OSError, match="another one here"):
        OpenMailbox(address._replace(secret=b"another process."))


def _connected(host: str, others: str, opened: list[Any]) -> Mailboxes:
    """Returns the mailboxes of rank 0 beside rank 3, whose process is this one, too."""
    other = Mailbox().address(others)
    answers = iter([lambda own: [own, other], lambda own: [own, opened]])
    return connected(0, (0, 3), host, lambda own: next(answers)(own))


def test_processes_of_a_host_read_each_other() -> None:
    found = _connected(HOST, HOST, [0])
    assert [rank for rank in range(4) if found.reads(rank)] == [3]
    assert [rank for rank in range(4) if found.is_read_by(rank)] == [3]


def test_processes_of_other_hosts_do_not() -> None:
    found = _connected(HOST, "there", [])
    assert not found.reads(3)
    assert not found.is_read_by(3)


def test_without_such_files_nothing_is_laid(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError("no files of memory")

    address = Mailbox().address(HOST)
    monkeypatch.setattr(mailboxes.os, "memfd_create", refuse)
    answers = iter([lambda own: [own, address], lambda own: [own, []]])
    found = connected(0, (0, 3), HOST, lambda own: next(answers)(own))
    assert found.reads(3)
    assert not found.is_read_by(3)


def test_one_process_alone_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mailboxes.os, "memfd_create")
    assert not connected(0, (0,), HOST, lambda own: [own]).reads(0)
