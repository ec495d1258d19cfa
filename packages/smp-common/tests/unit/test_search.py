"""The search for the configuration of a job, on profiles made by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal

import pytest

from smdistributed.modelparallel.common.config import load
from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.planning.pass_costs import PassCosts
from smdistributed.modelparallel.common.search.candidates import (
    PIPELINES,
    Configuration,
    configurations,
)
from smdistributed.modelparallel.common.search.devices import Machine, device_like, device_of
from smdistributed.modelparallel.common.search.plan import Plan
from smdistributed.modelparallel.common.search.profile import (
    Computation,
    Figures,
    ModelProfile,
    UnitProfile,
)
from smdistributed.modelparallel.common.search.rank_memory import RankMemory
from smdistributed.modelparallel.common.search.ranking import Estimate, Search, _Bounded
from smdistributed.modelparallel.common.search.stages import Cutter
from smdistributed.modelparallel.common.search.tables import gib, why

EXAMPLES = 2


def transformer(
    num_blocks: int, width: int = 1024, length: int = 512, *, batch: int = 64
) -> ModelProfile:
    """Returns the profile of a transformer in half precision, with an Adam of its own."""
    tokens = EXAMPLES * length

    def weights(name: str, order: int, inputs: int, outputs: int) -> UnitProfile:
        elements = inputs * outputs
        figures = Figures(
            computation=Computation(2.0 * tokens * elements, num_kernels=1, num_modules=1),
            parameter_bytes=2.0 * elements,
            gradient_bytes=2.0 * elements,
            trained_elements=elements,
            optimizer_bytes=12.0 * elements,
            made_bytes=2.0 * tokens * outputs,
            kept_bytes=2.0 * tokens * inputs,
        )
        return UnitProfile(name, order, False, figures, output_bytes=2.0 * tokens * outputs)

    def block(index: int) -> UnitProfile:
        name, order = f"blocks.{index}", 10 * index + 10
        children = (
            weights(f"{name}.mix", order + 1, width, 4 * width),
            weights(f"{name}.up", order + 2, width, 4 * width),
            weights(f"{name}.down", order + 3, 4 * width, width),
        )
        glue = Figures(
            computation=Computation(
                moved_bytes=12.0 * tokens * width, num_kernels=8, num_modules=1
            ),
            made_bytes=8.0 * tokens * width,
            kept_bytes=8.0 * tokens * width,
        )
        return UnitProfile(name, order, True, glue, 2.0 * tokens * width, children=children)

    blocks = tuple(block(index) for index in range(num_blocks))
    children = (
        weights("embedding", 1, 1, 32_000),
        UnitProfile("blocks", 2, True, Figures(), 2.0 * tokens * width, children=blocks),
        weights("head", 10 * num_blocks + 20, width, 32_000),
    )
    root = UnitProfile("", 0, True, Figures(), children=children)
    return ModelProfile("pytorch", "train_step", "AdamW", batch, EXAMPLES, "half", root)


def machine(num_devices: int, memory_bytes: int, *, num_hosts: int = 1) -> Machine:
    return Machine(device_of("h100"), num_devices, num_hosts, memory_bytes)


GIB = 1 << 30
SMALL = transformer(6, batch=16)


def everything(search: Search, profile: ModelProfile, on: Machine) -> list[Estimate]:
    """Returns the estimates of all configurations, simulated one by one."""
    found = [search._bounded(each, fits=True) for each in configurations(profile, on)]
    return [search._first_estimate(each) for each in found if isinstance(each, _Bounded)]


def test_the_best_of_a_plan_are_the_best_of_all() -> None:
    profile, on = transformer(6, 4096, batch=16), machine(8, 14 * GIB)
    search = Search(profile, on)
    plan = search.ranking(5)
    estimates = everything(search, profile, on)
    fitting = [each for each in estimates if each.peak.total <= on.memory_bytes]
    assert len(fitting) <= plan.num_fitting < plan.num_configurations
    expected = sorted(fitting, key=lambda each: each.seconds)[:5]
    assert expected[-1].seconds < 1.3 * expected[0].seconds
    chosen = {each.configuration for each in expected}
    assert {each.configuration for each in plan.best} == chosen
    # Their orders have been looked for once more, as a job does.
    assert set(plan.best) == {search.estimate(each) for each in chosen}
    assert plan.best == Search(profile, on).ranking(5).best


def test_no_estimate_is_below_its_bounds() -> None:
    on = machine(4, 80 * GIB)
    search = Search(SMALL, on)
    tight = Search(SMALL, machine(4, 1))
    for configuration in configurations(SMALL, on):
        bounded = search._bounded(configuration)
        assert isinstance(bounded, _Bounded)
        estimate = search._estimate(bounded)
        assert bounded.bound <= estimate.seconds * (1 + 1e-9)
        least = tight._bounded(configuration)
        assert isinstance(least, Estimate)
        assert least.peak.total <= estimate.peak.total * (1 + 1e-9)


def test_every_line_is_a_configuration_that_the_library_takes() -> None:
    profile = dataclasses.replace(
        SMALL, settings={"tensor_parallel_degree": 2, "pipeline": "simple", "ddp": True}
    )
    chosen = list(configurations(profile, machine(8, 80 * GIB)))
    assert {each.pipeline for each in chosen} == set(PIPELINES)
    assert {each.shards for each in chosen} == {1, 2, 4, 8}
    for each in chosen:
        config = load("pytorch", {**profile.settings, **each.settings(profile)}, environ={})
        config.check_world(8, "pytorch")
        assert config.topology(8).rdp_size == each.replicas
        assert config.tensor_parallel_degree == 1
        if each.partitions > 1 and each.microbatches > 1:
            assert config.pipeline == each.pipeline


def test_the_memory_of_one_process_is_the_sum_of_what_was_measured() -> None:
    on = machine(1, 80 * GIB)
    [estimate] = (
        each
        for each in everything(Search(SMALL, on), SMALL, on)
        if each.configuration.microbatches == 8
    )
    whole = sum((unit.own for unit in SMALL.root.walk()), Figures())
    [memory] = estimate.memory
    assert memory.parameters == whole.parameter_bytes
    assert (memory.gradients, memory.optimizer) == (whole.gradient_bytes, whole.optimizer_bytes)
    head = 2.0 * EXAMPLES * 512 * 32_000  # what a microbatch makes there, on its way
    assert memory.activations == pytest.approx(whole.kept_bytes + head)
    assert memory.reserve == pytest.approx(1 * GIB + 0.10 * (memory.total - memory.reserve))


def test_shards_and_replicas_hold_their_parts() -> None:
    on = machine(4, 80 * GIB)
    by = {each.configuration: each for each in everything(Search(SMALL, on), SMALL, on)}

    def peak(shards: int, *, state: bool = False) -> RankMemory:
        return by[Configuration(1, 1, 4, shards, state, 2, "interleaved")].peak

    whole = sum((unit.own for unit in SMALL.root.walk()), Figures())
    assert peak(1).gradients == 2 * whole.gradient_bytes  # buckets besides
    assert peak(1, state=True).optimizer == whole.optimizer_bytes / 4
    assert peak(4).optimizer == whole.optimizer_bytes / 4
    assert peak(4).gradients == 4 * whole.trained_elements / 4
    # Small enough that all of it stays whole once it is gathered.
    assert peak(4).parameters == pytest.approx(1.25 * whole.parameter_bytes)


def test_what_does_not_fit_is_told_in_bytes_by_kind() -> None:
    plan = Search(SMALL, machine(4, 1 * GIB)).ranking()
    assert not plan.best
    assert plan.num_fitting == 0
    totals = [each.peak.total for each in plan.refused]
    assert totals == sorted(totals)
    assert len({each.configuration.partitions for each in plan.refused}) > 1
    text = why(plan.refused[0].peak)
    assert text.startswith(f"{gib(totals[0])} GiB = ")
    assert all(kind in text for kind in ("optimizer", "activations", "reserve"))


def test_a_batch_that_no_configuration_can_share_out_is_refused() -> None:
    profile = transformer(1, batch=1)
    with pytest.raises(ConfigError, match=r"1 examples cannot be shared out .* 64 devices"):
        Search(profile, machine(64, 80 * GIB)).ranking()


def test_a_model_that_is_computed_again_keeps_less_and_takes_longer() -> None:
    def repeated(unit: UnitProfile) -> UnitProfile:
        own = unit.own
        own = dataclasses.replace(own, recomputed=own.computation, kept_bytes=own.kept_bytes / 8)
        return dataclasses.replace(unit, own=own, children=tuple(map(repeated, unit.children)))

    on = machine(1, 80 * GIB)
    plain = Search(SMALL, on).ranking(1).best[0]
    again = Search(dataclasses.replace(SMALL, root=repeated(SMALL.root)), on).ranking(1).best[0]
    assert again.peak.activations < plain.peak.activations
    assert 1.2 < again.seconds / plain.seconds < 1.4


def test_a_profile_is_read_as_it_was_written() -> None:
    assert ModelProfile.from_json(SMALL.to_json()) == SMALL
    with pytest.raises(ConfigError, match="received format 0: record the step again"):
        ModelProfile.from_json(SMALL.to_json().replace('"version": 4', '"version": 0'))


def test_links_between_hosts_are_slower() -> None:
    alone = Search(SMALL, machine(16, 80 * GIB)).ranking(1).best[0]
    apart = Search(SMALL, machine(16, 80 * GIB, num_hosts=2)).ranking(1).best[0]
    assert alone.seconds < apart.seconds


def test_a_device_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="received 'tpu': name the one that is most like yours"):
        device_of("tpu")


def test_a_device_is_known_by_what_its_driver_says() -> None:
    assert device_like("NVIDIA H100 80GB HBM3").name == "h100"
    assert device_like("NVIDIA A100-SXM4-80GB").name == "a100"
    with pytest.raises(ConfigError, match="received 'Tesla T4'"):
        device_like("Tesla T4")


def test_a_plan_is_for_programs_too(tmp_path: Path) -> None:
    profile = dataclasses.replace(
        transformer(6, 4096, batch=16), settings={"auto": True, "bf16": True}
    )
    plan = Plan(profile, Machine.of("h100", 4, memory="64GiB"), 2)
    assert len(plan.lines) == 2
    assert plan.best.config == {"bf16": True, **plan.best.changes}
    load("pytorch", plan.best.config, environ={}).check_world(4, "pytorch")
    plan.save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["best"][0]["step_seconds"] == plan.best.step_seconds
    assert plan.table().count("\n") > 5
    with pytest.raises(ConfigError, match=r"fit into 0.25 GiB .*(?s:.*)does not fit: "):
        _ = Plan(SMALL, Machine.of("h100", 4, memory="256MiB")).best
    with pytest.raises(ConfigError, match="received 4 on 3 hosts"):
        Machine.of("h100", 4, 3)


def test_the_loss_is_computed_where_the_model_ends() -> None:
    logits = 2.0 * EXAMPLES * 512 * 32_000
    loss = Figures(Computation(moved_bytes=1e6), made_bytes=4 * logits, kept_bytes=logits)
    on = machine(2, 80 * GIB)
    configuration = Configuration(2, 1, 1, 1, False, 8, "simple")
    plain, lossy = (
        next(e for e in everything(Search(p, on), p, on) if e.configuration == configuration)
        for p in (SMALL, dataclasses.replace(SMALL, beside=loss))
    )
    assert lossy.seconds > plain.seconds
    assert lossy.memory[0] == plain.memory[0]
    # All microbatches are kept, and the loss makes more than any module.
    more = lossy.memory[1].activations - plain.memory[1].activations
    assert more == pytest.approx(8 * logits + 3 * logits)


def test_shards_are_summed_in_each_backward_pass() -> None:
    slow = Machine(device_of("l40s"), 8, 2, 80 * GIB)
    search = Search(SMALL, slow)

    def seconds(microbatches: int) -> float:
        configuration = Configuration(1, 1, 8, 8, False, microbatches, "interleaved")
        bounded = search._bounded(configuration)
        assert isinstance(bounded, _Bounded)
        return search._estimate(bounded).seconds

    assert seconds(2) > 1.3 * seconds(1)


def seconds_of(profile: ModelProfile, on: Machine, configuration: Configuration) -> float:
    search = Search(profile, on)
    bounded = search._bounded(configuration, fits=True)
    assert isinstance(bounded, _Bounded)
    return search._estimate(bounded).seconds


@pytest.mark.parametrize(
    ("partitions", "shards", "graphs", "is_captured"),
    [
        (1, 1, "auto", True),
        (1, 2, True, True),
        (1, 4, "auto", True),
        (1, 2, "auto", False),
        (2, 1, "auto", True),
        (2, 2, "auto", False),
        (4, 1, False, False),
    ],
)
def test_a_pass_takes_what_the_host_needs_to_start_it(
    partitions: int, shards: int, graphs: bool | Literal["auto"], is_captured: bool
) -> None:
    tiny = dataclasses.replace(transformer(8, 64, 32, batch=16), graphs=graphs)
    configuration = Configuration(partitions, 1, 4 // partitions, shards, False, 4, "interleaved")
    parts = tiny.root.walk()
    launched = sum(
        unit.own.computation.num_kernels + unit.own.computation.num_modules for unit in parts
    )
    on = machine(4, 80 * GIB)
    # Forward and twice backward, of 4 microbatches.
    least = 3 * 4 * launched * on.device.call_seconds / partitions
    assert (seconds_of(tiny, on, configuration) < least) == is_captured


def test_the_python_of_all_microbatches_runs_before_a_pipeline_computes() -> None:
    on = machine(2, 80 * GIB)
    configuration = Configuration(2, 1, 1, 1, False, 8, "interleaved")
    bounded = Search(SMALL, on)._bounded(configuration)
    assert isinstance(bounded, _Bounded)
    modules = sum(unit.own.computation.num_modules for unit in SMALL.root.walk())
    assert bounded.time.before_passes() == pytest.approx(8 * modules * 12e-6)
    passes = Search(SMALL, on).timeline(configuration).makespan
    whole = passes + bounded.time.before_passes() + bounded.time.after_passes()
    assert seconds_of(SMALL, on, configuration) == pytest.approx(whole)


def test_many_small_kernels_take_longer_than_what_they_do() -> None:
    alone = Machine(device_of("h100"), 1, 1, 80 * GIB)
    wide = transformer(2, 8192, batch=16)
    few, many = (
        seconds_of(wide, alone, Configuration(1, 1, 1, 1, False, number, "interleaved"))
        for number in (1, 16)
    )
    kernels = sum(unit.own.computation.num_kernels for unit in wide.root.walk())
    assert many - few == pytest.approx(15 * 3.5 * kernels * alone.device.kernel_seconds)


def test_blocks_are_computed_again_where_nothing_else_fits() -> None:
    names = tuple(f"blocks.{index}" for index in range(6))
    profile = dataclasses.replace(transformer(6, batch=16), stacks=(names,))
    search, cutter = Search(profile, machine(1, 80 * GIB)), Cutter(profile, device_of("h100"))
    estimates = []
    for every in (0, 2, 1):
        configuration = Configuration(1, 1, 1, 1, False, 8, "interleaved", every)
        bounded = search._bounded(configuration)
        assert isinstance(bounded, _Bounded)
        estimates.append(search._estimate(bounded))
    none, half, every_one = estimates
    assert none.peak.total > half.peak.total > every_one.peak.total
    assert none.seconds < half.seconds < every_one.seconds
    assert every_one.configuration.settings(profile)["checkpointed_blocks"] == 1

    def chosen(memory: float) -> int:
        ranking = Search(profile, machine(1, int(memory) + 1)).ranking(40)
        of_eight = [each for each in ranking.best if each.configuration.microbatches == 8]
        return of_eight[0].configuration.checkpointed_blocks

    assert [chosen(each.peak.total) for each in estimates] == [0, 2, 1]
    kept = [
        sum(piece.memory.kept for piece in stages.pieces)
        for every in (0, 6)
        if (stages := cutter.stages(1, EXAMPLES, 8, v_shaped=False, checkpointed_blocks=every))
    ]
    block = next(unit for unit in profile.root.walk() if unit.name == "blocks.0")
    of_block = sum(unit.own.kept_bytes for unit in block.walk())
    assert kept[0] - kept[1] == of_block - block.output_bytes
    repeated = dataclasses.replace(profile, root=profile.with_checkpoints(1).root)
    tight = Search(repeated, machine(1, 1 * GIB)).ranking()
    assert {each.configuration.checkpointed_blocks for each in tight.refused} == {0}


def test_slices_hold_less_and_exchange_what_they_compute() -> None:
    def sliced(unit: UnitProfile) -> UnitProfile:
        own = unit.own
        is_block = unit.name.startswith("blocks.") and bool(unit.children)
        own = dataclasses.replace(
            own,
            sliced_elements=own.trained_elements if "." in unit.name else 0.0,
            exchanged_bytes=2 * unit.output_bytes if is_block else 0.0,
        )
        return dataclasses.replace(unit, own=own, children=tuple(map(sliced, unit.children)))

    on = machine(4, 80 * GIB)
    wide = transformer(6, 8192, batch=16)
    profile = dataclasses.replace(wide, root=sliced(wide.root), graphs=True)
    assert not wide.is_sliced
    assert {each.slices for each in configurations(wide, on)} == {1}
    found = {each.slices: each for each in configurations(profile, on) if each.microbatches == 1}
    assert set(found) == {1, 2, 4}
    apart = machine(4, 80 * GIB, num_hosts=2)
    assert {each.slices for each in configurations(profile, apart)} == {1, 2}
    for each in configurations(profile, on):
        config = load("pytorch", each.settings(profile), environ={})
        config.check_world(4, "pytorch")
        assert (config.topology(4).tp_size, config.topology(4).dp_size) == (
            each.slices,
            each.lanes,
        )
    search, bounded = Search(profile, on), []
    for slices in (1, 4):
        places = 1, slices, 4 // slices
        configuration = Configuration(*places, 1, False, 1, "interleaved")
        bounded.append(search._bounded(configuration, fits=True))
    whole, shared = bounded
    assert isinstance(whole, _Bounded)
    assert isinstance(shared, _Bounded)
    parts = list(profile.root.walk())
    of_all = sum(each.own.parameter_bytes for each in parts)
    of_slices = sum(each.own.parameter_bytes for each in parts if "." in each.name)
    memory = search._estimate(shared).peak
    assert search._estimate(whole).peak.parameters == of_all
    assert memory.parameters == pytest.approx(of_all - of_slices * 3 / 4)
    assert memory.optimizer == pytest.approx(6 * memory.parameters)
    # The examples of all ranks are gathered, and their sums are scattered.
    of_rank = sum(each.own.exchanged_bytes for each in parts) * 4 / EXAMPLES
    exchange = 3 * 10e-6 + 4 * of_rank * 3 / 4 / (0.6 * 450e9)
    [before], [after] = whole.time.passes, shared.time.passes
    assert after.forward - before.forward == pytest.approx(2 * exchange)
    assert after.backward - before.backward == pytest.approx(2 * exchange)


def test_a_line_of_tensorflow_is_a_configuration_that_it_takes() -> None:
    by_hand = {"auto_partition": False, "default_partition": 0, "pipeline": "simple"}
    profile = dataclasses.replace(SMALL, framework="tensorflow", settings=by_hand, graphs=False)
    chosen = list(configurations(profile, machine(4, 80 * GIB)))
    assert {each.pipeline for each in chosen} == {"interleaved", "simple"}
    assert {each.partitions for each in chosen} == {1, 2, 4}
    for each in chosen:
        config = load("tensorflow", {**by_hand, **each.settings(profile)}, environ={})
        assert config.auto_partition
        assert config.topology(4).rdp_size == each.replicas


def test_a_plan_cuts_by_what_jobs_balance() -> None:
    def counted_alike(unit: UnitProfile) -> UnitProfile:
        children = tuple(map(counted_alike, unit.children))
        # There are 19 leaves besides.
        own = 20.0 if unit.name == "embedding" else float(not children)
        by_word = {"memory": (own, own), "speed": (0.0, float(not children))}
        return dataclasses.replace(unit, children=children, balanced=by_word)

    on = machine(2, 80 * GIB)
    profile = dataclasses.replace(
        SMALL,
        framework="tensorflow",
        root=counted_alike(SMALL.root),
        memory_weights={"memory": 0.95, "speed": 0.5},
    )
    assert ModelProfile.from_json(profile.to_json()) == profile
    held = {}
    for each in configurations(profile, on):
        if (each.partitions, each.microbatches, each.pipeline) == (2, 4, "simple"):
            found = Search(profile, on)._bounded(each, fits=True)
            assert isinstance(found, _Bounded)
            held[each.optimize] = found.stages.holdings[0].parameter_bytes
            config = load("tensorflow", {**profile.settings, **each.settings(profile)}, environ={})
            assert config.optimize == each.optimize
    assert held["memory"] == next(
        each.own.parameter_bytes for each in SMALL.root.walk() if each.name == "embedding"
    )
    assert held["speed"] > held["memory"]
    said = dataclasses.replace(profile, settings={"optimize": "speed"})
    assert {each.optimize for each in configurations(said, on)} == {"speed"}
    assert "balanced" in Plan(profile, Machine.of("h100", 2)).table()


def test_what_was_timed_wins_over_data_sheets_on_its_device() -> None:
    def with_times(unit: UnitProfile) -> UnitProfile:
        at = tuple((each, PassCosts(each + 1.0, 2 * each + 2.0, 1.0)) for each in (0.5, 1.0, 4.0))
        own = dataclasses.replace(unit.own, timed=at if unit.own.computation.num_modules else ())
        return dataclasses.replace(unit, own=own, children=tuple(map(with_times, unit.children)))

    root = with_times(SMALL.root)
    assert root.children[0].own.seconds == PassCosts(2.0, 4.0, 1.0)
    # Between what was timed lies what is between, and beyond it what goes on as before.
    assert root.children[0].own.times(2).seconds == PassCosts(3.0, 6.0, 1.0)
    assert root.children[0].own.times(8).seconds == PassCosts(9.0, 18.0, 1.0)
    assert root.children[0].own.times(0.25).seconds == PassCosts(1.5, 3.0, 1.0)
    num_timed = sum(1 for unit in root.walk() if unit.own.timed)
    alone = Configuration(1, 1, 1, 1, False, 8, "interleaved")
    on = machine(1, 80 * GIB)
    timed = dataclasses.replace(SMALL, root=root, timed_on="h100")
    [passes] = bounded_of(Search(timed, on), alone).time.passes
    assert (passes.forward, passes.backward) == pytest.approx((2.0 * num_timed, 4.0 * num_timed))
    assert "operations were timed" in Plan(timed, on, 1).table()
    assert ModelProfile.from_json(timed.to_json()) == timed
    elsewhere = dataclasses.replace(timed, timed_on="h200")
    assert Search(elsewhere, on).estimate(alone) == Search(SMALL, on).estimate(alone)
    assert "estimated from data sheets" in Plan(elsewhere, on, 1).table()
    # Blocks that are computed again take their forward pass once more.
    names = tuple(f"blocks.{index}" for index in range(6))
    stacked = dataclasses.replace(timed, stacks=(names,))
    again = dataclasses.replace(alone, checkpointed_blocks=1)
    [longer] = bounded_of(Search(stacked, on), again).time.passes
    assert longer.forward == passes.forward
    assert 0.5 < (longer.backward - passes.backward) / passes.forward < 1


def bounded_of(search: Search, configuration: Configuration) -> _Bounded:
    found = search._bounded(configuration, fits=True)
    assert isinstance(found, _Bounded)
    return found
