"""Models that draw random numbers: each kind of draw in each place of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tf_beside import with_library
from tf_calls import WIDTH, rows
from tf_worlds import MICROBATCHES, library

from smdistributed.modelparallel.common.errors import UnsupportedError

Draw = Callable[[Any], Any]


def _float(value: Any) -> Any:
    return tf.cast(value, tf.float32)


#: Each takes a tensor and returns numbers of its shape.
DRAWS: dict[str, Draw] = {
    "uniform": lambda x: tf.random.uniform(tf.shape(x), -1.0, 3.0),
    "normal": lambda x: tf.random.normal(tf.shape(x), 0.5, 2.0),
    "truncated normal": lambda x: tf.random.truncated_normal(tf.shape(x)),
    "integers": lambda x: _float(tf.random.uniform(tf.shape(x), 2, 9, tf.int32)),
    "gamma": lambda x: tf.random.gamma(tf.shape(x), 2.0, 1.5),
    "gamma of each": lambda x: tf.random.gamma([], tf.abs(x) + 1.0),
    "poisson": lambda x: tf.random.poisson(tf.shape(x), 3.0),
    "categories": lambda x: (
        _float(tf.random.categorical(tf.reshape(x, [-1, WIDTH]), 1)[0, 0]) * tf.ones_like(x)
    ),
    "shuffle": lambda x: tf.reshape(
        tf.random.shuffle(tf.reshape(x + tf.range(1.0, 1.0 + WIDTH), [-1])), tf.shape(x)
    ),
    "dropout": lambda x: tf.nn.dropout(x + 5.0, 0.5),
    "with a seed": lambda x: tf.random.normal(tf.shape(x), seed=7),
    "without state": lambda x: tf.random.stateless_normal(tf.shape(x), [1, 2]),
}


def _in_a_loop(draw: Draw, x: Any) -> Any:
    return tf.while_loop(lambda n, y: n < 3, lambda n, y: (n + 1, 0.5 * y + draw(x)), (0, x))[1]


def _in_a_condition(draw: Draw, x: Any) -> Any:
    def goes_on(n: Any, y: Any) -> Any:
        return (n < 1.0) | ((tf.reduce_sum(draw(x)) < 0.0) & (n < 20.0))

    return tf.while_loop(goes_on, lambda n, y: (n + 1.0, y + n), (0.0, x))[1]


def _in_a_branch(draw: Draw, x: Any) -> Any:
    return tf.cond(tf.reduce_sum(tf.abs(x)) > 0.0, lambda: x + draw(x), lambda: x)


def _in_a_case(draw: Draw, x: Any) -> Any:
    place = tf.cast(tf.reduce_sum(tf.abs(x)) > 0.0, tf.int32)
    return tf.switch_case(place, [lambda: x, lambda: x + 2.0 * draw(x)])


def _in_a_function(draw: Draw, x: Any) -> Any:
    function = tf.function(lambda x: x + draw(x))
    return function(x) - 2.0 * function(x)


def _deep(draw: Draw, x: Any) -> Any:
    return tf.function(lambda x: _in_a_branch(lambda x: _in_a_loop(draw, x), x))(x)


#: Each takes a draw and a tensor, and returns a tensor of the same shape.
PLACES: dict[str, Callable[[Draw, Any], Any]] = {
    "top level": lambda draw, x: x + draw(x),
    "loop": _in_a_loop,
    "condition of a loop": _in_a_condition,
    "branch": _in_a_branch,
    "case": _in_a_case,
    "map_fn": lambda draw, x: tf.map_fn(lambda row: row + draw(row), x),
    "vectorized_map": lambda draw, x: tf.vectorized_map(lambda row: row + draw(row), x),
    "scan": lambda draw, x: tf.scan(lambda a, b: 0.5 * a + b + draw(b), x),
    "function": _in_a_function,
    "recompute_grad": lambda draw, x: tf.recompute_grad(lambda x: tf.sin(x) + draw(x))(x),
    "deep": _deep,
}
#: What ``vectorized_map`` takes of these.
_NOT_VECTORIZED = ("gamma", "gamma of each", "poisson", "shuffle", "categories")


def pairs_of(draw: str) -> list[tuple[str, str]]:
    """Returns a draw with each place that it can be in."""
    return [
        (draw, place)
        for place in PLACES
        if not (place == "vectorized_map" and draw in _NOT_VECTORIZED)
    ]


def drawn(pairs: Iterable[tuple[str, str]], seed: int | None) -> list[Any]:
    """Returns what a model computes with these draws in these places, on every rank.

    Shape: by step, of (pairs, batch, ...); half of the pairs on either half of the model.

    Args:
        pairs: names.
        seed: TensorFlow's; None draws with what the job has in its place.
    """
    library().unseeded = 12345
    tf.random.set_seed(seed)
    side, pairs = with_library(), list(pairs)

    class Drawing(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="drawing")
            self.first = tf.keras.layers.Dense(WIDTH, name="first", kernel_initializer="ones")
            self.second = tf.keras.layers.Dense(WIDTH, name="second", kernel_initializer="ones")

        def call(self, x: Any) -> Any:
            results = []
            with side.part(0):
                x = self.first(x) * 0.1
                results += [PLACES[place](DRAWS[draw], x) for draw, place in pairs[::2]]
            with side.part(1):
                y = self.second(x) * 0.1
                results += [PLACES[place](DRAWS[draw], y) for draw, place in pairs[1::2]]
            return results

    model = Drawing()

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            results = model(x)
            loss = tf.add_n([tf.reduce_sum(tf.sin(each)) for each in results])
        return results, tape.gradient(loss, x)

    found = []
    for _ in range(2):
        results, _ = compute(side.share(rows()))
        found.append(np.stack([_everyone(each.merge()) for each in results]))
    return found


def _everyone(tensor: Any) -> Any:
    """Returns the parts of all replicas."""
    import smdistributed.modelparallel.tensorflow as smp

    parts = smp.allgather(tensor.numpy(), smp.DP_GROUP) if smp.dp_size() > 1 else [tensor.numpy()]
    return np.concatenate(parts)


def turns() -> None:
    """Holds that each turn of a loop draws other numbers, and each call of a function."""
    side = with_library()

    class Turning(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="turning")
            self.dense = tf.keras.layers.Dense(WIDTH, name="dense")

        def call(self, x: Any) -> Any:
            draw = DRAWS["normal"]
            function = tf.function(draw)
            with side.part(0):
                x = self.dense(x) * 0.0
                calls = tf.stack([function(x[0]) for _ in range(3)])
            with side.part(1):
                return tf.map_fn(draw, tf.zeros([5, WIDTH])), calls

    model = Turning()
    for output in side.step(lambda x: model(x))(rows()):
        drawn = np.concatenate([each.numpy() for each in output.outputs])
        assert len(np.unique(drawn)) == drawn.size


def _candidates(x: Any) -> Any:
    sampled, _, _ = tf.random.uniform_candidate_sampler(tf.constant([[1]], tf.int64), 1, 4, True, 9)
    return x + _float(sampled)


def _pooled(x: Any) -> Any:
    image = tf.reshape(x, [1, -1, WIDTH, 1])
    return x + tf.reduce_sum(tf.nn.fractional_max_pool(image, [1, 1.2, 1.2, 1], True)[0])


def _truncated(x: Any) -> Any:
    return tf.raw_ops.ParameterizedTruncatedNormal(
        shape=tf.shape(x), means=[2.0], stdevs=[1.5], minvals=[1.0], maxvals=[4.0]
    )


def _cropped(x: Any) -> Any:
    begin, _, _ = tf.image.sample_distorted_bounding_box(
        [9, 9, 3], tf.constant([[[0.0, 0.0, 1.0, 1.0]]]), min_object_covered=0.1
    )
    return x + _float(begin[0])


#: What draws without a stateless form.
REFUSED: dict[str, Draw] = {
    "candidates": _candidates,
    "pooling": _pooled,
    "boxes": _cropped,
    "bounds": _truncated,
}


def refused(name: str, place: str) -> None:
    """Holds that a model with such a draw is refused."""
    side = with_library()

    class Drawing(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="drawing")
            self.first = tf.keras.layers.Dense(WIDTH, name="first")

        def call(self, x: Any) -> Any:
            with side.part(0):
                x = self.first(x)
            with side.part(1):
                return PLACES[place](REFUSED[name], x)

    model = Drawing()
    with pytest.raises(UnsupportedError, match="no stateless form, so that each process would"):
        side.step(lambda x: model(x))(rows())


def in_the_body(place: str) -> list[Any]:
    """Returns what a step has whose body draws without a seed, before the model and after it."""
    tf.random.set_seed(None)
    side = with_library()
    draw = DRAWS["normal"]

    class Halves(side.base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(name="halves")
            self.first = tf.keras.layers.Dense(WIDTH, name="first", kernel_initializer="ones")
            self.second = tf.keras.layers.Dense(WIDTH, name="second", kernel_initializer="ones")

        def call(self, x: Any) -> Any:
            with side.part(0):
                y = self.first(x)
            with side.part(1):
                return self.second(y), x * 1.0  # the input is read on both halves

    model = Halves()

    @side.step
    def compute(x: Any) -> Any:
        noise = PLACES[place](draw, x)
        with tf.GradientTape() as tape:
            y, same = model(noise)
            loss = tf.reduce_sum(y * draw(y))
        return noise, same, loss, tape.gradient(loss, model.trainable_variables)

    noise, same, loss, _ = compute(rows())
    assert np.allclose(noise.merge(), same.merge()), "two processes drew other numbers"
    first, second, *_ = tf.split(rows(), MICROBATCHES)
    assert not np.allclose(noise.outputs[0] - first, noise.outputs[1] - second)
    return [noise.merge().numpy(), loss.stack().numpy()]


def in_a_function_of_the_body(place: str) -> None:
    """Holds that a body is refused that draws without a seed where that cannot be cured."""
    with pytest.raises(UnsupportedError, match=r"without a seed in a loop, a branch or a tf\.func"):
        in_the_body(place)
