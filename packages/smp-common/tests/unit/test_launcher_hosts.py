from __future__ import annotations

import pytest

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.launcher.hosts import (
    Host,
    host_of_ranks,
    parse_host_list,
    parse_hostfile,
    place,
)


def test_host_list() -> None:
    assert parse_host_list("a:4, 10.0.0.2:2") == (Host("a", 4), Host("10.0.0.2", 2))
    assert parse_host_list("a,b") == (Host("a"), Host("b"))
    for name in ("a", "node-1.example.org", "_x", "10.0.0.1", "A_b", "a" * 253):
        assert parse_host_list(f"{name}:2") == (Host(name, 2),)


def test_hostfile_takes_each_form_and_comments() -> None:
    text = "# all of them\na slots=4\n\nb slots = 2  # the old one\nc:3\nd\n"
    assert parse_hostfile(text, "f") == (Host("a", 4), Host("b", 2), Host("c", 3), Host("d"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:0", "host a must be an integer of at least 1; received '0'"),
        ("a:", "received ''"),
        ("a:four", "received 'four'"),
        ("a,,b", "needs a name"),
        ("::1", "needs a name"),
        ("fe80::1:4", "IPv6"),
        ("-oProxyCommand=reboot:2", "received '-oProxyCommand=reboot'"),
        ("a,-v", "received '-v'"),
        ("$(reboot):2", r"received '\$\(reboot\)'"),
        ("a;reboot:2", "received 'a;reboot'"),
        ("`reboot`", "received '`reboot`'"),
        ("a b", "received 'a b'"),
        ("a\nb", "received"),
        ("me@a:2", r"ssh belongs into ~/\.ssh/config"),
        ("a-:2", "received 'a-'"),
        ("a" * 254, "received"),
        ("a:2,b:2,a:2", "a is named 2 times"),
    ],
)
def test_wrong_host_lists(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_host_list(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slot=4", "f, line 1: .*received 'a slot=4'"),
        ("a\nb slots=x", "f, line 2: .*received 'x'"),
        ("a:2 slots=2", "f, line 1"),
        ("# none\n", "names none"),
        ("a\n-oProxyCommand=x slots=2", "f, line 2: a"),
        ("$(reboot) slots=4", "f, line 1: .*received"),
    ],
)
def test_wrong_hostfiles(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_hostfile(text, "f")


@pytest.mark.parametrize(
    ("hosts", "num_ranks", "placed"),
    [
        ((), 3, (Host("localhost", 3),)),
        ((Host("a"), Host("b")), 4, (Host("a", 2), Host("b", 2))),
        ((Host("a", 4), Host("b", 4)), None, (Host("a", 4), Host("b", 4))),
        ((Host("a", 4), Host("b", 4)), 6, (Host("a", 4), Host("b", 2))),
        ((Host("a", 4), Host("b", 4)), 4, (Host("a", 4),)),
    ],
)
def test_place(hosts: tuple[Host, ...], num_ranks: int | None, placed: tuple[Host, ...]) -> None:
    assert place(hosts, num_ranks) == placed


@pytest.mark.parametrize(
    ("hosts", "num_ranks", "message"),
    [
        ((), None, "give -n"),
        ((), 0, "at least 1; received 0"),
        ((Host("a"), Host("b")), 3, "3 processes cannot be shared by 2 hosts"),
        ((Host("a", 2), Host("b")), 4, "received none for b"),
        ((Host("a", 2), Host("b", 1)), 4, r"-n \(4\) must not exceed .* \(3 in a:2,b:1\)"),
    ],
)
def test_place_refuses(hosts: tuple[Host, ...], num_ranks: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(hosts, num_ranks)


def test_ranks_are_consecutive_on_a_host() -> None:
    assert host_of_ranks((Host("a", 2), Host("b", 1))) == ("a", "a", "b")
