"""``smp.step(cuda_graphs=True)``: the numbers of passes that run as they are."""

from __future__ import annotations

import itertools

import pytest
import torch
from boxed import boxed
from graph_cases import (
    ANOTHER_WAY,
    LAYERS,
    MICROBATCHES,
    MOMENTS,
    NETS,
    RUN_BACKWARD,
    STEPS,
    answered,
    compare,
    compare_turning,
    launched_by_default,
    lets_models_go,
    taken_down,
)
from world import pipeline, quick, replicas, run, world_of

from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(180)]

WORLDS = {
    "interleaved": pipeline(2, launcher="fork"),
    "zero_bubble": boxed(2, pipeline="zero_bubble"),
}
#: Nets that differ in what they do to a pipeline. What a rank finds in its own modules it finds
#: with one partition, where all are tried.
PASSED_ON = (
    *(
        "plain",
        "normed",
        "cache",
        "compiled, cache",
        "dropout",
        "rebinds",
        "checkpointed",
        "leaves out",
        "asks",
    ),
)
#: Of the moments between steps, those that are tried in other worlds too: what a rank notices by
#: itself it notices beside others.
FEW_MOMENTS = MOMENTS[::4]


@pytest.mark.parametrize(
    ("name", "order"),
    quick(
        itertools.product(NETS, WORLDS),
        [("plain", "interleaved"), *itertools.product(PASSED_ON, ["zero_bubble"])],
    ),
)
def test_models(worlds: Worlds, name: str, order: str) -> None:
    for same, _, _ in (found := run(worlds, WORLDS[order], compare, name, "nothing")):
        assert same
    # On the host compiled code counts as drawing, whatever it computes.
    reason = NETS["compiled" if name == "compiled, cache" else name][1]
    if name in ("dropout", "compiled", "compiled, cache") and torch.cuda.is_available():
        reason = ""
    told = [line for _, _, lines in found for line in lines]
    if reason:
        assert _is_told(reason, told), told
        # On the host both ranks have a compiled block.
        assert max(count for _, count, _ in found) > 0 or name.startswith("compiled")
    else:
        assert not told
        # The third, fourth, fifth and sixth step, and the last of the size that came first.
        assert [count for _, count, _ in found] == [5, 5]


HALF = {
    kind: pipeline(2, launcher="fork", pipeline="zero_bubble", **{kind: True})
    for kind in ("bf16", "fp16")
}


# Losses are scaled in fp16.
@pytest.mark.parametrize("kind", quick(HALF, ["fp16"]))
def test_half_precision(worlds: Worlds, kind: str) -> None:
    for same, count, told in run(worlds, HALF[kind], compare, "plain", "nothing"):
        assert same
        assert (count, told) == (5, [])


REPLICAS = {
    "together": replicas(2, 2),
    "owners": replicas(2, 2, shard_optimizer_state=True, pipeline="zero_bubble"),
}


@pytest.mark.parametrize(
    ("kind", "moment"),
    quick(
        itertools.product(REPLICAS, ["nothing", "accumulated", "gradients_kept"]),
        # In the other steps train without such a moment, too; without a pipeline, see below.
        [("owners", "accumulated")],
    ),
)
def test_replicas(worlds: Worlds, kind: str, moment: str) -> None:
    found = run(worlds, REPLICAS[kind], compare, "normed", moment)
    for same, count, _ in found:
        assert same
        assert count > 0


@pytest.mark.parametrize("moment", quick(MOMENTS, FEW_MOMENTS[2:]))
def test_between_steps(worlds: Worlds, moment: str) -> None:
    found = run(worlds, WORLDS["interleaved"], compare, "factor", moment)
    for same, count, told in found:
        assert same
        assert count > 0 or _runs_backward(moment, told)


def slices(num_ranks: int) -> World:
    """Returns a world of tensor-parallel pairs, which share a pipeline if there are more ranks."""
    given = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": num_ranks // 2}
    return world_of(num_ranks, {**given, "microbatches": 2, "ddp": True, "optimize": "speed"})


def _is_told(reason: str, told: list[str]) -> bool:
    return any(each in line for line in told for each in reason.split("|"))


