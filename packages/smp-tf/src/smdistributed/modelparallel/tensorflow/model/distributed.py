"""``DistributedModel``: a Keras model whose operations are spread over processes.

Source: smd_model_parallel_tensorflow.rst, DistributedModel.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import (
    NotPartitionedError,
    SMPError,
    UnsupportedError,
)
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.runtime import RuntimeSlot
from smdistributed.modelparallel.tensorflow.compat import autograph, keras
from smdistributed.modelparallel.tensorflow.model.engine import Engine
from smdistributed.modelparallel.tensorflow.model.export import DEFAULT_FOLDER, save_model
from smdistributed.modelparallel.tensorflow.model.keras_training import KerasTraining
from smdistributed.modelparallel.tensorflow.model.weight_files import (
    read_weights,
    write_model,
    write_weights,
)
from smdistributed.modelparallel.tensorflow.model.whole_weights import distribute, gathered
from smdistributed.modelparallel.tensorflow.parameters.variables import is_here
from smdistributed.modelparallel.tensorflow.planning.placement import Placement
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime


class _OutsideStepError(SMPError, NotImplementedError):
    """A model was called where it cannot be.

    A ``RuntimeError`` as well. Keras 2 calls a model on the first batch of a generator, to build
    it, and goes on after this kind of error, with batches whose shapes it does not know any more.
    """


def _refuse_strategy() -> None:
    """Raises in the scope of a strategy, which would spread what is spread already.

    Raises:
        UnsupportedError: there is one.
    """
    if tf.distribute.has_strategy():
        raise UnsupportedError(
            "a DistributedModel is spread over processes by smp.init, with replicas where there "
            f"are more of them than partitions; received one in the scope of "
            f"{type(tf.distribute.get_strategy()).__name__}: leave tf.distribute out."
        )


class DistributedModel(KerasTraining):
    """A model whose operations are spread over the processes of a pipeline.

    Subclass it and write ``call``, or give it a model of Keras (functional, sequential, or of any
    class). It is called in step functions only, on every process; its results are on all of them,
    whichever computed them. The first call partitions it. Its variables are listed whole on every
    process; each has the values of its own, and reads those of others, when all processes do.

    Args:
        args: a Keras model to be spread, or what ``tf.keras.Model`` takes.
        kwargs: what ``tf.keras.Model`` takes.

    Raises:
        NotInitializedError: before ``smp.init``.
    """

    _smp_slot: RuntimeSlot[TFRuntime]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse_strategy()
        wrapped = None
        if len(args) == 1 and isinstance(args[0], tf.keras.Model):
            wrapped, args = args[0], ()
            kwargs.setdefault("name", f"distributed_{wrapped.name}")
            self._smp_take_as(wrapped)
        super().__init__(*args, **kwargs)
        if wrapped is not None:
            self.wrapped = wrapped
            # Losses and metrics are told apart by these.
            if names := getattr(wrapped, "output_names", None):
                self.output_names = list(names)
        engine = Engine(
            self._smp_slot.get(),
            self.name,
            self,
            super().__call__,
            lambda: (
                list(super(DistributedModel, self).trainable_variables),
                # Keras 2 has vocabularies among them, which every process has for itself.
                [v for v in super(DistributedModel, self).variables if keras.is_variable(v)],
            ),
            lambda: list(super(DistributedModel, self).losses),
        )
        # Not an attribute of the model for Keras: nothing in it is a layer or a variable.
        object.__setattr__(self, "_smp_engine", engine)

    @classmethod
    def from_config(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        """Makes a model of a class of one's own from what ``get_config`` says.

        Raises:
            UnsupportedError: of a model that was given, which a configuration does not have.
        """
        if cls.call is DistributedModel.call:
            raise UnsupportedError(
                "a configuration is of the model that a DistributedModel was given; received that "
                "of the DistributedModel, as from tf.keras.models.clone_model: clone the model "
                "itself, and give the clone to smp.DistributedModel."
            )
        return super().from_config(config, *args, **kwargs)

    def _smp_take_as(self, wrapped: Any) -> None:
        """Lets Keras see what the wrapped model takes: tensors, masks and others by their names."""
        signature = keras.signature_of_call(wrapped)
        if signature is None:
            return

        def call(*args: Any, **kwargs: Any) -> Any:
            return wrapped(*args, **kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]
        object.__setattr__(self, "call", call)

    @tf.keras.Model.layers.getter  # type: ignore[untyped-decorator]  # keeps Keras's setter
    def layers(self) -> list[Any]:
        """The layers as they are without the library: those of a model that was given to this one.

        So ``get_layer`` finds them, and ``layers[:-1]`` freezes as many.
        """
        own: Any = getattr(self, "wrapped", super())
        found: list[Any] = own.layers
        return found

    def save_model(self, save_path: str | os.PathLike[str] = DEFAULT_FOLDER) -> None:
        """Writes the whole model with its present weights as a SavedModel.

        ``tf.saved_model.load(save_path).serve(...)`` computes what ``call`` does, without training.
        Collective: every process; the first partition of the first replica writes.

        Args:
            save_path: folder; ``SM_MODEL_DIR`` of the environment takes the place of the default.

        Raises:
            NotPartitionedError: before the first call of a step function.
            CheckpointError: it could not be written; on all processes.
        """
        save_model(self._smp_engine, save_path)

    def get_weights(self) -> list[Any]:
        """Returns the values of all variables of the model, as ``tf.keras.Model`` does.

        Collective: every process of the pipeline, once the model is partitioned.

        Shape: those of ``weights``, on every process.
        """
        engine: Engine = self._smp_engine
        return gathered(engine, self.weights) if engine.is_partitioned else super().get_weights()

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Gives all variables of the model values, in the order of ``get_weights``.

        Every process of the pipeline gives the same ones, of which it keeps those of its variables.

        Raises:
            ValueError: there are more or fewer of them, or they have other shapes.
        """
        engine: Engine = self._smp_engine
        if engine.is_partitioned:
            distribute(engine, self.weights, weights)
        else:
            super().set_weights(weights)

    def save_weights(self, *args: Any, **kwargs: Any) -> None:
        """Writes the weights of the whole model as Keras does, without those of an optimizer.

        The file is that of the model in this one, or of the class without the library. Collective:
        every process of the pipeline; the first one of the first replica writes.

        Raises:
            NotPartitionedError: the model has no weights before its first call in a step function.
            CheckpointError: they could not be written.
        """
        own: Any = getattr(self, "wrapped", super())
        write_weights(self._smp_engine, lambda: own.save_weights(*args, **kwargs))

    def load_weights(self, filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Reads weights as Keras does, those of an optimizer left out.

        Collective: every process of the pipeline; each reads the file, and keeps its own weights.

        Args:
            filepath: of the first process of the pipeline, which has written what ``save_weights``
                wrote: others may have made temporary folders of their own.
            args, kwargs: as of Keras.

        Raises:
            NotPartitionedError: the model has no weights before its first call in a step function.
            CheckpointError: they could not be read.
        """
        own: Any = getattr(self, "wrapped", super())
        engine = self._smp_engine
        path = engine.runtime.communicator.from_first(os.fspath(filepath), CommGroup.PP_GROUP)
        read_weights(engine, lambda: own.load_weights(path, *args, **kwargs))

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Writes the model in this one as Keras does, for ``tf.keras.models.load_model``.

        The file is that of the model without the library, with the state of its optimizer if this
        one was compiled. Collective: every process; the first one writes.

        Raises:
            NotPartitionedError: the model has no weights before its first call in a step function.
            CheckpointError: it could not be written.
            UnsupportedError: there are several partitions, and no model of Keras 3 in this one.
        """
        wrapped = getattr(self, "wrapped", None)
        if keras.IS_KERAS_3 and wrapped is not None:
            write_model(self._smp_engine, wrapped, lambda: wrapped.save(*args, **kwargs))
        elif self._smp_engine.runtime.topology.pp_size == 1:
            super().save(*args, **kwargs)
        else:
            raise self._smp_cannot_be_written("save")

    def export(self, *args: Any, **kwargs: Any) -> None:
        """Refuses what ``save_model`` does.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "export calls the model outside of a step function: use save_model(folder), which "
            "writes a SavedModel of the whole model."
        )

    def call(self, inputs: Any, training: Any = None, **kwargs: Any) -> Any:
        """Computes the outputs; to be written by the user.

        Raises:
            NotImplementedError: it was not.
        """
        wrapped = getattr(self, "wrapped", None)
        if wrapped is None:
            raise NotImplementedError(
                f"{type(self).__name__} needs a method call(inputs, training=None) that computes "
                "its outputs, or a Keras model as the argument of smp.DistributedModel."
            )
        return wrapped(inputs, training=training, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model in a step function. Collective: every process of the pipeline.

        Shape: of the present microbatch, whole, on every rank.

        Raises:
            RuntimeError: outside a step function.
        """
        engine: Engine = self._smp_engine
        if engine.is_tracing:
            return super().__call__(*args, **kwargs)
        try:
            if engine.runtime.current_step is None:
                if not keras.IS_KERAS_3 and not self.built:
                    engine.build(args, kwargs)
                raise _OutsideStepError(
                    f"the DistributedModel {self.name} was called outside a step function: call it "
                    "in a function decorated with @smp.step; in a train_step of your own, too, the "
                    "part that computes gradients is one."
                )
            return engine.call(args, kwargs)
        except SMPError as error:
            autograph.pass_through(error)
            raise

    @property
    def trainable_variables(self) -> list[Any]:
        """The trainable variables of the whole model, in its order, on every process.

        What is computed of those of other processes, read or written is theirs.
        """
        engine: Engine = self._smp_engine
        return engine.trainable(super().trainable_variables)

    @property
    def trainable_weights(self) -> list[Any]:
        """Same as ``trainable_variables``."""
        engine: Engine = self._smp_engine
        return engine.trainable(super().trainable_weights)

    @property
    def local_variables(self) -> list[Any]:
        """Those of ``variables`` that have memory in this process: all before the first step."""
        engine: Engine = self._smp_engine
        return [each for each in self.variables if not engine.is_partitioned or is_here(each)]

    @property
    def placement(self) -> Placement:
        """Where every layer is; ``smdistributed.modelparallel.common.planning.report`` draws it.

        Raises:
            NotPartitionedError: before the first call of a step function.
        """
        engine: Engine = self._smp_engine
        if not engine.is_partitioned:
            raise NotPartitionedError(
                f"the first call of a step function decides where the layers of {self.name} are: "
                "ask after that."
            )
        return engine.placement

    @property
    def losses(self) -> list[Any]:
        """The losses of layers (regularisation, ``add_loss``) of the call before, in a step."""
        engine: Engine = self._smp_engine
        step = engine.runtime.current_step
        if engine.is_tracing or step is None:
            return list(super().losses)
        return list(step.losses)
