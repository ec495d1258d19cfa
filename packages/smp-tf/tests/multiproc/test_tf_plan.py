"""Planning a script of Keras that is not changed for it, and running lines of the plan."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import tf_plan
from tf_worlds import PRELOAD, QUIET, launcher_of

from smdistributed.modelparallel.common.config import load
from smdistributed.modelparallel.common.search.devices import Machine
from smdistributed.modelparallel.common.search.measurement import (
    MEASURE_VARIABLE,
    Measured,
    Wanted,
)
from smdistributed.modelparallel.common.search.plan import Plan
from smdistributed.modelparallel.common.search.profile import (
    PROFILE_VARIABLE,
    Figures,
    ModelProfile,
)
from smdistributed.modelparallel.common.testing import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

#: Its batch has an unknown size, since it does not divide the examples; its callbacks write.
SCRIPT = """
import sys
import numpy as np
import tensorflow as tf
import smdistributed.modelparallel.tensorflow as smp

smp.init({"auto": True} if "auto" in sys.argv else {"partitions": 2, "microbatches": 2})
print(f"{smp.pp_size()} partitions, {smp.dp_size()} replicas", flush=True)
tf.keras.utils.set_random_seed(1)
L = tf.keras.layers


class Said(tf.keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        print("begins", flush=True)


class Kept(tf.keras.callbacks.ModelCheckpoint):
    pass


layers = [L.Dense(32, "relu"), L.Dropout(0.1), L.BatchNormalization(), L.Dense(32), L.Dense(3)]
model = smp.DistributedModel(tf.keras.Sequential([L.Input((16,)), *layers]))
optimizer = tf.keras.optimizers.AdamW(use_ema=True)
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, metrics=["accuracy"])
x, y = np.ones((20, 16), "float32"), np.zeros(20, "int64")
writing = [tf.keras.callbacks.CSVLogger("log.csv"), Kept("kept.weights.h5", save_weights_only=True)]
try:
    is_measured = "measured" in sys.argv
    epochs = 20 if is_measured else 1
    callbacks = [Said(), *([] if is_measured or "auto" in sys.argv else writing)]
    model.fit(x, y, batch_size=8 // smp.dp_size(), epochs=epochs, callbacks=callbacks, verbose=0)
    print("trained", flush=True)
finally:
    print("the script has ended", flush=True)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_is_planned_for_as_it_is(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    (script.parent / "log.csv").write_text("of the training before")
    profile_file = script.parent / "profile.json"
    outcome = run_ranks(
        1,
        script,
        launcher=launcher_of(1),
        timeout=120,
        env={**QUIET, PROFILE_VARIABLE: str(profile_file)},
        preload=PRELOAD,
    )
    assert "begins" in outcome.stdout  # a callback of the script's own
    assert "ended" not in outcome.stdout
    names = {each.name for each in script.parent.iterdir()}
    assert names <= {"train.py", "log.csv", "profile.json", "__pycache__"}
    assert (script.parent / "log.csv").read_text() == "of the training before"
    profile = ModelProfile.from_json(profile_file.read_text())
    whole = sum((unit.own for unit in profile.root.walk()), Figures())
    trained = 16 * 32 + 32 + 2 * 32 + 32 * 32 + 32 + 32 * 3 + 3
    assert (profile.step, profile.optimizer) == ("train_step", "AdamW")
    assert (profile.batch, profile.examples) == (8, 4)
    assert profile.settings["pipeline_parallel_degree"] == 2
    assert whole.trained_elements == trained
    assert whole.optimizer_bytes == 3 * 4 * trained  # two moments, and the average
    assert whole.computation.of_weights == 2 * 4 * (16 * 32 + 32 * 32 + 32 * 3)
    assert profile.beside.computation.num_kernels > 0
    plan = Plan(profile, Machine.of("cpu", 2, memory="1GiB"))
    for line in plan.lines:
        load("tensorflow", line.config, environ={}).topology(2)


def test_a_job_takes_the_best_line_by_itself(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    outcome = run_ranks(
        2,
        script,
        launcher=launcher_of(2),
        timeout=200,
        env={**QUIET, "PYTHONWARNINGS": "ignore"},
        args=["auto"],
        preload=PRELOAD,
    )
    lines = outcome.stdout.splitlines()
    [taken] = (line for line in lines if "smp.init takes the first line: " in line)
    partitions = ast.literal_eval(taken.split("line: ")[1])["pipeline_parallel_degree"]
    words = f"{partitions} partitions, {2 // partitions} replicas"
    assert {"[0] " + words, "[1] " + words} <= set(lines)
    assert outcome.stdout.count("trained") == 2


def test_a_job_that_is_measured_ends_on_all_ranks(script: Path) -> None:
    file = script.parent / "steps"
    outcome = run_ranks(
        2,
        script,
        launcher=launcher_of(2),
        timeout=120,
        env={**QUIET, MEASURE_VARIABLE: Wanted(str(file), "train_step").to_variable()},
        args=["measured"],
        preload=PRELOAD,
    )
    assert "2 partitions, 1 replicas" in outcome.stdout
    assert "the script has ended" not in outcome.stdout
    found = Measured.read(file)
    assert found is not None
    assert (found.device, found.steps) == ("cpu", 10)


def test_a_script_plans_and_stays_as_it_was() -> None:
    [(table, config)] = run_ranks(
        1,
        tf_plan.planning,
        launcher=launcher_of(1),
        timeout=60,
        env=QUIET,
        preload=PRELOAD,
    ).results
    assert "2 x cpu, 1 GiB each" in table
    assert "average gradients" in table
    load("tensorflow", config, environ={}).topology(2)
    json.dumps(config)