SHARDS = world_of(
    2,
    {
        "ddp": True,
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 1,
        "microbatches": 4,
    },
)
ONE_PARTITION = {
    "alone": pipeline(1),
    "replicas": replicas(2, 1),
    "slices": slices(2),
    "shards": SHARDS,
}
#: What shards refuse: no rank has a whole gradient, or the memory of a parameter.
REFUSED_BY_SHARDS = (
    *("gradients_kept", "view_kept", "memory", "hooked_after", "gradient_data", "transposed"),
)
MOMENTS_OF_SHARDS = [each for each in MOMENTS if each not in REFUSED_BY_SHARDS]
#: Nets that slices are tried with: one that is captured, one that is not, and one that draws.
SLICED = ("cache", "dropout", "rebinds", "compiled")
#: A module that is split may not be called in another way later.
NETS_IN_SLICES = [each for each in NETS if each != "leaves out"]
#: And shards: one that is captured, one that asks, and one that goes another way.
IN_SHARDS = ("cache", "asks", "counts")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(NETS, ["alone"]),
        *quick(
            itertools.product(NETS_IN_SLICES, ["slices"]), [*itertools.product(SLICED, ["slices"])]
        ),
        *quick(itertools.product(LAYERS, ["slices"]), [("layers that drop", "slices")]),
        *itertools.product(["plain", "normed", "asks"], ["replicas"]),
        *quick(itertools.product(NETS, ["shards"]), [*itertools.product(IN_SHARDS, ["shards"])]),
    ],
)
def test_models_with_one_partition(worlds: Worlds, name: str, kind: str) -> None:
    found = run(worlds, ONE_PARTITION[kind], compare, name, "nothing")
    reason = {**NETS, **LAYERS}[name][1]
    if "not captured" in reason and torch.cuda.is_available():
        reason = ""
    told = [line for _, _, lines in found for line in lines]
    assert _is_told(reason, told) if reason else not told, told
    for same, count, _ in found:
        assert same
        assert count > 0 if _is_told(ANOTHER_WAY, told) else count == (0 if reason else 5)


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        *(("alone", moment) for moment in MOMENTS),
        *quick(
            itertools.product(["slices"], MOMENTS),
            [*itertools.product(["slices"], FEW_MOMENTS[1::2])],
        ),
        *quick(
            itertools.product(["shards"], MOMENTS_OF_SHARDS),
            [*itertools.product(["shards"], MOMENTS_OF_SHARDS[::5])],
        ),
    ],
)
def test_between_steps_with_one_partition(worlds: Worlds, kind: str, moment: str) -> None:
    for same, count, told in run(worlds, ONE_PARTITION[kind], compare, "factor", moment):
        assert same
        assert count > 0 or _runs_backward(moment, told)


@pytest.mark.parametrize("kind", ["alone", "slices", "replicas"])
def test_a_script_asks_for_nothing(worlds: Worlds, kind: str) -> None:
    for count, events in run(worlds, ONE_PARTITION[kind], launched_by_default):
        assert count == 5
        if kind == "replicas":
            # Gradients leave while others are computed.
            assert events[-8:] == ["piece", "bucket"] * 4


@pytest.mark.parametrize("world", [ONE_PARTITION["alone"], WORLDS["interleaved"]])
def test_microbatches_that_are_alike_are_taken_down_once(worlds: Worlds, world: World) -> None:
    for same, num_tapes, num_captured in run(worlds, world, taken_down, True):
        assert same
        assert (num_tapes, num_captured) == (1, STEPS - 3)


def test_a_microbatch_that_does_something_else_is_found_out(worlds: Worlds) -> None:
    ((same, num_tapes, num_captured),) = run(worlds, ONE_PARTITION["alone"], taken_down, False)
    assert same
    # Of the first, then, when one had gone another way, of each.
    assert num_tapes == 1 + MICROBATCHES
    assert 0 < num_captured < STEPS - 3


_NONE, _ALL, _ONE = [False] * 4, [True] * 4, [False, True, False, False]
#: Of which microbatches of each step something is padding, and in how many it is known by then what
#: is to be launched: each pattern runs as it is twice, and no fifth one is captured.
PADDED = {
    "always": ([_ALL] * 5, 3),
    "in turns": ([_NONE, _ONE] * 4, 4),
    "in the end": ([_NONE] * 4 + [_ONE] * 4 + [_NONE], 5),
    "each time elsewhere": ([list(each) for each in itertools.product([False, True], repeat=4)], 0),
}


