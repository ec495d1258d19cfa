"""Who is blamed when communication fails, and that all communication goes through what blames."""

from __future__ import annotations

import ast
import dataclasses
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.comm.presence import Presence
from smdistributed.modelparallel.common.comm.transport import PeersMissingError
from smdistributed.modelparallel.common.errors import CommError, ConfigError
from smdistributed.modelparallel.torch.execute import peers as peers_module
from smdistributed.modelparallel.torch.execute.peers import Peers
from smdistributed.modelparallel.torch.runtime.control_plane import _Works

HERE = Presence.own()
GONE = dataclasses.replace(HERE, started="0")
ELSEWHERE = dataclasses.replace(HERE, machine="another")
CLOSED = RuntimeError("[/src/gloo/pair.cc:5] Connection closed by peer [::1]:4. Check the logs.")


@pytest.fixture(autouse=True)
def look_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_LOOK_SECONDS", 0.0)


def error_of(presences: list[Presence], error: RuntimeError = CLOSED) -> CommError:
    with (
        pytest.raises(CommError) as raised,
        Peers(0, presences).blaming(range(len(presences)), "reducing gradients with"),
    ):
        raise error
    assert raised.value.__cause__ is error
    assert raised.value.rank == 0
    return raised.value


def test_of_several_ranks_the_one_that_ended_is_blamed() -> None:
    error = error_of([HERE, HERE, GONE, ELSEWHERE])
    assert error.missing_ranks == (2,)
    assert str(error) == (
        "rank 0: reducing gradients with ranks 1-3 failed: rank 2 has ended (Connection "
        "closed by peer [::1]:4). Look at its own output for the cause."
    )


def test_where_nobody_is_seen_to_be_gone_all_are_suspects() -> None:
    error = error_of([HERE, HERE, ELSEWHERE])
    assert error.missing_ranks == (1, 2)
    assert "one of these has died or did not take part in time" in str(error)
    error = error_of([HERE, HERE])
    assert error.missing_ranks == (1,)
    assert "that rank has died" in str(error)


def test_who_exchanges_something_else_is_not_taken_for_dead() -> None:
    error = error_of([HERE, HERE], RuntimeError("op.preamble.length <= op.nbytes. 8 vs 4"))
    assert error.missing_ranks == ()
    assert "with tensors of the same shapes" in str(error)
    # A process that is gone explains any error.
    assert error_of([HERE, GONE], RuntimeError("")).missing_ranks == (1,)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("ours"),
        CommError("ours"),
        ValueError("theirs"),
        torch.OutOfMemoryError("CUDA out of memory."),
    ],
)
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, Peers(0, [HERE, GONE]).blaming((1,), "sending to"):
        raise error
    assert raised.value is error


def test_torchs_errors_in_the_scripts_own_communication_are_explained() -> None:
    explained = Peers(0, [HERE, GONE]).explained
    found = explained(CLOSED)
    assert found is not None
    assert found.missing_ranks == (1,)
    for other in (RuntimeError("shapes do not fit"), ValueError("timed out"), CommError("ours")):
        assert explained(other) is None


class _Work:
    def wait(self, timeout: timedelta) -> None:
        pass


def test_what_cannot_even_be_started_names_the_rank() -> None:
    def start(rank: int) -> list[dist.Work]:
        if rank == 2:
            raise CLOSED
        return [_Work()]  # type: ignore[list-item]

    with pytest.raises(PeersMissingError) as raised:
        _Works([1, 2, 3], start).wait(5)
    assert raised.value.missing_ranks == (2,)
    assert raised.value.reason == "has ended (Connection closed by peer [::1]:4)"


#: What communicates, by the last part of its name.
COMMUNICATES = {
    *("all_reduce", "all_gather", "broadcast", "isend", "irecv", "new_group", "allreduce_hook"),
    *("init_process_group", "notify_join_context", "take_result"),
}


def _unguarded(tree: ast.AST, guarded: bool = False) -> list[int]:
    """Returns the lines that communicate outside of every ``with ...blaming(...)``."""
    found = []
    for node in ast.iter_child_nodes(tree):
        inside = guarded
        if isinstance(node, ast.With):
            inside |= any(
                "blaming" in ast.unparse(item.context_expr)
                or "connecting" in ast.unparse(item.context_expr)
                for item in node.items
            )
        if isinstance(node, ast.Call) and not guarded:
            name = ast.unparse(node.func).split(".")
            if name[-1] in COMMUNICATES and name[0] in ("dist", "Join", "bucket", "allreduce_hook"):
                found.append(node.lineno)
        found += _unguarded(node, inside)
    return found


def test_all_communication_says_whom_it_blames() -> None:
    folder = Path(smp.__file__).parent
    # ``start`` calls these inside of it.
    called_inside = {
        *("_join_data_plane", "_process_groups", "new_group", "_new_group", "_greet", "__init__"),
    }
    problems = []
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.name not in called_inside:
                lines = _unguarded(function)
                problems += [f"{path.relative_to(folder)}:{line}" for line in lines]
    assert not problems, "not inside of Peers.blaming"
