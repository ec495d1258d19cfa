"""One job that runs many cases: a start costs seconds, a case milliseconds."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from _pytest.outcomes import Failed

import smdistributed.modelparallel.torch as smp

Case = Callable[[], Any]


@dataclass(frozen=True)
class Result:
    """What a case did on one rank: its value, or the traceback of its failure."""

    value: Any = None
    failure: str = ""


class NamedDict(dict[str, int]):
    """A dict of a class of its own, which every rank can import."""


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


def run_cases(config: Mapping[str, object], cases: Mapping[str, Case]) -> dict[str, Result]:
    """Runs every case in this job; to be called on every rank."""
    smp.init({"communication_timeout": 20, **config})
    compute_here()
    results = {}
    for name, case in cases.items():
        torch.manual_seed(0)
        try:
            results[name] = Result(value=case())
        except (Exception, Failed):
            results[name] = Result(failure=f"rank {smp.rank()}: {traceback.format_exc()}")
        # Every rank forgets the case's models at the same time.
        gc.collect()
    return results


def values(results: tuple[dict[str, Result], ...], name: str) -> list[Any]:
    """Returns what a case returned on each rank; raises with all tracebacks if it failed."""
    failures = "\n".join(each[name].failure for each in results if each[name].failure)
    assert not failures, failures
    return [each[name].value for each in results]
