from __future__ import annotations

from collections.abc import Sequence

import pytest

from smdistributed.modelparallel.common.launcher import roll_call
from smdistributed.modelparallel.common.launcher.hosts import Host

HOSTS = [Host(name, 1) for name in "abcd"]


def asking(words: dict[str, str]) -> tuple[list[str], roll_call.Command]:
    """Returns whom is asked, and a command whose answer goes by the names of hosts."""
    asked: list[str] = []

    def command(hosts: Sequence[Host]) -> list[str]:
        names = "".join(host.name for host in hosts)
        asked.append(names)
        return ["sh", "-c", " && ".join(words.get(name, "true") for name in names)]

    return asked, command


def test_one_question_is_enough_where_all_answer() -> None:
    asked, command = asking({})
    assert roll_call.silent(HOSTS, command, {}) == frozenset()
    assert asked == ["abcd"]


def test_each_host_is_asked_twice_before_it_counts_as_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roll_call, "_ANSWER_SECONDS", 0.5)
    asked, command = asking({"b": "exit 1", "d": "sleep 30"})
    assert roll_call.silent(HOSTS, command, {}) == {"b", "d"}
    assert asked == ["abcd", "a", "b", "c", "d", "b", "d"]
