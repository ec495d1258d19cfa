"""TensorFlow: replicas, whose gradients the library averages."""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.cases.tensorflow.training import plain_gradients, stepped
from conformance.registry import tensorflow_case

_REPLICAS = ("replicas", "both")


def _share(adapter: Any, whole: Any) -> Any:
    """Returns the examples of this replica."""
    return adapter.tensor(np.split(whole, adapter.smp.dp_size())[adapter.smp.dp_rank()])


@tensorflow_case("tensorflow.horovod.1", worlds=_REPLICAS)
def gradients_that_the_library_averages_are_those_of_the_whole_batch(adapter: Any) -> None:
    smp, model = adapter.smp, adapter.chain()
    x, y = adapter.batch(16), adapter.batch(16, seed=1)
    gradients, loss, _ = stepped(adapter, model)(_share(adapter, x), _share(adapter, y))
    means = [smp.allreduce(each.accumulate()) for each in gradients]
    wanted_loss, wanted = plain_gradients(adapter, x, y)
    np.testing.assert_allclose(float(smp.allreduce(loss.reduce_mean())), wanted_loss, rtol=1e-5)
    for place, gradient in adapter.gradients_by_place(model, means).items():
        np.testing.assert_allclose(gradient, wanted[place], atol=1e-6)


@tensorflow_case("tensorflow.horovod.1", worlds=_REPLICAS)
def slices_that_the_library_averages_are_those_of_the_whole_batch(adapter: Any) -> None:
    """Gradients of embeddings; replicas may have different numbers of slices."""
    tf, smp = adapter.tf, adapter.smp
    number = smp.dp_rank() + 1
    own = tf.IndexedSlices(
        values=tf.constant(float(number), shape=[number, 2]),
        indices=tf.range(number),
        dense_shape=tf.constant([3, 2]),
    )
    found = tf.convert_to_tensor(smp.allreduce(own))
    np.testing.assert_allclose(found, [[1.5, 1.5], [1.0, 1.0], [0.0, 0.0]])


@tensorflow_case("tensorflow.horovod.1", worlds=_REPLICAS, is_quick=False)
def fit_averages_over_replicas(adapter: Any) -> None:
    x, y = adapter.batch(16), adapter.batch(16, seed=1)
    found = []
    for model, each, target in (
        (adapter.chain(), _share(adapter, x), _share(adapter, y)),
        (adapter.plain(), x, y),
    ):
        model.compile(optimizer=adapter.tf.keras.optimizers.SGD(0.1), loss="mse")
        model.fit(each, target, batch_size=16, epochs=2, shuffle=False, verbose=0)
        found.append(model.evaluate(x, y, batch_size=16, verbose=0))
    np.testing.assert_allclose(*found, rtol=1e-4)


@tensorflow_case("tensorflow.horovod.2", worlds=_REPLICAS)
def replicas_begin_with_the_weights_of_the_first(adapter: Any) -> None:
    """Whatever each has drawn."""
    tf, smp = adapter.tf, adapter.smp
    tf.keras.utils.set_random_seed(7 + smp.dp_rank())
    layers = [tf.keras.Input((4,)), tf.keras.layers.Dense(4), tf.keras.layers.Dense(2)]
    model = smp.DistributedModel(tf.keras.Sequential(layers))
    smp.step(lambda x: model(x))(adapter.tensor(adapter.batch(8)[:, :4]))
    norms = [float(np.linalg.norm(each)) for each in model.get_weights()]
    assert norms[0] > 0
    every = smp.allgather(norms, smp.DP_GROUP)
    assert all(each == every[0] for each in every), every


@tensorflow_case("tensorflow.horovod.2", worlds=_REPLICAS)
def variables_are_those_of_the_first_replica(adapter: Any) -> None:
    tf, smp = adapter.tf, adapter.smp
    variables = [tf.Variable([float(smp.dp_rank() + 1)] * 2), tf.Variable(smp.dp_rank() + 3)]
    smp.broadcast_variables(variables)
    assert [each.numpy().tolist() for each in variables] == [[1.0, 1.0], 3]
