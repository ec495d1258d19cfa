"""Bodies that train in replicas of a model, see ``tf_beside``."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH

L = tf.keras.layers
WORDS = 50


def embeddings(side: Side) -> Found:
    """Adam on slices, of which each step has others."""

    class Words(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="words")
            self.table = L.Embedding(WORDS, WIDTH, name="table")
            self.head = L.Dense(WORDS, name="head")

        def call(self, x: Any) -> Any:
            with side.part(0):
                x = self.table(x)
            with side.part(1):
                return self.head(x)

    model, optimizer = Words(), tf.keras.optimizers.Adam(0.1, clipnorm=0.5)

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.keras.losses.sparse_categorical_crossentropy(x, model(x), from_logits=True)
            loss = tf.reduce_mean(losses)
        return tape.gradient(loss, model.trainable_variables), loss

    losses = []
    for number in range(4):
        words = tf.constant(np.random.RandomState(number).randint(0, WORDS, (16, 3)))
        gradients, loss = compute(side.share(words))
        means = [side.mean(each.accumulate()) for each in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        losses.append(side.mean(loss.reduce_mean()))
    return Found(losses, by_name(model.trainable_variables, model.trainable_variables))


def begin_alike() -> None:
    """Replicas that draw unlike weights begin with those of the first; layers' seeds stay."""
    import smdistributed.modelparallel.tensorflow as smp

    tf.keras.utils.set_random_seed(5 + smp.dp_rank())
    layers = [L.Dense(WIDTH, name="a"), L.Dropout(0.5, name="drop"), L.Dense(WIDTH, name="b")]
    layers[0].build((None, WIDTH))  # it has its values before the first call
    drawn = float(tf.norm(layers[0].kernel))
    model = smp.DistributedModel(tf.keras.Sequential([tf.keras.Input((WIDTH,)), *layers]))
    smp.step(lambda x: model(x, training=True))(tf.ones([8, WIDTH]))
    found = [float(tf.norm(model.get_layer(name).kernel)) for name in ("a", "b")]
    every = smp.allgather((drawn, found), smp.DP_GROUP)
    assert every[0][0] != every[1][0]
    assert every[0][1] == every[1][1], every
    np.testing.assert_allclose(found[0], every[0][0], rtol=1e-6)
