"""On GPUs, over NCCL, a distributed step gives the numbers of one process."""

from __future__ import annotations

from typing import Any

import gpu_cases
import pytest
import tensor_cases
import torch
from world import pipeline, run, skip_without_devices, world_of

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.gpu, pytest.mark.multiproc, pytest.mark.timeout(200)]


def run_case(case: str) -> Any:
    return gpu_cases.cases()[case]()


@pytest.fixture(params=[2, 4], ids=["pp2", "pp4"])
def partitions(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    pytest.importorskip("transformers")
    if not torch.cuda.is_available():
        pytest.skip("needs GPUs")
    skip_without_devices(count)
    return count


@pytest.mark.parametrize("case", ["fp32", "bf16_autocast", "host_inputs"])
def test_step_gives_the_numbers_of_one_process(worlds: Worlds, partitions: int, case: str) -> None:
    print(case, run(worlds, pipeline(partitions), run_case, case, timeout=180)[0])


@pytest.mark.parametrize("case", ["host_inputs", "host_inputs_that_are_written"])
@pytest.mark.parametrize("degree", [1, 2])
def test_inputs_on_the_host_go_to_the_device(worlds: Worlds, degree: int, case: str) -> None:
    pytest.importorskip("transformers")
    if not torch.cuda.is_available():
        pytest.skip("needs GPUs")
    skip_without_devices(degree)
    run(worlds, pipeline(degree), run_case, case, timeout=180)


def test_dropout_masks_do_not_depend_on_the_partition(worlds: Worlds, partitions: int) -> None:
    (expected,) = run(worlds, pipeline(1), run_case, "dropout", timeout=180)
    for losses in run(worlds, pipeline(partitions), run_case, "dropout", timeout=180):
        for got, want in zip(losses, expected, strict=True):
            assert got == pytest.approx(want, abs=1e-6)


def run_split(model: str) -> None:
    tensor_cases.EQUALITY[model]()


@pytest.mark.parametrize("model", ["gpt2", "cross", "gptj", "embedding"])
@pytest.mark.parametrize(
    ("size", "config"),
    [
        (2, {}),
        (2, {"optimize": "memory"}),
        (2, {"prescaled_batch": True}),
        (4, {"pipeline_parallel_degree": 2}),
    ],
    ids=["tp2", "tp2-memory", "tp2-prescaled", "pp2-tp2"],
)
def test_tensor_parallelism_gives_the_numbers_of_one_process(
    worlds: Worlds, size: int, config: dict[str, Any], model: str
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs GPUs")
    given = {"tensor_parallel_degree": 2, "microbatches": tensor_cases.MICROBATCHES, "ddp": True}
    run(worlds, world_of(size, {"optimize": "speed", **given, **config}), run_split, model)
