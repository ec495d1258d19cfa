"""The kinds of jobs that cases run in: starting processes costs seconds, a case milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from smdistributed.modelparallel.common.testing import Launcher

FRAMEWORKS = ("torch", "tensorflow")
#: TensorFlow builds a graph for each microbatch: two show what four do, in four fifths of the time.
_FEWER: dict[str, dict[str, object]] = {"tensorflow": {"microbatches": 2}}


@dataclass(frozen=True)
class World:
    """A job.

    Attributes:
        name: what cases call it.
        num_ranks: processes.
        config: what ``smp.init`` is given, the same in both frameworks.
        own: by framework, parameters that only it has.
        is_started: whether ``smp.init`` is called before the cases.
        frameworks: where the world is possible.
    """

    name: str
    num_ranks: int
    config: dict[str, object] = field(default_factory=dict)
    own: dict[str, dict[str, object]] = field(default_factory=dict)
    is_started: bool = True
    frameworks: tuple[str, ...] = FRAMEWORKS

    def config_of(self, framework: str) -> dict[str, object]:
        """Returns all parameters."""
        fewer = _FEWER.get(framework, {})
        return {
            "communication_timeout": 30,
            **self.config,
            **{name: value for name, value in fewer.items() if name in self.config},
            **self.own.get(framework, {}),
        }

    def launcher_of(self, framework: str, *, is_hasty: bool = False) -> Launcher:
        """Returns what starts the processes.

        Copies of one process save its imports, where there are no GPUs. One world is started as
        users do it, over MPI.

        Args:
            framework: whose package is tried.
            is_hasty: whether no world needs to be started as users do it.
        """
        if can_fork(framework) and (is_hasty or self.name != "pipeline"):
            return "fork" if framework == "torch" or self.num_ranks == 1 else "smprun-fork"
        return "python" if self.num_ranks == 1 else "smprun"


def can_fork(framework: str) -> bool:
    """Tells whether processes may be copies of one that has imported a framework."""
    if framework == "torch":
        import torch

        return not torch.cuda.is_available()
    return not any(Path("/dev").glob("nvidia[0-9]*"))


def preloaded(framework: str) -> tuple[str, ...]:
    """Returns the modules that such copies have from the start."""
    return ("conformance.preloaded" + ("" if framework == "torch" else f"_{framework}"),)


#: Horovod has no wheels; without it everything but its own rows can be tried.
HAS_HOROVOD = find_spec("horovod") is not None
_REPLICAS: dict[str, dict[str, object]] = {
    "torch": {"ddp": True},
    "tensorflow": {"horovod": HAS_HOROVOD},
}
_SLICES: dict[str, object] = {"tensor_parallel_degree": 2, "ddp": True, "microbatches": 4}
_TWO = {"pipeline_parallel_degree": 2, "microbatches": 4}

WORLDS = {
    world.name: world
    for world in (
        # Cases that call smp.init themselves, each in a process forked for it.
        World("new", 1, is_started=False),
        World("alone", 1, {"pipeline_parallel_degree": 1, "microbatches": 4}),
        World("pipeline", 2, _TWO),
        World(
            "manual",
            2,
            {**_TWO, "auto_partition": False, "default_partition": 1, "pipeline": "simple"},
        ),
        # What parameters of PyTorch alone do to the order of work and to the partition.
        *(
            World(name, 2, {**_TWO, **own}, frameworks=("torch",))
            for name, own in (
                ("one_active", {"active_microbatches": 1}),
                ("two_active", {"active_microbatches": 2}),
                ("by_memory", {"memory_weight": 1.0}),
                ("by_work", {"memory_weight": 0.0}),
                ("untraced", {"memory_weight": 0.0, "skip_tracing": True}),
            )
        ),
        World("deep", 4, {**_TWO, "pipeline_parallel_degree": 4}, frameworks=("torch",)),
        World("replicas", 2, {"pipeline_parallel_degree": 1, "microbatches": 4}, _REPLICAS),
        World("both", 4, _TWO, _REPLICAS),
        # Half precision, and optimizer state that replicas share.
        World("half", 2, {"ddp": True, "microbatches": 2, "fp16": True}, frameworks=("torch",)),
        World("brain", 2, {**_TWO, "bf16": True}, frameworks=("torch",)),
        World(
            "owners",
            2,
            {"ddp": True, "microbatches": 2, "shard_optimizer_state": True},
            frameworks=("torch",),
        ),
        # Parameters in shards: two sharding groups, and limits that these small models reach.
        World(
            "shards",
            4,
            {
                "ddp": True,
                "microbatches": 2,
                "sharded_data_parallel_degree": 2,
                "sdp_param_persistence_threshold": 10,
                "sdp_max_live_parameters": 80,
                "sdp_reduce_bucket_size": 10,
                "sdp_gradient_clipping": 0.05,
            },
            frameworks=("torch",),
        ),
        World("slices", 2, _SLICES, frameworks=("torch",)),
        World("same_batch", 2, {**_SLICES, "prescaled_batch": True}, frameworks=("torch",)),
        World("slices_in_pipelines", 4, {**_SLICES, **_TWO}, frameworks=("torch",)),
        World(
            "spread",
            4,
            {**_TWO, "placement_strategy": "spread"},
            {**_REPLICAS, "tensorflow": {**_REPLICAS["tensorflow"], "optimize": "speed"}},
        ),
    )
}
