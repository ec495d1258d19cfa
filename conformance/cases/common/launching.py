"""What a launcher hands over: the envelope of a configuration, options of mpirun, variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from conformance.adapters import adapter_of
from conformance.adapters.base import Adapter
from conformance.cases.common.starting import quickly
from conformance.registry import case
from conformance.worlds import can_fork

NEW = ("new",)
_PARAMETERS = {"partitions": 1, "microbatches": 3}


def _envelope(**changes: Any) -> dict[str, Any]:
    return {
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": _PARAMETERS}},
        "mpi": {"enabled": True, "processes_per_host": 2},
        **changes,
    }


def _dry_run(document: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
    """Asks smprun what it would do with a configuration file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.json")
        path.write_text(json.dumps(document))
        launcher = ("-m", "smdistributed.modelparallel.common.launcher")
        script = Path(folder, "train.py")
        script.touch()
        words = (sys.executable, *launcher, "--dry-run", "--config", path, *options, script)
        return subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)


@case("launch.parameters", "launch.enabled", "launch.mpi.enabled", worlds=NEW)
def an_envelope_of_the_launch_is_read(adapter: Adapter) -> None:
    os.environ["SM_HP_MP_PARAMETERS"] = json.dumps(_PARAMETERS)
    adapter.smp.init()
    assert adapter.config.microbatches == 3
    done = _dry_run(_envelope())
    assert done.returncode == 0, done.stderr
    assert "microbatches" in done.stdout


@case("launch.mpi.processes_per_host", worlds=NEW)
def processes_per_host_is_the_size_of_the_job(adapter: Adapter) -> None:
    done = _dry_run(_envelope(mpi={"enabled": True, "processes_per_host": 3}))
    assert done.returncode == 0, done.stderr
    assert "-n 3" in done.stdout


@case("config.C20", worlds=NEW, frameworks=("torch",))
def slices_on_several_hosts_are_warned_about(adapter: Adapter) -> None:
    parameters = {"tensor_parallel_degree": 2, "ddp": True}
    split = {"modelparallel": {"enabled": True, "parameters": parameters}}
    for places, is_warned in (("a:2,b:2", False), ("a:1,b:1,c:1,d:1", True)):
        done = _dry_run(_envelope(smdistributed=split), "--hosts", places)
        assert done.returncode == 0, done.stderr
        assert ("ranks 0, 1 spans hosts 0, 1" in done.stderr) == is_warned, done.stderr


@case("config.C17", worlds=NEW)
def model_parallelism_needs_mpi(adapter: Adapter) -> None:
    for mpi in ({}, {"enabled": False, "processes_per_host": 2}, {"enabled": True}):
        done = _dry_run(_envelope(mpi=mpi))
        assert done.returncode != 0
        assert "mpi" in done.stderr


@case("launch.mpi.custom_mpi_options", "config.C18", worlds=NEW)
def options_of_mpirun_are_handed_on_once(adapter: Adapter) -> None:
    flag = "--mca btl_vader_single_copy_mechanism none"
    mpi = {
        "enabled": True,
        "processes_per_host": 2,
        "custom_mpi_options": f"{flag} -x SHOWN=1 {flag}",
    }
    done = _dry_run(_envelope(mpi=mpi))
    assert done.returncode == 0, done.stderr
    assert "SHOWN=1" in done.stdout
    # As Open MPI 5 has it.
    assert done.stdout.count("--mca smsc") == 1


@case(
    "environment.SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES",
    "environment.SMDDP_AG_SORT_BUFFER_SIZE_BYTES",
    worlds=NEW,
    frameworks=("torch",),
)
def sizes_of_gathering_buffers_are_accepted(adapter: Adapter) -> None:
    os.environ["SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES"] = "8192"
    os.environ["SMDDP_AG_SORT_BUFFER_SIZE_BYTES"] = "8192"
    adapter.smp.init({"pipeline_parallel_degree": 1})
    assert adapter.smp.is_initialized()


def meet(framework: str) -> str:
    """Starts a job; returns the port that torch's processes met at."""
    adapter_of(framework).smp.init({"pipeline_parallel_degree": 2})
    return os.environ["MASTER_PORT"]


@case("environment.MASTER_PORT", worlds=NEW, frameworks=("torch",), starts_jobs=True)
def processes_meet_at_the_given_port(adapter: Adapter) -> None:
    import socket

    from smdistributed.modelparallel.common.testing import run_ranks

    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    # Copies of one process, but smprun's: other copies meet where their server says.
    how = {**quickly(adapter), "launcher": "smprun-fork" if can_fork(adapter.name) else "smprun"}
    ranks = run_ranks(2, meet, env={"MASTER_PORT": port}, args=[adapter.name], **how)
    assert ranks.results == (port, port)


@case("torch.in_use.model_creation_keywords", worlds=NEW, frameworks=("torch",))
def any_keyword_of_tensor_parallelism_is_accepted(adapter: Any) -> None:
    adapter.smp.init({"pipeline_parallel_degree": 1})
    with adapter.smp.model_creation(flash_attention=True, zero_init=False, fused_softmax=True):
        net = adapter.net()
    assert len(list(net.parameters())) == 8


@case("config.C08b", worlds=NEW, frameworks=("torch",))
def a_prescaled_batch_needs_nothing_else(adapter: Adapter) -> None:
    adapter.smp.init({"pipeline_parallel_degree": 1, "prescaled_batch": True})
    assert adapter.config.prescaled_batch is True
    with pytest.raises(RuntimeError, match="ddp"):
        adapter.smp.get_dp_process_group()
