"""How scripts of Keras users get at variables, gradients and state, see ``tf_beside``.

A generated population: each way to read or write x each place where a script finds values x each
moment of a training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tf_beside import Found, Side, by_name
from tf_calls import WIDTH, rows
from tf_users import dense, model_of

L = tf.keras.layers
Values = Sequence[Any]


def _tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value)


def _text(value: Any) -> Any:
    return tf.strings.length(tf.strings.format("{}", tf.round(_tensor(value) * 100.0)))


def _sizes(values: Values) -> list[int]:
    return [len(values), sum(int(np.prod(each.shape)) for each in values)]


def _by_name(values: Values) -> list[Any]:
    return [tf.norm(_tensor(each)) for each in sorted(values, key=lambda each: each.name)]


def _greatest(values: Values) -> Any:
    norms = tf.stack([tf.norm(_tensor(each)) for each in values])
    return tf.gather(norms, tf.argmax(norms))


def _branch(value: Any) -> Any:
    return tf.cond(tf.norm(_tensor(value)) > 0.5, lambda: 1.0, lambda: 2.0)


#: Each takes the values of a place. These compute tensors, in graphs as well.
TENSORS: dict[str, Callable[[Values], Any]] = {
    "first": lambda values: _tensor(values[0]),
    "last": lambda values: _tensor(values[-1]),
    "slice of a list": lambda values: [_tensor(each) for each in values[1:3]],
    "row": lambda values: values[0][0],
    "rows": lambda values: [tf.reduce_sum(each) for each in tf.unstack(_tensor(values[0]))],
    "norms": lambda values: [tf.norm(_tensor(each)) for each in values],
    "global norm": lambda values: tf.linalg.global_norm([_tensor(each) for each in values]),
    "norms of some": lambda values: tf.add_n([tf.norm(_tensor(v)) for v in values[::2]]),
    "sum": lambda values: sum(tf.reduce_sum(_tensor(each)) for each in values),
    "product of two": lambda values: tf.norm(_tensor(values[0])) * tf.norm(_tensor(values[-1])),
    "difference of two": lambda values: values[0] - values[-2],
    "greatest": _greatest,
    "place of the greatest": lambda v: tf.argmax(tf.stack([tf.norm(_tensor(each)) for each in v])),
    "softmax": lambda values: tf.nn.softmax([tf.norm(_tensor(each)) for each in values]),
    "deviation": lambda values: tf.math.reduce_std([tf.reduce_mean(_tensor(v)) for v in values]),
    "flat": lambda values: tf.concat([tf.reshape(_tensor(v), [-1]) for v in values], 0)[3:30:4],
    "comparison": lambda values: tf.reduce_any(_tensor(values[0]) > _tensor(values[-2])),
    "signs": lambda values: [tf.reduce_sum(tf.sign(_tensor(each))) for each in values],
    "sizes": _sizes,
    "shapes": lambda values: [tuple(each.shape) for each in values],
    "size as a tensor": lambda values: tf.add_n([tf.size(_tensor(each)) for each in values]),
    "text": lambda values: _text(values[-1]),
    "branch": lambda values: _branch(values[-1]),
    "inverse": lambda v: tf.norm(tf.linalg.inv(tf.eye(WIDTH) * 9.0 + _tensor(v[-2])[:WIDTH])),
    "function": lambda values: tf.function(lambda x: tf.norm(x) + 1.0)(_tensor(values[-1])),
    "function of all": lambda values: tf.function(tf.linalg.global_norm)(
        list(map(_tensor, values))
    ),
    "map": lambda values: tf.map_fn(tf.reduce_sum, _tensor(values[-2])),
    "half": lambda values: tf.cast(tf.cast(_tensor(values[-1]), tf.float16), tf.float32),
    "positions": lambda values: tf.where(_tensor(values[-1]) > 0.0, 1.0, 0.0),
    "pairs": lambda values: [_tensor(a) * 2.0 for a, _ in itertools.pairwise(values)],
}
#: These take values into Python.
NUMBERS: dict[str, Callable[[Values], Any]] = {
    "array": lambda values: [np.asarray(each) for each in values],
    "array of a tensor": lambda values: [np.asarray(_tensor(each)) for each in values],
    "array of all": lambda values: np.array([tf.norm(_tensor(each)) for each in values]),
    "numpy": lambda values: [_tensor(each).numpy() for each in values],
    "float": lambda values: [float(tf.norm(_tensor(each))) for each in values],
    "norm by NumPy": lambda values: float(np.sqrt(sum(np.sum(np.square(v)) for v in values))),
    "norms by NumPy": lambda values: [float(np.linalg.norm(_tensor(each))) for each in values],
    "greatest by Python": lambda values: max(float(tf.norm(_tensor(each))) for each in values),
    "decision": lambda values: 1 if tf.norm(_tensor(values[-1])) > 0.5 else 2,
    "decisions": lambda values: sum(bool(tf.reduce_any(_tensor(v) > 0.3)) for v in values),
    "text by Python": lambda values: [f"{float(tf.norm(_tensor(each))):.3f}" for each in values],
    "format": lambda values: [f"{tf.norm(_tensor(each)):.3f}" for each in values],
    "list": lambda values: _tensor(values[-1]).numpy().tolist(),
    "positions of unknown number": lambda v: [tf.where(_tensor(v[-1]) > 0.0), v[-1].shape],
    "masked": lambda values: [tf.boolean_mask(_tensor(v), _tensor(v) > 0.0) for v in values],
    "tensor of a list": lambda values: tf.convert_to_tensor(
        [tf.norm(_tensor(each)) for each in values]
    ),
    "moment of a metric": lambda values: _metric(values),
    "reversed": lambda values: [float(tf.norm(_tensor(each))) for each in reversed(list(values))],
    "enumerated": lambda values: {f"{n}": tf.norm(_tensor(v)) for n, v in enumerate(values)},
}


def _metric(values: Values) -> Any:
    metric = tf.keras.metrics.Mean()
    metric.update_state([float(tf.norm(_tensor(each))) for each in values])
    return metric.result()


def _swap(values: Values) -> None:
    first, last = _tensor(values[0]), _tensor(values[-2])
    values[0].assign(last[:, :WIDTH])
    values[-2].assign(first)


def _average(values: Values) -> Any:
    kept = [tf.Variable(_tensor(each)) for each in values]
    for each, value in zip(kept, values, strict=True):
        each.assign(0.9 * each + 0.1 * tf.ones_like(value))
        value.assign(each)
    return [np.asarray(each) for each in kept]


def _scaled(values: Values) -> None:
    norm = tf.linalg.global_norm([_tensor(each) for each in values])
    for each in values:
        each.assign(_tensor(each) / (1.0 + 0.1 * norm))


def _restored(values: Values) -> None:
    kept = [np.array(each) for each in values]
    for each in values:
        each.assign(tf.zeros_like(each))
    for each, value in zip(values, kept, strict=True):
        each.assign(value * 0.9)


def _by_python(values: Values) -> None:
    for each in values:
        each.assign(np.clip(np.asarray(each), -0.4, 0.4) + 0.01)


def _added(values: Values) -> None:
    values[0].assign_add(0.01 * tf.ones_like(values[0]))
    values[-1].assign_sub(0.01 * tf.ones_like(values[-1]))
    values[0].assign_add(0.1 * _tensor(values[-2])[:, :WIDTH])


#: These write; what they leave is told by all that follows.
WRITES: dict[str, Callable[[Values], Any]] = {
    "swap": _swap,
    "average": _average,
    "scaled": _scaled,
    "restored": _restored,
    "by Python": _by_python,
    "added": _added,
}


def _model(side: Side) -> Any:
    def call(model: Any, x: Any, training: Any) -> Any:
        with side.part(0):
            x = model.second(tf.tanh(model.first(x)))
        with side.part(1):
            return model.fourth(tf.tanh(model.third(x)))

    names = ("first", "second", "third", "fourth")
    return model_of(side, call, **{name: dense(name) for name in names})


def _kernels(model: Any) -> Values:
    return [getattr(model, name).kernel for name in ("first", "second", "third", "fourth")] + [
        model.fourth.bias
    ]


def _slots(optimizer: Any) -> Values:
    every = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    return [each for each in every if len(each.shape) > 0]


#: Where a script finds values: takes the model, the optimizer and gradients.
PLACES: dict[str, Callable[[Any, Any, Values], Values]] = {
    "variables": lambda model, optimizer, gradients: model.trainable_variables,
    "weights": lambda model, optimizer, gradients: model.weights,
    "layers": lambda model, optimizer, gradients: _kernels(model),
    "gradients": lambda model, optimizer, gradients: gradients,
    "slots": lambda model, optimizer, gradients: _slots(optimizer),
}
MOMENTS = ("between", "function", "body", "callback")
CELLS = tuple(
    cell
    for cell in itertools.product(PLACES, MOMENTS)
    if cell not in [("slots", "body"), ("gradients", "callback")]
)


def _tried(ways: dict[str, Callable[[Values], Any]], values: Values, as_graph: bool) -> Any:
    """Returns what each way finds, or why it is refused."""
    from smdistributed.modelparallel.common.errors import SMPError

    found: dict[str, Any] = {}
    for name, way in ways.items():
        try:
            if as_graph:
                # AutoGraph, which parses this whole table for each way, has nothing to convert in
                # them: one shows that it follows them.
                converts = name == next(iter(ways))
                result = tf.function(lambda way=way: way(values), autograph=converts)()
            else:
                result = way(values)
            found[name] = [] if result is None else tf.nest.map_structure(_plain, result)
        except SMPError as error:
            found[name] = f"refused: {error}"
    return found


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float)) else np.asarray(_tensor(value))


def _ways(place: str, moment: str) -> dict[str, Callable[[Values], Any]]:
    ways = dict(TENSORS)
    if moment in ("between", "callback"):
        ways |= NUMBERS
    if place == "slots":  # of names that Keras makes, and vectors beside them
        ways = {name: way for name, way in ways.items() if name not in ("inverse",)}
    if place in ("variables", "layers") and moment != "body":
        in_graphs = ("swap", "scaled", "added")
        names = WRITES if moment != "function" else in_graphs
        ways |= {name: WRITES[name] for name in names if place == "layers" or name != "swap"}
    return ways


def cell(side: Side, place: str, moment: str) -> Found:
    """Trains for two steps, and does all ways of a place at a moment."""
    model, optimizer = _model(side), tf.keras.optimizers.Adam(0.05)
    ways, find = _ways(place, moment), PLACES[place]
    found: list[Any] = []
    if moment == "callback":
        return _by_fit(model, optimizer, ways, find)

    @side.step
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - 0.3))
        gradients = tape.gradient(loss, model.trainable_variables)
        if moment != "body":
            return gradients, loss, {}
        values = find(model, optimizer, gradients)
        numbers = {}
        for name in ("first", "norms", "global norm", "norms of some", "greatest", "softmax"):
            numbers[name] = ways[name](values)
        return gradients, loss, numbers

    for number in range(2):
        gradients, loss, numbers = compute(rows(number))
        means = [each.accumulate() for each in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        found.append(loss.reduce_mean())
        if moment == "body":
            found.append(tf.nest.map_structure(lambda each: each.reduce_mean(), numbers))
        else:
            found.append(_tried(ways, find(model, optimizer, means), moment == "function"))
    return Found(found, by_name(model.trainable_variables, model.trainable_variables))


def _by_fit(model: Any, optimizer: Any, ways: Any, find: Any) -> Found:
    found: list[Any] = []
    callback = tf.keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: found.append(_tried(ways, find(model, optimizer, []), False))
    )
    model.compile(optimizer, "mse")
    x = rows()
    history = model.fit(x, x, batch_size=len(x), epochs=2, verbose=0, callbacks=[callback])
    found.append(history.history["loss"])
    return Found(found, by_name(model.trainable_variables, model.trainable_variables))
