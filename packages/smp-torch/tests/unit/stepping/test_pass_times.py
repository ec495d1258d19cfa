"""Ranks agree on the call whose passes are timed, and do not ask each other for ever."""

from __future__ import annotations

from unittest import mock

from smdistributed.modelparallel.torch.stepping import pass_times
from smdistributed.modelparallel.torch.stepping.pass_times import PassTimes


def asked(
    *, others: bool, by_model: bool = True, device: str = "cpu", num_replicas: int = 1
) -> int:
    """Returns in how many of 100 calls of one kind this rank asks the other one.

    Args:
        others: whether the other one has a kind that comes again.
        by_model: whether ``trace_execution_times`` is asked for.
        device: where the ranks compute.
        num_replicas: of the model.
    """
    model, runtime, preparation = mock.Mock(), mock.Mock(), mock.Mock()
    model.tracing.trace_execution_times = by_model
    runtime.device.type = device
    runtime.topology.rdp_cp_size = num_replicas
    model.data_parallel.is_joining = False
    prepared = mock.Mock(plans=[mock.Mock(segments=[], backward=set(), in_turn=())])
    prepared.executor.timed.return_value = []
    runtime.communicator.allgather.side_effect = lambda told, group: [
        told,
        (others, True, [], {}),
    ]
    with (
        mock.patch.object(pass_times, "models_of", return_value=[model]),
        mock.patch.object(PassTimes, "_order"),
    ):
        times = PassTimes(runtime, preparation)
        for _ in range(100):
            times.note(prepared, [])
    return runtime.communicator.allgather.call_count


def test_the_fourth_call_is_timed_where_it_is_one_of_its_kind_on_all() -> None:
    assert asked(others=True) == 1


def test_nobody_asks_for_ever_where_kinds_do_not_come_again() -> None:
    assert asked(others=False) == 64 - 4 + 1


def test_gpus_are_timed_unasked_but_where_each_run_is_to_have_the_same_bits() -> None:
    assert asked(others=True, by_model=False) == 0
    assert asked(others=True, by_model=False, device="cuda") == 1
    # Replicas may call other step functions, and would not come here together.
    assert asked(others=True, by_model=False, device="cuda", num_replicas=2) == 0
    assert asked(others=True, device="cuda", num_replicas=2) == 1
    with mock.patch.object(
        pass_times.torch, "are_deterministic_algorithms_enabled", return_value=True
    ):
        assert asked(others=True, by_model=False, device="cuda") == 0
        assert asked(others=True, device="cuda") == 1
