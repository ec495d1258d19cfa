from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from smdistributed.modelparallel.common.launcher import restarts
from smdistributed.modelparallel.common.launcher.elastic import NoPlaceError, Placement
from smdistributed.modelparallel.common.launcher.first_failure import REFUSED, Verdict
from smdistributed.modelparallel.common.launcher.hosts import Host, parse_host_list, place


def placement(
    text: str, num_ranks: int | None, given: Mapping[str, Any], *gone: set[str]
) -> Placement:
    named = parse_host_list(text)
    answers = iter(gone)

    def silent(hosts: Sequence[Host]) -> frozenset[str]:
        return frozenset(next(answers))

    return Placement(named, place(named, num_ranks), "pytorch", given, silent)


def test_each_job_has_the_most_that_its_configuration_allows() -> None:
    degrees = itertools.product((1, 2, 3), (1, 2), (1, 2, 3, 4))
    for (pp, tp, shards), slots in itertools.product(
        degrees, itertools.product((1, 2, 3, 4), repeat=3)
    ):
        replica, total = pp * tp, sum(slots)
        if total % replica or total // replica % shards:
            continue
        given = {
            "pipeline_parallel_degree": pp,
            "tensor_parallel_degree": tp,
            "sharded_data_parallel_degree": shards,
            "ddp": True,
        }
        text = ",".join(f"{name}:{n}" for name, n in zip("abc", slots, strict=True))
        for gone in ("b", "c", "bc"):
            left = sum(n for name, n in zip("abc", slots, strict=True) if name not in gone)
            job = placement(text, None, given, set(gone))
            if left < replica:
                with pytest.raises(NoPlaceError, match=rf"gone; .* {left} of {total} .* {replica}"):
                    job.renew()
                continue
            told = job.renew()
            replicas = left // replica
            assert job.start.num_ranks == replicas * replica
            assert all(host.name not in gone for host in job.start.hosts)
            assert f"{replicas * replica} of {total} processes, data_parallel {replicas}" in told
            now = job.start.parameters.get("sharded_data_parallel_degree", shards)
            assert replicas % now == 0
            assert now >= shards or now == replicas
            assert now == shards or replicas % shards


def test_a_spare_host_takes_the_place_of_one_that_is_gone() -> None:
    job = placement("a:2,b:2,c:2", 4, {"pipeline_parallel_degree": 4}, {"b"}, {"b"}, set())
    assert job.renew() == "host b is gone; 4 of 4 processes, data_parallel 1"
    assert job.start.hosts == (Host("a", 2), Host("c", 2))
    names = {"SM_HOSTS": '["algo-1", "algo-2", "algo-3"]'}
    assert job.environment(names) == {"SM_HOSTS": '["algo-1","algo-3"]'}
    assert job.environment({"SM_HOSTS": '["algo-1"]'}) == {"SM_HOSTS": '["algo-1"]'}
    assert job.renew() == ""
    assert job.renew() == "host b is back; 4 of 4 processes, data_parallel 1"
    assert job.start.hosts == (Host("a", 2), Host("b", 2))


def test_what_rank_0_tells_counts_and_the_number_of_shards_asked_for_is_kept() -> None:
    given = {"sharded_data_parallel_degree": 4, "ddp": True}
    job = placement("a:2,b:4,c:2", None, {}, {"c"}, set(), {"b", "c"})
    job.take(given)
    assert job.renew().endswith("data_parallel 6, sharded_data_parallel_degree 6")
    job.take({**given, "sharded_data_parallel_degree": 6})
    assert job.renew() == "host c is back; 8 of 8 processes, data_parallel 8"
    assert job.start.parameters == {}
    assert job.renew().endswith("data_parallel 2, sharded_data_parallel_degree 2")
    assert job.start.parameters == {"sharded_data_parallel_degree": 2}


def test_a_script_that_says_nothing_has_all_processes_that_there_are() -> None:
    job = placement("a,b", 6, {}, {"b"})
    assert job.renew() == "host b is gone; 3 of 6 processes"
    assert placement("a:2", None, {}).renew() == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([""], ["ended; not started again: mpirun has refused it"]),
        (["b is gone"], ["ended", "restart 1 of 1 in 2 s", "restart 1 of 1: b is gone"]),
    ],
)
def test_a_refused_start_is_final_where_all_hosts_answer(
    changes: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restarts.time, "sleep", lambda _: None)
    ends = iter([Verdict(1, "ended", final_because=REFUSED), Verdict(0)])
    restarts.run(lambda _: next(ends), 1, lambda: changes.pop(0))
    assert capsys.readouterr().err.splitlines() == [f"smprun: {text}" for text in words]
    assert not changes


def test_a_job_without_room_ends_with_the_code_of_its_last_attempt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts.time, "sleep", lambda _: None)

    def renew() -> str:
        raise NoPlaceError("host b is gone")

    assert restarts.run(lambda _: Verdict(137, "rank 1 was killed"), 3, renew) == 137
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "smprun: not started again: host b is gone"