@pytest.mark.parametrize(("patterns", "count"), PADDED.values(), ids=PADDED)
def test_what_batches_answer_is_found_ahead(
    worlds: Worlds, patterns: list[list[bool]], count: int
) -> None:
    ((same, launched),) = run(worlds, ONE_PARTITION["alone"], answered, patterns, patterns)
    assert same
    assert launched == count


def test_ranks_that_are_answered_otherwise_decide_together(worlds: Worlds) -> None:
    patterns = [_NONE, _ONE, _NONE, _ALL, _NONE, _NONE, _ONE, _ONE]
    found = run(worlds, slices(2), answered, patterns, [_NONE] * len(patterns))
    assert all(same for same, _ in found)
    assert len({count for _, count in found}) == 1


def _runs_backward(moment: str, told: list[str]) -> bool:
    """Whether passes were not captured since code of the script runs in backward passes."""
    reasons = ("runs in a backward pass", "BackwardHookFunction")
    return moment in RUN_BACKWARD and any(each in line for line in told for each in reasons)


#: What may be done on one rank of a tensor-parallel group alone: it concerns its examples alone.
@pytest.mark.parametrize(
    ("moment", "num_ranks"),
    quick(
        [
            # What one rank alone does to slices between steps is refused.
            *itertools.product(["attribute", "module_hooked"], [2]),
            ("attribute", 4),
        ],
        [("module_hooked", 2), ("attribute", 4)],
    ),
)
def test_ranks_of_a_tensor_parallel_group_decide_together(
    worlds: Worlds, num_ranks: int, moment: str
) -> None:
    found = run(worlds, slices(num_ranks), _on_one_rank, moment)
    assert all(same for same, _, _ in found)
    counts = [count for _, count, _ in found]
    assert min(counts) > 0
    pairs = zip(counts[::2], counts[1::2], strict=True)
    assert all(one == other for one, other in pairs), counts


def _on_one_rank(moment: str) -> tuple[bool, int, list[str]]:
    return compare("factor", moment, first_alone=True)


# Every run tries slices in a pipeline of which one rank alone does something.
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["nothing", "evaluated"])
def test_slices_in_a_pipeline(worlds: Worlds, moment: str) -> None:
    for same, count, _ in run(worlds, slices(4), compare, "factor", moment):
        assert same
        assert count > 0


#: Nets of which nothing is written or drawn, something is written, and something is drawn.
TURNS = [
    *itertools.product(["plain"], ["way", "fails"]),
    *[("averages", "fails"), ("dropout", "way")],
]


@pytest.mark.parametrize(
    ("world", "name", "turn"),
    [
        *quick(
            itertools.product(
                ["interleaved", "alone"],
                ["plain", "normed", "averages", "dropout"],
                ["way", "fails"],
            ),
            [(world, *turn) for world in ("interleaved", "alone") for turn in TURNS],
        ),
        # Of a step that fails, shards have what has been reduced until then.
        ("shards", "averages", "way"),
    ],
)
def test_steps_that_turn_into_something_else(
    worlds: Worlds, world: str, name: str, turn: str
) -> None:
    found = run(worlds, {**WORLDS, **ONE_PARTITION}[world], compare_turning, name, turn)
    assert all(same for same, _ in found)
    ahead = [count for _, count in found]
    # What turns into something else is known too late; what is written or drawn would be seen.
    is_ahead = name == "plain" and world == "interleaved"
    assert ahead[0] > 0 if is_ahead else ahead[0] == 0, ahead
    assert not any(ahead[1:])


@pytest.mark.parametrize(
    ("world", "in_hand"), [("alone", "has"), ("alone", "gets"), ("shards", "gets")]
)
def test_what_is_captured_goes_with_its_model(worlds: Worlds, world: str, in_hand: str) -> None:
    for told, count, is_gone in run(worlds, ONE_PARTITION[world], lets_models_go, in_hand):
        assert (told, count, is_gone) == ([], 2, True)
