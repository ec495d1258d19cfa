"""On GPUs, over NCCL, a distributed step gives the numbers of one process."""

from __future__ import annotations

import functools
from typing import Any

import gpu_cases
import pytest
import torch
from world import Result, run_cases, skip_without_devices, values

from smdistributed.modelparallel.common.testing import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.multiproc, pytest.mark.timeout(200)]


def run_world(partitions: int) -> Any:
    config = {"pipeline_parallel_degree": partitions, "microbatches": gpu_cases.MICROBATCHES}
    return run_cases(config, gpu_cases.cases())


@functools.cache
def outcome(partitions: int) -> tuple[dict[str, Result], ...]:
    return run_ranks(
        partitions,
        run_world,
        launcher="python" if partitions == 1 else "smprun",
        timeout=180,
        args=[partitions],
    ).results


@pytest.fixture(params=[2, 4], ids=["pp2", "pp4"])
def partitions(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    pytest.importorskip("transformers")
    if not torch.cuda.is_available():
        pytest.skip("needs GPUs")
    skip_without_devices(count)
    return count


@pytest.mark.parametrize("case", ["fp32", "bf16_autocast"])
def test_step_gives_the_numbers_of_one_process(partitions: int, case: str) -> None:
    print(case, values(outcome(partitions), case)[0])


def test_dropout_masks_do_not_depend_on_the_partition(partitions: int) -> None:
    (expected,) = values(outcome(1), "dropout")
    for losses in values(outcome(partitions), "dropout"):
        for got, want in zip(losses, expected, strict=True):
            assert got == pytest.approx(want, abs=1e-6)
