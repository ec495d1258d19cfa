"""A distributed step gives the losses and gradients of one process.

One job a topology runs all its cases; each test looks at one case of one job.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, NamedTuple

import equality_cases
import manual_cases
import pytest
import soundness_cases
import torch
import transformers_cases
from world import Result, run_cases, skip_without_devices, values

from smdistributed.modelparallel.common.testing import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]


class World(NamedTuple):
    num_ranks: int
    config: dict[str, object]
    modules: tuple[str, ...]
    only: tuple[str, ...] = ()


_FEW = ("mlp", "tied_embedding_and_container_tensors", "skip_connections_and_reuse", "dropout")
_MANUAL = {"auto_partition": False, "default_partition": 0}
WORLDS = {
    "one": World(1, {"pipeline_parallel_degree": 1}, ("equality", "soundness")),
    "pp2": World(2, {"pipeline_parallel_degree": 2}, ("equality", "soundness", "transformers")),
    "pp2-manual-simple": World(
        2, {"pipeline_parallel_degree": 2, "pipeline": "simple", **_MANUAL}, ("manual",)
    ),
    "pp2-simple": World(
        2, {"pipeline_parallel_degree": 2, "pipeline": "simple"}, ("equality",), _FEW
    ),
    "pp4": World(4, {"pipeline_parallel_degree": 4}, ("equality", "soundness", "transformers")),
    "pp2-dp2": World(4, {"pipeline_parallel_degree": 2, "ddp": True}, ("equality",)),
}


def run_world(config: dict[str, object], modules: tuple[str, ...], only: tuple[str, ...]) -> Any:
    cases: dict[str, Any] = {}
    if "equality" in modules:
        cases |= equality_cases.cases(only=only)
    if "manual" in modules:
        cases |= manual_cases.cases()
    if "soundness" in modules:
        cases |= soundness_cases.cases()
    if "transformers" in modules and importlib.util.find_spec("transformers"):
        cases |= transformers_cases.cases()
    return run_cases({"microbatches": 4, **config}, cases)


@functools.cache
def outcome(name: str) -> tuple[dict[str, Result], ...]:
    world = WORLDS[name]
    skip_without_devices(world.num_ranks)
    return run_ranks(
        world.num_ranks,
        run_world,
        launcher="python" if world.num_ranks == 1 else "smprun",
        timeout=240,
        args=[world.config, world.modules, world.only],
    ).results


def _pairs() -> list[tuple[str, str]]:
    pairs = []
    for name, world in WORLDS.items():
        if "equality" in world.modules:
            pairs += [(name, case) for case in equality_cases.cases(only=world.only)]
        if "manual" in world.modules:
            pairs += [(name, case) for case in manual_cases.cases()]
        if "soundness" in world.modules:
            pairs += [(name, case) for case in soundness_cases.cases()]
    return pairs


@pytest.mark.parametrize(("world", "case"), _pairs())
def test_step_gives_the_numbers_of_one_process(world: str, case: str) -> None:
    values(outcome(world), case)


@pytest.mark.parametrize("model", transformers_cases.NAMES)
@pytest.mark.parametrize("world", ["pp2", "pp4"])
def test_transformers_give_the_numbers_of_one_process(world: str, model: str) -> None:
    pytest.importorskip("transformers")
    values(outcome(world), model)


def test_transformers_with_padding_in_some_microbatches() -> None:
    pytest.importorskip("transformers")
    values(outcome("pp2"), "padding_in_some_microbatches")


@pytest.mark.parametrize("world", ["pp2", "pp4"])
@pytest.mark.parametrize(
    "case",
    [
        "blocks_with_dropout_left_out_at_random",
        "functional_dropout_in_a_split_module",
        "layer_dropped_at_random",
        "modules_that_a_forward_adds",
    ],
)
def test_random_numbers_of_split_modules_do_not_depend_on_the_partition(
    world: str, case: str
) -> None:
    assert values(outcome(world), case)[0] == values(outcome("one"), case)[0]


@pytest.mark.parametrize("world", ["pp2", "pp2-simple", "pp4"])
def test_dropout_masks_do_not_depend_on_the_partition(world: str) -> None:
    (expected,) = values(outcome("one"), "dropout")
    gradients: dict[str, torch.Tensor] = {}
    for got in values(outcome(world), "dropout"):
        for losses, expected_losses in zip(got["losses"], expected["losses"], strict=True):
            assert [loss.item() for loss in losses] == [loss.item() for loss in expected_losses]
        gradients |= got["gradients"]
    assert gradients.keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        # Each process has a GPU of its own where there are some.
        assert torch.equal(gradients[name].cpu(), gradient.cpu()), name
