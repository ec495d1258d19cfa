"""``DistributedModel``: a Keras model whose operations are spread over processes.

Source: smd_model_parallel_tensorflow.rst, DistributedModel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from smdistributed.modelparallel.common.errors import PartitionError, SMPError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.runtime import RuntimeSlot
from smdistributed.modelparallel.tensorflow.compat import autograph, keras
from smdistributed.modelparallel.tensorflow.execute.program import LocalPrograms
from smdistributed.modelparallel.tensorflow.execute.replay import Replay
from smdistributed.modelparallel.tensorflow.model.export import DEFAULT_FOLDER, save_model
from smdistributed.modelparallel.tensorflow.model.keras_training import KerasTraining
from smdistributed.modelparallel.tensorflow.parameters.variables import (
    Home,
    ModelVariables,
    home_of,
)
from smdistributed.modelparallel.tensorflow.plan.placement import Placement, place
from smdistributed.modelparallel.tensorflow.plan.segments import cut
from smdistributed.modelparallel.tensorflow.record.tracing import LayerNames, trace
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime
from smdistributed.modelparallel.tensorflow.stepping.progress import Progress

_Trainable = Callable[[], tuple[list[Any], list[Any]]]


@dataclass(eq=False)
class _Signature:
    """How to call the model with tensors alone.

    Attributes:
        key: equal for calls that one trace serves.
        tensors: those among the arguments.
        pack: returns the arguments with other tensors in these places.
    """

    key: tuple[Any, ...]
    tensors: list[Any]
    pack: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(eq=False)
class Engine:
    """What executes one DistributedModel.

    Attributes:
        runtime: of this process.
        name: of the model.
        run: the model's own call.
        collect: returns its trainable and all its variables, wherever they live.
        losses: returns the losses of its layers after a call.
        is_tracing: whether the model's own call is being traced.
        is_partitioned: whether variables have their places.
        anchor: see ``anchor_variable``.
        layer_names: of its layers.
        placement: what is decided about it.
        example: positional arguments of its first call, as specs, and the others.
        steps: step functions of Keras's training loop.
        programs: trace and what this process executes, by signature.
    """

    runtime: TFRuntime
    name: str
    run: Callable[..., Any]
    collect: _Trainable
    losses: Callable[[], list[Any]]
    is_tracing: bool = False
    is_partitioned: bool = False
    anchor: Any = None
    layer_names: LayerNames = field(default_factory=LayerNames)
    placement: Placement = field(default_factory=Placement)
    example: Any = None
    steps: dict[str, Any] = field(default_factory=dict)
    programs: dict[tuple[Any, ...], tuple[Any, LocalPrograms]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._variables = ModelVariables(
            self.runtime.coordinates.pp_rank, self.runtime.pipeline_ranks
        )
        self._replay = Replay(self.runtime.links, self.runtime.pipeline_ranks)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Adds a call of the model to the step whose graph is being made."""
        step = self.runtime.current_step
        signature = _signature(args, kwargs)
        wanted = tuple(_is_differentiable(tensor) for tensor in signature.tensors)
        key = (*signature.key, wanted)
        if key not in self.programs:
            with tf.init_scope():
                self.programs[key] = self._make(signature, wanted, step.progress)
        if self.example is None:
            self.example = _example(args, kwargs)
        traced, local = self.programs[key]
        outputs, call = self._replay.call(
            local, signature.tensors, step.random_key(), self.anchor_variable()
        )
        step.calls[-1].append(call)
        num_results = len(outputs) - traced.num_losses
        step.losses = outputs[num_results:]
        structure, leaves, is_output = traced.structure
        filled = [
            outputs[leaf] if is_one else leaf
            for leaf, is_one in zip(leaves, is_output, strict=True)
        ]
        return tf.nest.pack_sequence_as(structure, filled, expand_composites=True)

    def anchor_variable(self) -> Any:
        """Returns the variable that stands for the missing ones where nothing is trained.

        Its gradient is zero. Without it such a process would never be asked for gradients, and the
        others would wait for its part of the backward pass.
        """
        if self.anchor is None:
            with tf.init_scope():
                kind: Any = tf.keras.Variable if keras.IS_KERAS_3 else tf.Variable
                self.anchor = kind(0.0, name="smp_anchor")
            partition = self.runtime.coordinates.pp_rank
            home = Home(partition, self.runtime.pipeline_ranks[partition], is_here=True)
            keras.variable_of(self.anchor)._smp_home = home
        return keras.variable_of(self.anchor)

    def local(self, variables: Sequence[Any]) -> list[Any]:
        """Returns those of the variables that have a value in this process."""
        if self.is_tracing or not self.is_partitioned:
            return list(variables)
        return [v for v in variables if (home := home_of(v)) is None or home.is_here]

    def _make(
        self, signature: _Signature, wanted: Sequence[bool], progress: Progress
    ) -> tuple[Any, LocalPrograms]:
        """Traces, places and cuts a call; gives variables their places. Collective: pipeline."""
        progress.stage = f"the operations of {self.name} and their gradients"
        runtime, config = self.runtime, self.runtime.config
        pp_size, pp_rank = runtime.topology.pp_size, runtime.coordinates.pp_rank

        def run(tensors: Sequence[Any]) -> tuple[Any, list[Any]]:
            args, kwargs = signature.pack(tensors)
            return self.run(*args, **kwargs), self.losses()

        self.is_tracing = True
        try:
            with runtime.guard.suspended():
                traced = trace(
                    self.name,
                    self.layer_names,
                    autograph.converted(run),
                    [tf.TensorSpec(t.shape, t.dtype) for t in signature.tensors],
                    wanted,
                    self._variables.create,
                    self._collect,
                )
            _, every = self.collect()
        finally:
            self.is_tracing = False
        count = len(traced.operations)
        progress.stage = f"the partitions of the {count} operations of {self.name}"
        default = config.default_partition if not config.auto_partition else 0
        placed = place(
            traced,
            self.placement,
            num_partitions=pp_size,
            is_automatic=config.auto_partition,
            default_partition=default,
            optimize=config.optimize,
        )
        plan = cut(traced, placed, self.placement.homes, pp_size)
        if pp_size > 1:
            self._agree(plan.digest())
        progress.stage = f"the passes of {self.name} in this process"
        local = LocalPrograms(plan, pp_rank, runtime.unseeded)
        self._variables.settle(self.placement.homes, every, default)
        if not self.is_partitioned:
            self.is_partitioned = True
            runtime.is_partitioned = True
            for hook in runtime.post_partition_hooks:
                hook()
            runtime.post_partition_hooks.clear()
        return traced, local

    def everywhere(self) -> tuple[list[Any], list[Any]]:
        """Returns the trainable and all variables of the model, wherever they live."""
        saved, self.is_tracing = self.is_tracing, True
        try:
            return self.collect()
        finally:
            self.is_tracing = saved

    def _collect(self) -> tuple[list[Any], list[Any]]:
        trainable, every = self.collect()
        return [keras.variable_of(v) for v in trainable], [keras.variable_of(v) for v in every]

    def _agree(self, digest: str) -> None:
        digests = self.runtime.communicator.allgather(digest, CommGroup.PP_GROUP)
        if len(set(digests)) > 1:
            ranks = self.runtime.pipeline_ranks
            differ = [r for r, each in zip(ranks, digests, strict=True) if each != digests[0]]
            raise PartitionError(
                "all processes of a pipeline must build the same model; the operations of "
                f"{self.name} differ between rank {ranks[0]} and rank "
                f"{', '.join(map(str, differ))}: make the model independent of the rank."
            )


