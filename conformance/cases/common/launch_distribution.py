"""What starts the processes of a job."""

from __future__ import annotations

import pytest

from conformance.adapters.base import Adapter
from conformance.bench import bench
from conformance.registry import job_case
from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError

_STARTS = """
import os, smdistributed.modelparallel.{framework} as smp
smp.init({{"microbatches": 2}})
print("size", smp.size(), smp.pp_size(), os.environ["SHOWN"], os.environ["FI_PROVIDER"])
"""


@job_case(
    "launch.estimators.strategy",
    "launch.distribution_distributio.model_parallel",
    "launch.distribution_distributio.mpi",
    "launch.distribution_distributio.hand_over",
    "launch.distribution_distributio.efa_hint",
)
def a_model_parallel_job_runs(adapter: Adapter) -> None:
    parallel = {"enabled": True, "parameters": {"partitions": 2, "microbatches": 4}}
    options = "-x SHOWN=1 -x FI_PROVIDER=efa --mca btl_vader_single_copy_mechanism none"
    mpi = {"enabled": True, "processes_per_host": 2, "custom_mpi_options": options}
    strategy = {"smdistributed": {"modelparallel": parallel}, "mpi": mpi}
    with bench(adapter) as place:
        job = place.run(_STARTS.format(framework=adapter.name), distribution=strategy)
        assert "size 2 2 1 efa" in place.log(job)
        written = job.hyperparameters()
        assert written["mp_parameters"] == parallel["parameters"]
        assert written["sagemaker_mpi_num_of_processes_per_host"] == 2
        for wrong, match in (
            ({"smdistributed": {"modelparallel": parallel}}, "mpi.enabled"),
            ({**strategy, "mpi": {**mpi, "processes_per_host": 9}}, "must not exceed the GPUs"),
            ({**strategy, "mpi": {**mpi, "process_per_host": 2}}, "processes_per_host"),
            ({**strategy, "mpi": {**mpi, "custom_mpi_options": "NCCL_DEBUG INFO"}}, "MPI options"),
        ):
            with pytest.raises(ConfigError, match=match):
                place.make(distribution=wrong, instance_type="ml.p3.16xlarge")


@job_case("launch.distribution_distributio.horovod_alone")
def any_script_of_mpi_is_started(adapter: Adapter) -> None:
    script = "from mpi4py import MPI; print('sum', MPI.COMM_WORLD.allreduce(1))"
    with bench(adapter) as place:
        job = place.run(script, distribution={"mpi": {"enabled": True, "processes_per_host": 2}})
        assert place.log(job).count("sum 2") == 2


@job_case("launch.distribution_distributio.data_parallel_library")
def the_data_parallel_library_is_refused(adapter: Adapter) -> None:
    data_parallel = {"dataparallel": {"enabled": True}}
    with bench(adapter) as place, pytest.raises(UnsupportedError, match="another library"):
        place.make(distribution={"smdistributed": data_parallel})
    both = {**data_parallel, "modelparallel": {"enabled": True, "parameters": {"partitions": 2}}}
    mpi = {"enabled": True, "processes_per_host": 2}
    with bench(adapter) as place, pytest.raises(ConfigError, match="exclude each other"):
        place.make(distribution={"smdistributed": both, "mpi": mpi})


@job_case("launch.distribution_distributio.parameter_servers", quick_with=("tensorflow",))
def a_cluster_of_parameter_servers_is_described(adapter: Adapter) -> None:
    script = """
import json, os, time
config = json.loads(os.environ["TF_CONFIG"])
print("is", config["task"]["type"], {kind: len(found) for kind, found in config["cluster"].items()})
if config["task"]["type"] != "chief":
    time.sleep(60)
"""
    strategy = {"parameter_server": {"enabled": True}}
    with bench(adapter) as place:
        if adapter.name == "torch":
            with pytest.raises(ConfigError, match="is for tensorflow"):
                place.make(instance_count=2, distribution=strategy)
            return
        job = place.run(script, instance_count=2, distribution=strategy)
        assert "is chief {'chief': 1, 'worker': 1, 'ps': 2}" in place.log(job)
        mpi = {"enabled": True, "processes_per_host": 1}
        with pytest.raises(ConfigError, match="exclude each other"):
            place.make(distribution={**strategy, "mpi": mpi})
