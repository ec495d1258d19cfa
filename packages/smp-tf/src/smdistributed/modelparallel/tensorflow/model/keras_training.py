"""``fit``, ``evaluate`` and ``predict`` of Keras on a model that is spread over processes.

Keras calls these steps for each batch; each is one call of a step function. Gradients are averaged
over microbatches, and over replicas, before the one update of a batch.

Source: smd_model_parallel_change_log.rst, 1.4.0.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.tensorflow.compat import keras
from smdistributed.modelparallel.tensorflow.compat.isolation import apart
from smdistributed.modelparallel.tensorflow.gradients.replicas import averaged
from smdistributed.modelparallel.tensorflow.model.batch_losses import refuse_sums, weighed_by_masks
from smdistributed.modelparallel.tensorflow.model.small_batches import of_all_sizes
from smdistributed.modelparallel.tensorflow.stepping.function import step


class KerasTraining(tf.keras.Model):  # type: ignore[misc]
    """What Keras's training loop calls of a DistributedModel."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Configures the model for training, as ``tf.keras.Model.compile`` does.

        Raises:
            UnsupportedError: ``jit_compile`` or ``run_eagerly`` is asked for: a step is one graph,
                whose transfers XLA does not compile. Or a loss is no mean over examples. Or the
                model in this one has a training step, loss or metrics of its own.
        """
        refuse_sums(
            kwargs.get("loss", args[1] if len(args) > 1 else None),
            self._smp_engine.runtime.config.microbatches,
        )
        self._smp_refuse_own_training()
        for name in ("jit_compile", "run_eagerly"):
            if kwargs.get(name) is True:
                raise UnsupportedError(
                    f"a DistributedModel cannot be compiled with {name}=True: leave it out. XLA is "
                    "switched on with tf.config.optimizer.set_jit(True)."
                )
        super().compile(*args, **{**kwargs, "jit_compile": False})

    def _smp_refuse_own_training(self) -> None:
        wrapped = getattr(self, "wrapped", None)
        if wrapped is not None and (own := keras.own_training(wrapped)):
            raise UnsupportedError(
                "Keras's training loop runs what the DistributedModel has of it, not what the "
                f"model in it has; {type(wrapped).__name__} has a {', '.join(own)} of its own: "
                "make its class a subclass of smp.DistributedModel, with a step function in "
                "train_step for the gradients, or train it in a loop of your own."
            )

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Trains the model, as ``tf.keras.Model.fit`` does.

        Raises:
            UnsupportedError: a callback writes a whole model, or a training, in a way that is
                not known of several processes.
        """
        if self._smp_engine.runtime.planning is not None:
            # Those of Keras write files before the first batch; no step computes otherwise for it.
            own = [
                each
                for each in tf.nest.flatten(kwargs.pop("callbacks", None))
                if isinstance(each, tf.keras.callbacks.Callback) and not keras.is_of_keras(each)
            ]
            return super().fit(*args, **{**kwargs, "callbacks": own, "verbose": 0})
        for callback in tf.nest.flatten(kwargs.get("callbacks")):
            if isinstance(callback, tf.keras.callbacks.BackupAndRestore):
                self._smp_back_up(callback)
            is_checkpoint = isinstance(callback, tf.keras.callbacks.ModelCheckpoint)
            if is_checkpoint and not callback.save_weights_only and not self._smp_is_writable:
                raise self._smp_cannot_be_written("a ModelCheckpoint of more than weights")
        return super().fit(*args, **kwargs)

    def _smp_back_up(self, callback: Any) -> None:
        """Lets a ``BackupAndRestore`` keep what all processes have."""
        raise NotImplementedError

    @property
    def _smp_is_writable(self) -> bool:
        """Whether Keras can write the model with the state of its optimizer."""
        is_split = self._smp_engine.runtime.topology.pp_size > 1
        return not is_split or (keras.IS_KERAS_3 and hasattr(self, "wrapped"))

    def _smp_cannot_be_written(self, what: str) -> UnsupportedError:
        """Returns the error of writing a model of which Keras cannot read the whole."""
        return UnsupportedError(
            f"{what} writes a model with the state of its optimizer, which is spread over "
            "processes, for a model of Keras 3 in a DistributedModel; received "
            f"{type(self).__name__}, which is a class of its own, or Keras 2: use save_weights and "
            "ModelCheckpoint(save_weights_only=True) for weights, save_model for a SavedModel, and "
            "smp.CheckpointManager for what a training goes on with, in a callback too "
            "(tf.keras.callbacks.LambdaCallback)."
        )

    def make_train_function(self, force: bool = False) -> Any:
        """Makes what ``fit`` calls for each batch."""
        super().make_train_function(force)
        return self._smp_of_all_sizes("train_function", self.train_step)

    def make_test_function(self, force: bool = False) -> Any:
        """Makes what ``evaluate`` calls for each batch."""
        super().make_test_function(force)
        return self._smp_of_all_sizes("test_function", self.test_step)

    def make_predict_function(self, force: bool = False) -> Any:
        """Makes what ``predict`` calls for each batch."""
        super().make_predict_function(force)
        return self._smp_of_all_sizes("predict_function", self.predict_step, takes_lists=True)

    def _smp_of_all_sizes(self, name: str, step: Any, *, takes_lists: bool = False) -> Any:
        usual, runtime = getattr(self, name), self._smp_engine.runtime
        setattr(self, name, of_all_sizes(self, runtime, usual, step, takes_lists=takes_lists))
        return getattr(self, name)

    def train_step(self, data: Any) -> dict[str, Any]:
        """Trains on one batch; returns the metrics.

        Shape: (batch / dp_size, ...), of this replica.
        """
        x, y, sample_weight = tf.keras.utils.unpack_x_y_sample_weight(data)
        gradients, loss, *outputs = self._smp_step("train")(x, y, sample_weight)
        gradients, loss = weighed_by_masks(self, gradients, loss, *outputs)
        runtime = self._smp_engine.runtime
        given = [each.accumulate() for each in gradients if each is not None]
        means = iter(keras.unscaled(self.optimizer, [averaged(runtime, each) for each in given]))
        # With those that have no gradient, as Keras: the optimizer is made for all.
        whole = [None if each is None else next(means) for each in gradients]
        self.optimizer.apply_gradients(zip(whole, self.trainable_variables, strict=True))
        metrics: dict[str, Any] = self._smp_metrics(x, y, sample_weight, loss, outputs)
        return metrics

    def test_step(self, data: Any) -> dict[str, Any]:
        """Evaluates one batch; returns the metrics."""
        x, y, sample_weight = tf.keras.utils.unpack_x_y_sample_weight(data)
        loss, *outputs = self._smp_step("test")(x, y, sample_weight)
        _, loss = weighed_by_masks(self, [], loss, *outputs)
        metrics: dict[str, Any] = self._smp_metrics(x, y, sample_weight, loss, outputs)
        return metrics

    def predict_step(self, data: Any) -> Any:
        """Returns the outputs for one batch.

        Shape: (batch, ...) on every rank.
        """
        x, _, _ = tf.keras.utils.unpack_x_y_sample_weight(data)
        return _merged(self._smp_step("predict")(x))

    def _smp_step(self, kind: str) -> Any:
        steps = self._smp_engine.steps
        if kind not in steps:
            steps[kind] = step(self._smp_slot, getattr(self, f"_smp_{kind}_body"))
        return steps[kind]

    def _smp_train_body(self, x: Any, y: Any, sample_weight: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = self(x, **self._smp_training(True))
            loss = self._smp_loss_of(x, y, outputs, sample_weight)
            if keras.scales(self.optimizer):
                # Not seen by a tf.function, which would be made again where variables are new.
                apart(lambda: keras.build_optimizer(self.optimizer, self.trainable_variables))
            scaled = keras.scaled(self.optimizer, loss, self.trainable_variables)
        return tape.gradient(scaled, self.trainable_variables), loss, outputs, _masks(outputs)

    def _smp_test_body(self, x: Any, y: Any, sample_weight: Any) -> Any:
        outputs = self(x, **self._smp_training(False))
        return self._smp_loss_of(x, y, outputs, sample_weight), outputs, _masks(outputs)

    def _smp_predict_body(self, x: Any) -> Any:
        return self(x, **self._smp_training(False))

    def _smp_training(self, value: bool) -> dict[str, bool]:
        return {"training": value} if keras.takes_training(self) else {}

    def _smp_loss_of(self, x: Any, y: Any, outputs: Any, sample_weight: Any) -> Any:
        with keras.losses_unnoted(self):
            return self.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight)

    def _smp_metrics(self, x: Any, y: Any, sample_weight: Any, loss: Any, outputs: Any) -> Any:
        keras.note_loss(self, loss.reduce_mean(), tf.shape(tf.nest.flatten(x)[0])[0])
        results, masks = (_merged(each) for each in outputs)
        flat = tf.nest.flatten(results)
        for place, mask in masks.items():
            keras.set_mask(flat[place], mask)
        return self.compute_metrics(x, y, results, sample_weight)


for _kind in ("train", "test", "predict"):
    # What plans and errors call these step functions.
    getattr(KerasTraining, f"_smp_{_kind}_body").__name__ = f"{_kind}_step"


def _masks(outputs: Any) -> dict[int, Any]:
    """Returns the masks of tensors by their places: a step returns no tensor with its mask."""
    masks = [keras.mask_of(each) for each in tf.nest.flatten(outputs)]
    return {place: mask for place, mask in enumerate(masks) if mask is not None}


def _merged(outputs: Any) -> Any:
    return tf.nest.map_structure(lambda each: each.merge(), outputs)
