"""The worlds that the tests of smp-torch run in, and new jobs for what needs fresh processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from _pytest.mark.structures import ParameterSet

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.comm.transport import started_by_mpi
from smdistributed.modelparallel.common.testing import Launcher, World, Worlds, run_ranks
from smdistributed.modelparallel.common.testing.jobs import without_copies
from smdistributed.modelparallel.torch.stepping import lockstep

Case = Callable[[], Any]

#: What processes that are copies have from their beginning.
PRELOAD = ("preloaded",)


class Shape(NamedTuple):
    """Degrees of a job; here, since checkpoints keep objects of classes that can be imported."""

    pp: int
    dp: int = 1

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp


class NamedDict(dict[str, int]):
    """A dict of a class of its own, which every rank can import."""


def quick(cases: Iterable[Any], chosen: Container[Any]) -> list[ParameterSet]:
    """Returns parameters of a test, of which those that are not chosen are slow.

    Args:
        cases: values of a parameter; of several, tuples.
        chosen: which of them every run tries.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in chosen else pytest.mark.slow,
        )
        for case in cases
    ]


def compute_here() -> None:
    """Makes new tensors live where the library computes: on this process's GPU if it has one."""
    if torch.cuda.is_available():
        torch.set_default_device("cuda")


def skip_without_devices(num_ranks: int) -> None:
    """Skips the test if this machine has GPUs, but fewer than processes to start."""
    if 0 < torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs, there are {torch.cuda.device_count()}")


def generator(seed: int) -> torch.Generator:
    """Returns a generator of one's own, for tensors where the library computes."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def start(config: Mapping[str, object]) -> Callable[[], object]:
    """Starts the library on a rank; returns what makes cases independent of those before them."""
    smp.init({"communication_timeout": 20, **config})
    if not started_by_mpi():
        # Rank 0 tells of each microbatch by itself; where MPI started them, of small ones together.
        lockstep._ROUND_SECONDS = 0.0
    compute_here()
    return functools.partial(torch.manual_seed, 0)


def world_of(num_ranks: int, config: Mapping[str, object], launcher: Launcher = "fork") -> World:
    """Returns the world of a configuration; files that ask for the same share it."""
    launcher = without_fork(num_ranks, launcher)
    args = (dict(sorted(config.items())),)
    return World(num_ranks, start, args, launcher=launcher, preload=PRELOAD)


def pipeline(
    degree: int, microbatches: int = 4, *, launcher: Launcher = "smprun-fork", **config: object
) -> World:
    """Returns a world whose processes are one pipeline, which talk over MPI as those of users."""
    given = {"pipeline_parallel_degree": degree, "microbatches": microbatches, **config}
    return world_of(degree, given, "fork" if degree == 1 else launcher)


def manual_pipeline(degree: int, microbatches: int = 4, **config: object) -> World:
    """Returns one in which modules are where ``smp.set_partition`` says, else on rank 0.

    Its ranks are copies of one process, which talk as under torchrun.
    """
    placed = {"auto_partition": False, "default_partition": 0}
    return pipeline(degree, microbatches, launcher="fork", **placed, **config)


def replicas(pipelines: int, degree: int, microbatches: int = 4, **config: object) -> World:
    """Returns a world of equal pipelines that share the batch; its ranks are copies of one."""
    given = {"pipeline_parallel_degree": degree, "microbatches": microbatches, "ddp": True}
    given |= config
    return world_of(pipelines * degree, given)


def without_fork(num_ranks: int, launcher: Launcher) -> Launcher:
    """Returns what stands for copies where there are GPUs: what has used one must not fork."""
    return without_copies(launcher, num_ranks) if torch.cuda.is_available() else launcher


def run(
    worlds: Worlds, world: World, body: Callable[..., Any], *args: object, timeout: float = 120
) -> tuple[Any, ...]:
    """Runs a body in a world; returns the values by rank."""
    skip_without_devices(world.num_ranks)
    return worlds.run(world, body, *args, timeout=timeout)


def run_fresh(
    num_ranks: int,
    body: Callable[..., Any],
    *args: object,
    launcher: Launcher = "fork",
    timeout: float = 120,
) -> tuple[Any, ...]:
    """Runs a body in new processes, which call ``smp.init`` themselves; returns the values."""
    skip_without_devices(num_ranks)
    return run_ranks(
        num_ranks,
        body,
        launcher=without_fork(num_ranks, launcher),
        timeout=timeout,
        args=args,
        preload=PRELOAD,
    ).results
