"""A distributed step gives the losses and gradients of one process."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import equality_cases
import manual_cases
import pytest
import soundness_cases
import torch
import transformers_cases
from boxed import boxed
from world import manual_pipeline, pipeline, quick, replicas, run

from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

WORLDS = {
    "one": pipeline(1),
    # Started as users do it, but that each rank has a hash seed of its own, as under torchrun.
    "pp2": replace(pipeline(2, launcher="smprun"), env={"PYTHONHASHSEED": "random"}),
    "pp2-copies": pipeline(2, launcher="fork"),
    "pp2-manual-simple": manual_pipeline(2, pipeline="simple"),
    "pp2-simple": pipeline(2, launcher="fork", pipeline="simple"),
    "pp4": pipeline(4, launcher="fork"),
    "pp2-halves": pipeline(2, launcher="fork", pipeline="zero_bubble"),
    "pp4-halves": boxed(4, pipeline="zero_bubble"),
    "pp2-v": pipeline(2, launcher="fork", pipeline="zero_bubble_v"),
    "pp4-v": boxed(4, pipeline="zero_bubble_v"),
    "pp2-dp2": replicas(2, 2),
    "pp2-dp2-halves": replicas(2, 2, pipeline="zero_bubble"),
    "pp2-dp2-v": replicas(2, 2, pipeline="zero_bubble_v"),
}
_FEW = ("mlp", "tied_embedding_and_container_tensors", "skip_connections_and_reuse", "dropout")


#: What the larger worlds run; everything runs with one and two partitions.
_LARGE = {
    "pp2-copies": ("llama", "bloom"),  # others are among the architectures
    "pp2": (*equality_cases.cases(), *soundness_cases.cases()),
    "pp4": (
        "tied_embedding_and_container_tensors",
        *("modules_that_a_forward_adds", "two_models_in_one_step"),
        *("sum_of_losses_one_inside_the_pipeline", "layer_dropped_at_random"),
    ),
    "pp2-halves": (),
    # What a V runs has halves too.
    "pp4-halves": (),
    "pp2-v": ("skip_connections_and_reuse", "convolutions"),
    "pp4-v": ("backward_of_several_losses", "blocks_that_a_v_cuts"),
    "pp2-dp2-halves": (),
    "pp2-dp2-v": ("backward_passes_per_step",),
    "pp2-dp2": (
        *("batch_norm", "uneven_and_changing_batches", "state_after_three_steps"),
        *("gradients_add_up_without_zero_grad", "backward_passes_per_step"),
    ),
}


def _marks(world: str, case: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if case in _LARGE.get(world, (case,)) else (pytest.mark.slow,)


def run_case(module: str, case: str) -> Any:
    return importlib.import_module(module).cases()[case]()


def _cases() -> list[Any]:
    equality, soundness = list(equality_cases.cases()), list(soundness_cases.cases())
    of_world = {
        "one": {"equality_cases": equality, "soundness_cases": soundness},
        "pp2": {"equality_cases": equality, "soundness_cases": soundness},
        "pp2-manual-simple": {"manual_cases": list(manual_cases.cases())},
        "pp2-simple": {"equality_cases": list(_FEW)},
        "pp4": {"equality_cases": equality, "soundness_cases": soundness},
        "pp2-halves": {"equality_cases": equality, "soundness_cases": soundness},
        "pp4-halves": {"equality_cases": equality, "soundness_cases": soundness},
        "pp2-v": {"equality_cases": equality, "soundness_cases": soundness},
        "pp4-v": {"equality_cases": equality, "soundness_cases": soundness},
        "pp2-dp2": {"equality_cases": equality},
        "pp2-dp2-halves": {"equality_cases": equality},
        "pp2-dp2-v": {"equality_cases": equality},
    }
    return [
        pytest.param(world, module, case, marks=_marks(world, case))
        for world, modules in of_world.items()
        for module, names in modules.items()
        for case in names
    ]


@pytest.mark.parametrize(("world", "module", "case"), _cases())
def test_step_gives_the_numbers_of_one_process(
    worlds: Worlds, world: str, module: str, case: str
) -> None:
    run(worlds, WORLDS[world], run_case, module, case)


@pytest.mark.parametrize(
    ("world", "model"),
    [
        pytest.param(world, model, marks=_marks(world, model))
        for world in ("pp2-copies", "pp2", "pp4", "pp4-halves", "pp2-v", "pp4-v")
        for model in transformers_cases.NAMES
    ],
)
def test_transformers_give_the_numbers_of_one_process(
    worlds: Worlds, world: str, model: str
) -> None:
    pytest.importorskip("transformers")
    run(worlds, WORLDS[world], run_case, "transformers_cases", model)


def test_transformers_with_padding_in_some_microbatches(worlds: Worlds) -> None:
    pytest.importorskip("transformers")
    case = "padding_in_some_microbatches"
    run(worlds, WORLDS["pp2-copies"], run_case, "transformers_cases", case)


@pytest.mark.parametrize(
    "world",
    ["pp2-copies", *(pytest.param(world, marks=pytest.mark.slow) for world in ("pp2", "pp4"))],
)
@pytest.mark.parametrize(
    ("module", "case"),
    [
        ("equality_cases", "blocks_with_dropout_left_out_at_random"),
        ("equality_cases", "functional_dropout_in_a_split_module"),
        ("soundness_cases", "layer_dropped_at_random"),
        ("equality_cases", "modules_that_a_forward_adds"),
    ],
)
def test_random_numbers_of_split_modules_do_not_depend_on_the_partition(
    worlds: Worlds, world: str, module: str, case: str
) -> None:
    call = (run_case, module, case)
    assert run(worlds, WORLDS[world], *call)[0] == run(worlds, WORLDS["one"], *call)[0]


@pytest.mark.parametrize(
    "world", quick(["pp2-copies", "pp2-simple", "pp4", "pp2"], ["pp2-copies", "pp4"])
)
def test_dropout_masks_do_not_depend_on_the_partition(worlds: Worlds, world: str) -> None:
    call = (run_case, "equality_cases", "dropout")
    (expected,) = run(worlds, WORLDS["one"], *call)
    gradients: dict[str, torch.Tensor] = {}
    for got in run(worlds, WORLDS[world], *call):
        for losses, expected_losses in zip(got["losses"], expected["losses"], strict=True):
            assert [loss.item() for loss in losses] == [loss.item() for loss in expected_losses]
        gradients |= got["gradients"]
    assert gradients.keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        # Each process has a GPU of its own where there are some.
        assert torch.equal(gradients[name].cpu(), gradient.cpu()), name
