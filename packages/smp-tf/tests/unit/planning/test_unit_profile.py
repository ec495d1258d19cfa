"""A profile has what a call costs, and a plan cuts it as a job cuts the model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import tensorflow as tf
from generated_models import EXAMPLES, LENGTH, WIDTH, generated, traced_model

from smdistributed.modelparallel.common.search.devices import device_of
from smdistributed.modelparallel.common.search.profile import Figures, ModelProfile
from smdistributed.modelparallel.common.search.stages import Cutter
from smdistributed.modelparallel.tensorflow.compat.variables import variable_bytes
from smdistributed.modelparallel.tensorflow.planning.kept_state import Kept
from smdistributed.modelparallel.tensorflow.planning.layers import MEMORY_WEIGHTS
from smdistributed.modelparallel.tensorflow.planning.placement import Placement, place
from smdistributed.modelparallel.tensorflow.planning.unit_profile import CallFigures, unit_profile
from smdistributed.modelparallel.tensorflow.record.tracing import Trace

L = tf.keras.layers
FLOAT = 4


def profile_of(trace: Trace) -> ModelProfile:
    root = unit_profile([(trace, CallFigures.of(trace))], lambda _: Kept())
    made = "step", "Adam", EXAMPLES, EXAMPLES, "single", root
    return ModelProfile("tensorflow", *made, memory_weights=MEMORY_WEIGHTS)


def whole(trace: Trace) -> Figures:
    return sum((unit.own for unit in profile_of(trace).root.walk()), Figures())


def cuts(seed: int, partitions: int, optimize: str) -> tuple[Any, Any]:
    """Returns where a plan and a job put layers, and the bytes of variables of each partition."""
    trace = traced_model(generated(seed))
    placement = Placement()
    place(
        trace,
        placement,
        num_partitions=partitions,
        is_automatic=True,
        default_partition=0,
        optimize=optimize,
    )
    assert placement.assignment is not None
    sizes: Counter[int] = Counter()
    for handle, variable in trace.variable_names.items():
        sizes[placement.homes[variable]] += variable_bytes(trace.captured[handle])
    cutter = Cutter(profile_of(trace), device_of("cpu"))
    # Of other sizes than the recorded one, as microbatches of a plan are.
    planned = cutter._assigned(partitions, 3 * EXAMPLES, 2, False, optimize)
    stages = cutter.stages(partitions, 3 * EXAMPLES, 2, v_shaped=False, optimize=optimize)
    if planned is None:  # some partition of the job has nothing
        return None, None
    held = {rank: own.parameter_bytes for rank, own in enumerate(stages.holdings)}
    return (planned.units, held), (
        placement.assignment.units,
        {rank: sizes[rank] for rank in range(partitions)},
    )


#: What a sample leaves out runs with ``-m slow``.
SEEDS = [*range(3), *(pytest.param(range(3, 200), marks=pytest.mark.slow),)]


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_plan_cuts_as_a_job_does(seeds: int | range) -> None:
    found: Counter[str] = Counter()
    for seed in [seeds] if isinstance(seeds, int) else seeds:
        tf.keras.backend.clear_session()
        for partitions, optimize in ((2, "memory"), (2, "speed"), (3, "memory")):
            planned, job = cuts(seed, partitions, optimize)
            found["too few" if planned is None else "exact"] += 1
            assert planned == job, (seed, partitions, optimize)
    print(dict(found))


def test_a_profile_counts_what_layers_have() -> None:
    inputs = tf.keras.Input((LENGTH, WIDTH), batch_size=EXAMPLES)
    x = L.Dense(16, "relu", name="first")(inputs)
    x = L.BatchNormalization(name="norm")(x)
    model = tf.keras.Model(inputs, L.Dense(3, name="last")(x))
    trace = traced_model(model)
    figures = whole(trace)
    tokens = EXAMPLES * LENGTH
    trained = WIDTH * 16 + 16 + 2 * 16 + 16 * 3 + 3
    assert figures.trained_elements == trained
    assert figures.gradient_bytes == FLOAT * trained
    assert figures.parameter_bytes == FLOAT * (trained + 2 * 16)  # with moving averages
    assert figures.computation.of_weights == 2 * tokens * (WIDTH * 16 + 16 * 3)
    assert figures.computation.of_others == 0
    assert figures.computation.num_modules == 0
    # The result of the first layer is kept for its relu and, normalized, for the last one.
    assert figures.kept_bytes >= FLOAT * tokens * 2 * 16
    assert figures.kept_bytes < figures.made_bytes
    longer = whole(traced_model(model, tf.TensorSpec([EXAMPLES, LENGTH, WIDTH])))
    assert longer == figures


def test_what_a_loop_keeps_counts_for_each_turn() -> None:
    def kept(length: int) -> float:
        inputs = tf.keras.Input((length, WIDTH), batch_size=EXAMPLES)
        model = tf.keras.Model(inputs, L.RNN(L.GRUCell(WIDTH))(inputs))
        return whole(traced_model(model, tf.TensorSpec([EXAMPLES, length, WIDTH]))).kept_bytes

    short, long = kept(6), kept(12)
    assert long == pytest.approx(2 * short, rel=0.1)
    # At least the state and the gates of each turn.
    assert short > 6 * EXAMPLES * 4 * WIDTH * FLOAT


def test_a_model_that_is_called_twice_computes_twice() -> None:
    trace = traced_model(generated(3))
    one = CallFigures.of(trace)
    twice = unit_profile([(trace, one), (trace, one)], lambda _: Kept(1.0, 2.0, 3.0))
    once = unit_profile([(trace, one)], lambda _: Kept(1.0, 2.0, 3.0))
    for more, less in zip(twice.walk(), once.walk(), strict=True):
        assert more.own.computation.of_weights == 2 * less.own.computation.of_weights
        assert more.own.kept_bytes == 2 * less.own.kept_bytes
        assert more.own.parameter_bytes == less.own.parameter_bytes
    own = sum((each.own for each in once.walk()), Figures())
    assert (own.update_bytes, own.update_made_bytes) == (
        2 * own.optimizer_bytes,
        3 * own.optimizer_bytes,
    )