class _OutsideStepError(SMPError, RuntimeError):
    """A model was called where it cannot be."""


class DistributedModel(KerasTraining):
    """A model whose operations are spread over the processes of a pipeline.

    Subclass it and write ``call``, or give it a model of Keras (functional, sequential, or of any
    class). It is called in step functions only, on every process; its results are on all of them,
    whichever computed them. ``trainable_variables``, ``variables`` and ``weights`` are those of
    this process once the model is partitioned, which the first call does.

    Args:
        args: a Keras model to be spread, or what ``tf.keras.Model`` takes.
        kwargs: what ``tf.keras.Model`` takes.

    Raises:
        NotInitializedError: before ``smp.init``.
    """

    _smp_slot: RuntimeSlot[TFRuntime]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        wrapped = None
        if len(args) == 1 and isinstance(args[0], tf.keras.Model):
            wrapped, args = args[0], ()
            kwargs.setdefault("name", f"distributed_{wrapped.name}")
        super().__init__(*args, **kwargs)
        if wrapped is not None:
            self.wrapped = wrapped
        engine = Engine(
            self._smp_slot.get(),
            self.name,
            super().__call__,
            lambda: (
                list(super(DistributedModel, self).trainable_variables),
                list(super(DistributedModel, self).variables),
            ),
            lambda: list(super(DistributedModel, self).losses),
        )
        # Not an attribute of the model for Keras: nothing in it is a layer or a variable.
        object.__setattr__(self, "_smp_engine", engine)

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

        Raises:
            RuntimeError: outside a step function.
        """
        engine: Engine = self._smp_engine
        if engine.is_tracing:
            return super().__call__(*args, **kwargs)
        if engine.runtime.current_step is None:
            raise _OutsideStepError(
                f"the DistributedModel {self.name} was called outside a step function: call it in "
                "a function decorated with @smp.step."
            )
        return engine.call(args, kwargs)

    @property
    def trainable_variables(self) -> list[Any]:
        """The trainable variables of this process; never empty after partitioning.

        Where no trainable variable lives it is one of the library's, whose gradient is zero.
        """
        engine: Engine = self._smp_engine
        found = engine.local(super().trainable_variables)
        if engine.is_partitioned and not engine.is_tracing and not found:
            engine.anchor_variable()
            found = [engine.anchor]
        return found

    @property
    def non_trainable_variables(self) -> list[Any]:
        """The other variables of this process."""
        engine: Engine = self._smp_engine
        return engine.local(super().non_trainable_variables)

    @property
    def variables(self) -> list[Any]:
        """All variables of the model that have a value in this process."""
        engine: Engine = self._smp_engine
        return engine.local(super().variables)

    @property
    def losses(self) -> list[Any]:
        """The losses of layers (regularisation, ``add_loss``) of the call before, in a step."""
        engine: Engine = self._smp_engine
        step = engine.runtime.current_step
        if engine.is_tracing or step is None:
            return list(super().losses)
        return list(step.losses)


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Signature:
    """Returns what traces are told apart by: shapes, dtypes, and everything that is no tensor."""
    leaves = [
        tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf
        for leaf in tf.nest.flatten((args, kwargs), expand_composites=True)
    ]
    is_tensor = [bool(tf.is_tensor(leaf)) for leaf in leaves]
    tensors = [leaf for leaf, is_one in zip(leaves, is_tensor, strict=True) if is_one]
    shapes = tuple(
        (None if t.shape.rank is None else tuple(t.shape.as_list()), t.dtype.name) for t in tensors
    )
    others = tuple(repr(leaf) for leaf, is_one in zip(leaves, is_tensor, strict=True) if not is_one)

    def pack(replacements: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rest = iter(replacements)
        filled = [
            next(rest) if is_one else leaf for leaf, is_one in zip(leaves, is_tensor, strict=True)
        ]
        packed: tuple[tuple[Any, ...], dict[str, Any]] = tf.nest.pack_sequence_as(
            (args, kwargs), filled, expand_composites=True
        )
        return packed

    return _Signature((shapes, others, tuple(is_tensor)), tensors, pack)


def _example(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns what a model is called with when it serves: specs, and no training."""
    specs = tf.nest.map_structure(
        lambda each: tf.TensorSpec(each.shape, tf.as_dtype(each.dtype)), tuple(args)
    )
    return specs, {**kwargs, "training": False} if "training" in kwargs else dict(kwargs)


def _is_differentiable(tensor: Any) -> bool:
    """Tells whether an input comes from variables or from another call of a model in the step."""
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return False
    stack, seen = [tensor], set()
    while stack:
        op = getattr(stack.pop(), "op", None)
        if op is None or op in seen:
            continue
        seen.add(op)
        if op.type in ("ReadVariableOp", "ResourceGather") or "SmpCall" in op.name:
            return True
        stack += list(op.inputs)
    return False
