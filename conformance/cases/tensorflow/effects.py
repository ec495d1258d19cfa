"""TensorFlow: what parameters do to the order of work, seen from inside a layer."""

from __future__ import annotations

from typing import Any

from conformance.adapters.base import WIDTH
from conformance.registry import tensorflow_case


def passes_of(adapter: Any) -> list[str]:
    """Returns the passes of a layer of partition 0, on the rank that has it: F and B."""
    tf, seen = adapter.tf, []

    def saying(word: str, tensor: Any) -> Any:
        def say(value: Any) -> Any:
            seen.append(word)
            return value

        said = tf.numpy_function(say, [tensor], tf.float32)
        said.set_shape(tensor.shape)
        return said

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def watched(x: Any) -> Any:
        return saying("F", x), lambda dy: saying("B", dy)

    class Watched(tf.keras.layers.Dense):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return watched(super().call(x))

    # On the last partition, where orders differ from the second microbatch on.
    layers = [*(tf.keras.layers.Dense(WIDTH) for _ in range(3)), Watched(WIDTH)]
    model = adapter.chain(layers, (0, 0, 1, 1))

    @adapter.smp.step
    def train(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        return tape.gradient(loss, model.trainable_variables)

    x = adapter.tensor(adapter.batch(2 * adapter.config.microbatches))
    train(x)  # builds
    seen.clear()
    train(x)
    every: list[list[str]] = adapter.smp.allgather(seen, adapter.smp.PP_GROUP)
    (found,) = (each for each in every if each)
    return found


@tensorflow_case("config.pipeline", "config.microbatches", worlds=("manual",))
def a_simple_schedule_runs_all_forwards_first(adapter: Any) -> None:
    microbatches = adapter.config.microbatches
    assert passes_of(adapter) == ["F"] * microbatches + ["B"] * microbatches


@tensorflow_case("config.pipeline", "config.microbatches", worlds=("pipeline",))
def an_interleaved_schedule_runs_backwards_as_soon_as_it_can(adapter: Any) -> None:
    found, microbatches = passes_of(adapter), adapter.config.microbatches
    assert sorted(found) == ["B"] * microbatches + ["F"] * microbatches
    assert found.index("B") < microbatches
