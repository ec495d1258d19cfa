"""Starting the library, and what happens when a partner does not come."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from conformance.adapters import adapter_of
from conformance.adapters.base import Adapter
from conformance.registry import case
from conformance.worlds import can_fork, preloaded


@case("smp.init", "smp.is_initialized", worlds=("new",))
def names_of_the_job_need_init(adapter: Adapter) -> None:
    smp = adapter.smp
    for name in ("rank", "size", "pp_rank", "dp_size", "get_mp_group", "barrier", "local_rank"):
        with pytest.raises(RuntimeError, match=r"smp\.init"):
            getattr(smp, name)()


@case("smp.init", worlds=("new",))
def init_without_arguments_is_one_plain_process(adapter: Adapter) -> None:
    smp = adapter.smp
    assert smp.init() is None
    assert (smp.rank(), smp.size(), smp.pp_size(), smp.tp_size()) == (0, 1, 1, 1)


@case("smp.init", worlds=("new",))
def a_second_init_warns_and_changes_nothing(adapter: Adapter) -> None:
    smp = adapter.smp
    smp.init({"pipeline_parallel_degree": 1, "microbatches": 3})
    with pytest.warns(UserWarning, match="again"):
        smp.init({"pipeline_parallel_degree": 1, "microbatches": 5})
    assert adapter.config.microbatches == 3


@case("smp.init", "common.in_use.smp_init_dict", worlds=("new",))
def init_takes_a_dictionary(adapter: Adapter) -> None:
    adapter.smp.init({"pipeline_parallel_degree": 1, "microbatches": 6})
    assert adapter.config.microbatches == 6


@case("smp.init", "compat.file_configuration", worlds=("new",))
def init_takes_a_file(adapter: Adapter) -> None:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.yaml")
        path.write_text("pipeline_parallel_degree: 1\nmicrobatches: 7\n")
        adapter.smp.init(str(path))
    assert adapter.config.microbatches == 7


@case("compat.launch_values_win", "smp.init", worlds=("new",))
def launch_values_win_over_the_dictionary(adapter: Adapter) -> None:
    import os

    os.environ["SM_HP_MP_PARAMETERS"] = '{"partitions": 1, "microbatches": 9}'
    adapter.smp.init({"pipeline_parallel_degree": 1, "microbatches": 2, "pipeline": "simple"})
    assert adapter.config.microbatches == 9
    assert adapter.config.pipeline == "simple"


@case("compat.exception_modules", worlds=("new",))
def exceptions_can_be_gathered_from_their_modules(adapter: Adapter) -> None:
    import importlib
    import inspect

    # The toolkit imports these two, whatever the framework; only PyTorch has the second.
    names = ("backend.exceptions", "torch.exceptions")
    for name in names if adapter.name == "torch" else names[:1]:
        module = importlib.import_module(f"smdistributed.modelparallel.{name}")
        classes = [each for _, each in inspect.getmembers(module, inspect.isclass)]
        assert classes
        assert all(issubclass(each, Exception) for each in classes)


@case("compat.environment_accepted", worlds=("new",))
def variables_of_launch_lines_do_no_harm(adapter: Adapter) -> None:
    import os

    os.environ.update(
        SMP_DISABLE_D2D="1",
        SMP_D2D_GPU_BUFFER_SIZE_BYTES="1",
        SMP_NCCL_THROTTLE_LIMIT="1",
        SMDEBUG_LOG_LEVEL="error",
        NCCL_DEBUG="WARN",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter.smp.init({"pipeline_parallel_degree": 1})


@case("environment.SMP_NCCL_THROTTLE_LIMIT", worlds=("new",))
def throttle_limit_is_accepted(adapter: Adapter) -> None:
    import os

    os.environ["SMP_NCCL_THROTTLE_LIMIT"] = "1"
    adapter.smp.init({"pipeline_parallel_degree": 1})
    assert adapter.smp.is_initialized()


@case(
    "common.in_use.smdistributed_modelparallel___version",
    "compat.trainer_names",
    worlds=("new",),
)
def the_version_is_that_of_the_documented_level(adapter: Adapter) -> None:
    import smdistributed.modelparallel as package

    assert tuple(int(part) for part in package.__version__.split(".")[:2]) >= (1, 10)


def quickly(adapter: Adapter, num_ranks: int = 2) -> dict[str, Any]:
    """Returns how ``run_ranks`` starts a job soonest."""
    alone = num_ranks == 1
    launcher = "python" if alone else "smprun"
    if can_fork(adapter.name):
        launcher = "fork" if alone or adapter.name == "torch" else "smprun-fork"
    return {"launcher": launcher, "preload": preloaded(adapter.name), "timeout": 240}


def by_smprun(adapter: Adapter) -> dict[str, Any]:
    """Returns how it starts a job that smprun watches, of copies where there can be any."""
    how = quickly(adapter)
    return {**how, "launcher": "smprun" if how["launcher"] == "smprun" else "smprun-fork"}


def want_three(framework: str) -> None:
    """Asks for what the number of processes does not allow."""
    adapter_of(framework).smp.init({"pipeline_parallel_degree": 3})


@case(
    "config.pipeline_parallel_degree",
    "smp.init",
    worlds=("new",),
    quick_with=("torch",),
    starts_jobs=True,
)
def degrees_that_do_not_divide_are_refused_with_some_that_do(adapter: Adapter) -> None:
    from smdistributed.modelparallel.common.testing import RanksFailedError, run_ranks

    wanted = "start 3 processes, or set pipeline_parallel_degree to 2"
    with pytest.raises(RanksFailedError, match=wanted):
        run_ranks(2, want_three, args=[adapter.name], **quickly(adapter))


def come_alone(framework: str) -> tuple[str, tuple[int, ...]]:
    """The last of two processes never takes part."""
    smp = adapter_of(framework).smp
    smp.init({"pipeline_parallel_degree": 2, "communication_timeout": 2})
    found: Any = ("", ())
    if smp.rank() == 0:
        try:
            smp.allgather(1, smp.WORLD)
        except RuntimeError as error:
            found = (str(error), error.missing_ranks)  # type: ignore[attr-defined]
    else:
        import time

        time.sleep(5)
    return found  # type: ignore[no-any-return]


@case("common.no_bad_partner", worlds=("new",), starts_jobs=True)
def a_partner_that_does_not_come_is_named(adapter: Adapter) -> None:
    from smdistributed.modelparallel.common.testing import run_ranks

    job = run_ranks(2, come_alone, args=[adapter.name], **quickly(adapter))
    message, missing = job.results[0]
    assert missing == (1,)
    assert "allgather" in message
    assert "rank 1" in message


def fail(framework: str) -> None:
    """One of two processes fails while the other waits for it."""
    smp = adapter_of(framework).smp
    smp.init({"pipeline_parallel_degree": 2, "communication_timeout": 600})
    if smp.rank() == 1:
        raise RuntimeError("gone")
    smp.barrier()


# The tests of smp-tf's failures start such jobs, too.
@case("common.no_bad_partner", worlds=("new",), quick_with=("torch",), starts_jobs=True)
def a_failure_ends_the_whole_job_and_is_told(adapter: Adapter) -> None:
    from smdistributed.modelparallel.common.testing import RanksFailedError, run_ranks

    with pytest.raises(RanksFailedError, match="gone") as error:
        run_ranks(2, fail, args=[adapter.name], **by_smprun(adapter))
    assert error.value.outcome.exit_code != 0
    assert "no end within" not in str(error.value), "the other one waited until its time was up"
