"""Exchanges by reading each other's memory, beside those of process groups."""

from __future__ import annotations

import copy_cases
import pytest
import torch
from world import run, world_of

from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]


def split(degree: int) -> World:
    given = {"tensor_parallel_degree": degree, "ddp": True, "microbatches": 2, "optimize": "speed"}
    return world_of(degree, given)


def run_exchanges() -> dict[str, int]:
    return copy_cases.exchanges()


#: Files stand for memory of GPUs.
by_files = pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs have memory of their own")


@by_files
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_exchanges_are_those_of_process_groups(worlds: Worlds, size: int) -> None:
    found = run(worlds, split(size), run_exchanges)
    assert len(set(map(str, found))) == 1
    assert found[0]["copied"] > 300
    assert found[0]["left"] > 30


def run_case(name: str) -> object:
    found: object = getattr(copy_cases, name)()
    return found


@by_files
@pytest.mark.parametrize("name", ["slow_readers", "training", "trial", "errors"])
def test_behaviour(worlds: Worlds, name: str) -> None:
    found = run(worlds, split(2), run_case, name)
    if name == "training":
        assert found[0]["copied"] > found[0].get("left", 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs GPUs")
@pytest.mark.parametrize("name", ["device_exchanges", "made_on_busy_devices"])
def test_gpus_read_each_others_memory(worlds: Worlds, name: str) -> None:
    run(worlds, split(2), run_case, name)
