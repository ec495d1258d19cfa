"""What is asked of plans in processes, see ``test_tf_plan``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

L = tf.keras.layers


def planning() -> tuple[str, dict[str, Any]]:
    """Plans in a script, and trains; what the plan leaves behind would show in the numbers."""
    import smdistributed.modelparallel.tensorflow as smp
    from smdistributed.modelparallel.common.errors import ConfigError

    smp.init({"partitions": 1, "microbatches": 2})
    tf.keras.utils.set_random_seed(3)
    net = tf.keras.Sequential([L.Input((4,)), L.Dense(4), L.Dropout(0.5), L.BatchNormalization()])
    model, optimizer = smp.DistributedModel(net), tf.keras.optimizers.Adam()

    @smp.step
    def gradients_of(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        return loss, tape.gradient(loss, model.trainable_variables)

    @smp.step
    def results_of(x: Any) -> Any:
        return model(x, training=False)

    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    before = [each.numpy() for each in net.variables]
    plan = smp.plan(gradients_of, x, devices=2, device="cpu", memory="1GiB")
    after = [each.numpy() for each in net.variables]
    assert all(map(np.array_equal, before, after))
    assert not optimizer.built
    assert int(model._smp_engine.runtime.step_number.numpy()) == 0
    for step, words in ((results_of, "asks for no gradients"), (lambda x: x, "decorate it")):
        with pytest.raises(ConfigError, match=words):
            smp.plan(step, x, devices=2)
    loss, gradients = gradients_of(x)
    pairs = zip([each.accumulate() for each in gradients], model.trainable_variables, strict=True)
    optimizer.apply_gradients(pairs)
    assert np.isfinite(float(loss.reduce_mean()))
    assert not np.array_equal(before[0], net.variables[0].numpy())
    return plan.table(), dict(plan.best.config)
