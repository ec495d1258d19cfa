"""Tensor parallelism, in real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import captured_passes
import other_passes
import other_passes_inside
import pytest
import rest_reads
import tensor_cases
import tensor_transformers
import weight_reads
from ended_jobs import ends_of
from host_graphs import every_step
from world import quick, run, world_of

from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]


def split(degree: int, ranks: int | None = None, **config: Any) -> World:
    """Returns a world that splits modules over ``degree`` ranks."""
    given = {
        "tensor_parallel_degree": degree,
        "microbatches": tensor_cases.MICROBATCHES,
        "ddp": True,
        "optimize": "speed",
        **config,
    }
    return world_of(ranks or degree, given)


WORLDS = {
    "tp2": split(2),
    # One partition, whose microbatches are captured.
    "tp2-graphs": split(2, communication_timeout=20),
    "tp2-memory": split(2, optimize="memory"),
    "tp2-prescaled": split(2, prescaled_batch=True),
    "tp2-dp2": split(2, 4),
    "tp4": split(4),
    "pp2-tp2": split(2, 4, pipeline_parallel_degree=2),
    "pp2-tp2-simple": split(2, 4, pipeline_parallel_degree=2, pipeline="simple"),
    "pp2-tp2-halves": split(2, 4, pipeline_parallel_degree=2, pipeline="zero_bubble"),
    "pp2-tp2-dp2": split(2, 8, pipeline_parallel_degree=2),
    "pp2-tp2-prescaled": split(2, 4, pipeline_parallel_degree=2, prescaled_batch=True),
}
#: With this, what ranks have of slices is in shards.
SHARDS = {
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 2,
    "sdp_gradient_clipping": float("inf"),
}
#: So many tests share the cases of a population in a pipeline, of which each starts some jobs.
PARTS = 12
#: What the other worlds run of the models that the first runs all.
FEW = {
    "tp2-graphs": (),
    "tp2-memory": ("gpt2", "cross"),
    "tp2-prescaled": ("gpt2", "linear", "embedding"),
    "tp2-dp2": ("gpt2",),
    "tp4": (),
    "pp2-tp2": ("gpt2",),
    "pp2-tp2-simple": (),
    "pp2-tp2-halves": (),
    "pp2-tp2-dp2": (),
    "pp2-tp2-prescaled": (),
}


def run_equality(name: str) -> None:
    tensor_cases.EQUALITY[name]()


def run_pipelined(name: str) -> None:
    tensor_cases.PIPELINED[name]()


def run_behaviour(name: str) -> None:
    tensor_cases.BEHAVIOUR[name]()


@pytest.mark.parametrize(
    ("world", "model"),
    [
        pytest.param(
            world, model, marks=() if model in FEW.get(world, (model,)) else pytest.mark.slow
        )
        for world in WORLDS
        for model in tensor_cases.MODELS
    ],
)
def test_training_is_that_of_one_process(worlds: Worlds, world: str, model: str) -> None:
    run(worlds, WORLDS[world], run_equality, model)


@pytest.mark.parametrize("case", tensor_cases.BEHAVIOUR)
def test_behaviour(worlds: Worlds, case: str) -> None:
    run(worlds, WORLDS["tp2"], run_behaviour, case)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in tensor_cases.QUICK else pytest.mark.slow)
        for case in tensor_cases.PIPELINED
    ],
)
def test_behaviour_in_a_pipeline(worlds: Worlds, case: str) -> None:
    run(worlds, WORLDS["pp2-tp2"], run_pipelined, case)


def run_reads(first: int, stride: int, *, by_roads: bool = False) -> dict[tuple[str, str], int]:
    return weight_reads.population(first, stride, by_roads=by_roads)


def run_roads(first: int, stride: int) -> dict[tuple[str, str], int]:
    return run_reads(first, stride, by_roads=True)


def run_reads_of(name: str, *args: str) -> Any:
    return getattr(weight_reads, name)(*args)


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 11])
def test_reads_of_weights_are_exact_or_refused(worlds: Worlds, stride: int) -> None:
    for found in run(worlds, WORLDS["tp2"], run_reads, 0, stride):
        assert set(found) == {("others", "refused"), ("harmless", "exact")}
        assert sum(found.values()) == len(range(0, 561, stride))


@pytest.mark.parametrize("stride", [pytest.param(7, marks=pytest.mark.slow), 41])
def test_reads_of_weights_in_a_pipeline(worlds: Worlds, stride: int) -> None:
    for found in run(worlds, WORLDS["pp2-tp2"], run_reads, 0, stride, timeout=280):
        assert set(found) == {("others", "refused"), ("harmless", "exact")}


ROADS_IN = {**WORLDS, "tp2-sdp2": split(2, 4, **SHARDS)}
#: What is refused for another reason cannot be recorded, whatever it reads; or its gradients, in
#: shards, cannot be compared.
ENDS_OF_ROADS = {
    ("others", end) for end in ("exact", "refused", "refused for another reason", "not in PyTorch")
}


@pytest.mark.parametrize(
    ("world", "first", "stride"),
    [
        pytest.param("tp2", 5, 1, marks=pytest.mark.slow),
        ("tp2", 5, 29),
        pytest.param("tp2-sdp2", 0, 1, marks=pytest.mark.slow),
        ("tp2-sdp2", 190, 99),  # roads to what is gathered, among others
        *(
            pytest.param("pp2-tp2", first, 7 * PARTS, marks=pytest.mark.slow)
            for first in range(5, 5 + 7 * PARTS, 7)
        ),
    ],
)
def test_no_road_to_a_kernel_reads_a_slice(
    worlds: Worlds, world: str, first: int, stride: int
) -> None:
    def run_from(number: int) -> tuple[dict[tuple[str, str], int], ...]:
        return run(worlds, ROADS_IN[world], run_roads, number, stride, timeout=280)

    assert set(ends_of(run_from, first, stride)) <= ENDS_OF_ROADS


def run_rest(auto: bool, stride: int) -> dict[str, int]:
    return rest_reads.population(auto=auto, stride=stride)


@pytest.mark.parametrize(
    ("auto", "stride"),
    [(False, 29), *(pytest.param(each, 1, marks=pytest.mark.slow) for each in (False, True))],
)
def test_slices_between_steps_are_whole_tensors(worlds: Worlds, auto: bool, stride: int) -> None:
    for found in run(worlds, WORLDS["tp2"], run_rest, auto, stride):
        assert set(found) <= {"exact", "not in PyTorch"}
        assert found["exact"] > 12


def run_roads_at_rest(auto: bool, first: int, stride: int) -> dict[str, int]:
    return rest_reads.by_roads(auto=auto, first=first, stride=stride)


@pytest.mark.parametrize(
    ("auto", "first", "stride"),
    [(False, 3, 41), *(pytest.param(each, 0, 1, marks=pytest.mark.slow) for each in (False, True))],
)
def test_no_road_to_a_kernel_reads_a_slice_between_two_steps(
    worlds: Worlds, auto: bool, first: int, stride: int
) -> None:
    for found in run(worlds, WORLDS["tp2"], run_roads_at_rest, auto, first, stride, timeout=280):
        assert set(found) <= {"exact", "refused", "not in PyTorch"}
        assert found["exact"] > 4 * found.get("refused", 0)


def run_passes(model: str, first: int, stride: int) -> dict[str, int]:
    return other_passes.population(model, first, stride)


@pytest.mark.parametrize(
    ("model", "first", "stride"),
    [
        ("registered", 6, 61),
        ("auto", 12, 151),
        *(
            pytest.param(model, first, 6, marks=pytest.mark.slow)
            for model in ("registered", "auto")
            for first in range(6)
        ),
    ],
)
def test_passes_of_ranks_that_differ(worlds: Worlds, model: str, first: int, stride: int) -> None:
    for found in run(worlds, WORLDS["tp2"], run_passes, model, first, stride, timeout=280):
        assert set(found) <= {"exact", "refused", "not in PyTorch"}


def run_captured_passes(model: str, first: int, stride: int) -> dict[str, int]:
    every_step(cuda_graphs=True)
    return captured_passes.population(model, first, stride)


@pytest.mark.parametrize(
    ("model", "first", "stride"),
    [
        ("registered", 10, 61),
        *(
            pytest.param(model, first, 6, marks=pytest.mark.slow)
            for model in ("registered", "auto")
            for first in range(6)
        ),
    ],
)
def test_captured_passes_of_ranks_that_differ(
    worlds: Worlds, model: str, first: int, stride: int
) -> None:
    def run_from(number: int) -> tuple[dict[str, int], ...]:
        args = model, number, stride
        return run(worlds, WORLDS["tp2-graphs"], run_captured_passes, *args, timeout=280)

    assert set(ends_of(run_from, first, stride)) <= {"exact", "refused", "not in PyTorch"}


def run_passes_that_always_differ() -> dict[str, int]:
    every_step(cuda_graphs=True)
    return captured_passes.from_the_start()


def test_passes_that_always_differ_are_not_captured(worlds: Worlds) -> None:
    for found in run(worlds, WORLDS["tp2-graphs"], run_passes_that_always_differ):
        assert found == {"exact": 3}


def run_passes_inside(model: str, first: int, stride: int) -> dict[str, int]:
    return other_passes_inside.population(model, first, stride)


@pytest.mark.parametrize(
    ("world", "model", "first", "stride"),
    [
        # What registered modules do there is tried by training, below.
        ("pp2-tp2", "auto", 12, 240),
        *(
            pytest.param(world, model, first, PARTS, marks=pytest.mark.slow)
            for world in ("pp2-tp2", "pp2-tp2-simple", "pp2-tp2-halves")
            for model in ("registered", "auto")
            for first in range(PARTS)
        ),
    ],
)
def test_passes_that_differ_inside_modules_of_a_pipeline(
    worlds: Worlds, world: str, model: str, first: int, stride: int
) -> None:
    def run_from(number: int) -> tuple[dict[str, int], ...]:
        args = model, number, stride
        return run(worlds, WORLDS[world], run_passes_inside, *args, timeout=280)

    assert set(ends_of(run_from, first, stride)) <= {"exact", "refused", "not in PyTorch"}


@pytest.mark.parametrize("module", weight_reads.OTHERS)
def test_reads_of_other_split_modules(worlds: Worlds, module: str) -> None:
    for found in run(worlds, WORLDS["tp2"], run_reads_of, "other_modules", module):
        assert found == {("others", "refused"): 8, ("harmless", "exact"): 8}


@pytest.mark.parametrize("place", quick(["parent", "sibling"], ["sibling"]))
def test_reads_in_compiled_modules(worlds: Worlds, place: str) -> None:
    for found in run(worlds, WORLDS["tp2"], run_reads_of, "compiled", place):
        assert found == {("others", "refused"): 2, ("harmless", "exact"): 2}


def test_between_steps_a_slice_stands_for_the_whole(worlds: Worlds) -> None:
    run(worlds, WORLDS["tp2"], run_reads_of, "between_steps")


def test_steps_do_not_see_what_sees_a_slice_between_steps(worlds: Worlds) -> None:
    run(worlds, WORLDS["tp2"], run_reads_of, "kept_between_steps")


def test_scripts_are_told_no_shape_of_a_slice(worlds: Worlds) -> None:
    for ends in run(worlds, WORLDS["pp2-tp2"], run_reads_of, "shapes_by_scripts"):
        assert set(ends) == {"refused"}


def run_join() -> None:
    tensor_cases.joined()


def test_replicas_may_run_out_of_batches(worlds: Worlds) -> None:
    run(worlds, WORLDS["tp2-dp2"], run_join)


def losses_with_dropout() -> list[float]:
    return tensor_cases.dropout_losses()


@pytest.mark.parametrize(
    ("world", "size"), quick([("tp2", 2), ("pp2-tp2", 2), ("tp4", 4)], [("tp2", 2)])
)
def test_dropout_is_that_of_one_process(worlds: Worlds, world: str, size: int) -> None:
    one = world_of(1, {"microbatches": tensor_cases.MICROBATCHES * size, "ddp": True})
    (want,) = run(worlds, one, losses_with_dropout)
    for got in run(worlds, WORLDS[world], losses_with_dropout):
        assert got == pytest.approx(want, rel=2e-6)
    assert len(set(want)) == len(want)


def losses_around_a_checkpoint(path: str, resume: bool) -> list[float]:
    return tensor_cases.saved_losses(path, resume=resume)


LAYOUTS = {
    **{name: WORLDS[name] for name in ("tp2", "pp2-tp2", "tp4")},
    "dp4": world_of(4, {"microbatches": tensor_cases.MICROBATCHES, "ddp": True}),
    "pp2": world_of(2, {"microbatches": 2, "ddp": True, "pipeline_parallel_degree": 2}),
}
QUICK = (("tp2", "pp2-tp2"),)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        pytest.param(one, other, marks=() if (one, other) in QUICK else pytest.mark.slow)
        for one in LAYOUTS
        for other in LAYOUTS
    ],
)
def test_checkpoints_fit_any_degree(
    worlds: Worlds, tmp_path: Path, saved: str, resumed: str
) -> None:
    path = str(tmp_path)
    want = run(worlds, LAYOUTS[saved], losses_around_a_checkpoint, path, False)[0]
    for got in run(worlds, LAYOUTS[resumed], losses_around_a_checkpoint, path, True):
        assert got == pytest.approx(want, rel=1e-5)


def run_family(name: str) -> None:
    tensor_transformers.family_case(name)


def run_transformers(name: str, *args: object) -> None:
    getattr(tensor_transformers, name)(*args)


@pytest.mark.parametrize(
    ("world", "family"),
    [
        pytest.param(world, family, marks=() if world == "tp2" else pytest.mark.slow)
        for world in ("tp2", "pp2-tp2", "tp2-dp2", "tp2-memory")
        for family in tensor_transformers.FAMILIES
    ],
)
def test_transformers_give_their_own_numbers(worlds: Worlds, world: str, family: str) -> None:
    pytest.importorskip("transformers")
    run(worlds, WORLDS[world], run_family, family)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "t5" else pytest.mark.slow)
        for name in tensor_transformers.OTHERS
    ],
)
def test_other_transformers_are_split_by_their_linears(worlds: Worlds, name: str) -> None:
    hf = pytest.importorskip("transformers")
    if name == "llama" and not hasattr(hf, "LlamaForCausalLM"):
        pytest.skip(f"transformers {hf.__version__} has no Llama")
    run(worlds, WORLDS["tp2"], run_transformers, "other_case", name)


def test_transformers_are_refused_by_name(worlds: Worlds) -> None:
    pytest.importorskip("transformers")
    run(worlds, WORLDS["tp2"], run_transformers, "refused")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_transformers_generate_what_the_whole_model_does(worlds: Worlds, family: str) -> None:
    pytest.importorskip("transformers", minversion="5")
    run(worlds, WORLDS["tp2"], run_transformers, "generated", family)


def test_replaced_models_initialise_themselves(worlds: Worlds) -> None:
    pytest.importorskip("transformers")
    run(worlds, WORLDS["tp2"], run_transformers, "initialised_by_nobody")


def test_full_checkpoints_are_those_of_transformers(worlds: Worlds, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run(worlds, WORLDS["tp2"], run_transformers, "full_checkpoints", str(tmp_path))
