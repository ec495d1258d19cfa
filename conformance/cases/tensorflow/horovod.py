"""TensorFlow: replicas, whose gradients Horovod averages."""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.cases.tensorflow.training import plain_gradients, stepped
from conformance.registry import tensorflow_case

_REPLICAS = ("replicas", "both", "spread")
_HOROVOD = ("horovod",)


def _share(adapter: Any, whole: Any) -> Any:
    """Returns the examples of this replica."""
    return np.split(whole, adapter.smp.dp_size())[adapter.smp.dp_rank()]


@tensorflow_case("tensorflow.horovod.0", "config.horovod", worlds=_REPLICAS, needs=_HOROVOD)
def the_library_starts_horovod_over_the_data_parallel_group(adapter: Any) -> None:
    import horovod.tensorflow as hvd

    smp = adapter.smp
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size()) == (smp.dp_rank(), smp.dp_size())
    total = hvd.allreduce(adapter.tensor(np.float32(smp.rank())), op=hvd.Sum, name="ranks")
    assert float(total) == sum(smp.get_dp_group())


@tensorflow_case("tensorflow.horovod.1", "config.horovod", worlds=_REPLICAS, needs=_HOROVOD)
def averaged_gradients_are_those_of_the_whole_batch(adapter: Any) -> None:
    import horovod.tensorflow as hvd

    model = adapter.chain()
    x, y = adapter.batch(16), adapter.batch(16, seed=1)
    body = stepped(adapter, model)
    gradients, loss, _ = body(
        adapter.tensor(_share(adapter, x)), adapter.tensor(_share(adapter, y))
    )
    means = [hvd.allreduce(each.accumulate()) for each in gradients]
    wanted_loss, wanted = plain_gradients(adapter, x, y)
    np.testing.assert_allclose(float(hvd.allreduce(loss.reduce_mean())), wanted_loss, rtol=1e-5)
    for place, gradient in adapter.gradients_by_place(model, means).items():
        np.testing.assert_allclose(gradient, wanted[place], atol=1e-6)


@tensorflow_case(
    "tensorflow.horovod.1", "tensorflow.step_function.1", worlds=_REPLICAS[1:2], needs=_HOROVOD
)
def replicas_train_in_one_function(adapter: Any) -> None:
    import horovod.tensorflow as hvd

    tf, smp, model = adapter.tf, adapter.smp, adapter.chain()
    body, optimizer = stepped(adapter, model), tf.keras.optimizers.SGD(0.1)
    x, y = adapter.batch(16), adapter.batch(16, seed=1)

    @tf.function
    def train(x: Any, y: Any) -> Any:
        gradients, loss, _ = body(x, y)
        means = [hvd.allreduce(each.accumulate()) for each in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        return hvd.allreduce(loss.reduce_mean())

    share = [adapter.tensor(_share(adapter, each)) for each in (x, y)]
    losses = [float(train(*share)) for _ in range(3)]
    first, _ = plain_gradients(adapter, x, y)
    np.testing.assert_allclose(losses[0], first, rtol=1e-5)
    assert losses[2] < losses[1] < losses[0]
    weights = [adapter.array(tf.convert_to_tensor(v)) for v in model.trainable_variables]
    for other in smp.allgather(weights, smp.DP_GROUP):
        for mine, theirs in zip(weights, other, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@tensorflow_case("tensorflow.horovod.2", worlds=_REPLICAS, needs=_HOROVOD)
def variables_are_broadcast_after_the_first_batch(adapter: Any) -> None:
    """Replicas that began with other weights go on with those of the first."""
    import horovod.tensorflow as hvd

    tf, smp, model = adapter.tf, adapter.smp, adapter.chain()
    body, optimizer = stepped(adapter, model), tf.keras.optimizers.Adam(0.1)
    x, y = (adapter.tensor(adapter.batch(8, seed=seed)) for seed in (smp.dp_rank(), 9))
    gradients, _, _ = body(x, y)
    means = [each.accumulate() for each in gradients]  # not averaged, so that replicas differ
    optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
    own = optimizer.variables
    variables = [*model.variables, *(own() if callable(own) else own)]

    def values() -> list[Any]:
        return [adapter.array(tf.convert_to_tensor(variable)) for variable in variables]

    before = smp.allgather(values(), smp.DP_GROUP)
    assert any(not np.array_equal(a, b) for a, b in zip(before[0], before[1], strict=True))
    for variable in variables:
        variable.assign(hvd.broadcast(tf.convert_to_tensor(variable), root_rank=0))
    for mine, first in zip(values(), before[0], strict=True):
        np.testing.assert_array_equal(mine, first)
