"""The step decorator: one call of the user's function becomes a pipelined mini-batch.

Source: smd_model_parallel_common_api.rst, The Library's Core APIs;
smd_model_parallel_tensorflow.rst.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from smdistributed.modelparallel.common.errors import ConfigError, SMPError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.microbatch import (
    SplitRules,
    check_function,
    signature_of,
    tensors_to_cut,
)
from smdistributed.modelparallel.common.planning.simulator import Timeline
from smdistributed.modelparallel.common.runtime import RuntimeSlot
from smdistributed.modelparallel.common.search.counted_steps import CountedSteps
from smdistributed.modelparallel.common.search.profile import ModelProfile
from smdistributed.modelparallel.common.search.recording import Planning
from smdistributed.modelparallel.tensorflow.compat import autograph
from smdistributed.modelparallel.tensorflow.compat.gradients import starting_from
from smdistributed.modelparallel.tensorflow.compat.isolation import apart
from smdistributed.modelparallel.tensorflow.execute.order import impose_order, keep_tapes
from smdistributed.modelparallel.tensorflow.execute.random import give_seeds
from smdistributed.modelparallel.tensorflow.execute.replay import Call
from smdistributed.modelparallel.tensorflow.gradients.meeting import note_places
from smdistributed.modelparallel.tensorflow.record.likeness import Likeness
from smdistributed.modelparallel.tensorflow.record.structure import (
    Structure,
    is_composite,
    leaves_of,
)
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime
from smdistributed.modelparallel.tensorflow.stepping.alike import alike
from smdistributed.modelparallel.tensorflow.stepping.body import Body
from smdistributed.modelparallel.tensorflow.stepping.inputs import TENSORS, checks_of, split
from smdistributed.modelparallel.tensorflow.stepping.planned import profile_of
from smdistributed.modelparallel.tensorflow.stepping.progress import Progress
from smdistributed.modelparallel.tensorflow.stepping.results import (
    joined,
    taken_apart,
    without_plain,
)

_Compiled = tuple[Any, list[Any]]


@dataclass
class StepInProgress:
    """A step function whose graph is being made.

    Attributes:
        graph: in which it is made.
        step_number: int64 tensor.
        progress: of this graph.
        first_microbatch: number of this replica's first microbatch among those of all replicas.
        num_microbatches: of this replica.
        microbatch: index of the present one.
        calls: of the model, by microbatch.
        losses: of the model's layers in its last call.
        programs: what models made for calls in it, under keys of theirs.
        models: what made them.
        begin: number of operations in the graph before it.
    """

    graph: Any
    step_number: Any
    progress: Progress
    first_microbatch: int
    num_microbatches: int
    microbatch: int = 0
    calls: list[list[Call]] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)
    programs: dict[Hashable, Any] = field(default_factory=dict)
    models: set[Any] = field(default_factory=set)
    begin: int = 0

    @property
    def trains(self) -> bool:
        """Whether the body has asked for gradients."""
        return any(call.requests for calls in self.calls for call in calls)

    def random_key(self) -> Any:
        """Returns a key that is another one for each call of the model, int64 of shape [2].

        Replicas draw what one process would draw for all their microbatches, one after the other.
        """
        place = (self.first_microbatch + self.microbatch) * 1000 + len(self.calls[-1])
        return tf.stack([self.step_number, tf.constant(place, tf.int64)])

    def start_of_gradients(self, share: Any) -> float:
        """Returns what gradients in half precision are multiplied by while they are computed.

        A loss is the mean over a microbatch, so that gradients by its examples are as often those
        of the mean over a batch as there are microbatches. One process that takes the batch at once
        would not have them so large, and what overflows here would be finite there.

        Args:
            share: of the batch that the present microbatch has; a tensor if it is not known yet.
        """
        if not any(call.local.plan.trace.is_half for call in self.calls[-1]):
            return 1.0
        known = 1 / self.num_microbatches if tf.is_tensor(share) else share
        return 2.0 ** math.floor(math.log2(known))


class StepFunction:
    """A decorated step function; call it like the function it wraps, eagerly or in a tf.function.

    Each call splits the tensor arguments into microbatches, computes the body for each, pipelined
    over the partitions, and returns the body's result with a ``StepOutput`` for each tensor.

    Collective: every process of a pipeline, in the same order.

    Shape: tensors of (batch, ...) become (microbatch, ...) for the body.

    Args:
        slot: holds the runtime from ``smp.init`` on.
        function: the user's function.
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: batch axis by argument name; 0 for all others.
        options: of ``tf.function``, used where the step function is called eagerly.

    Raises:
        ConfigError: an option names no argument of the function.
    """

    def __init__(
        self,
        slot: RuntimeSlot[TFRuntime],
        function: Callable[..., Any],
        non_split_inputs: Iterable[str] | None,
        input_split_axes: Mapping[str, int] | None,
        options: Mapping[str, Any],
    ) -> None:
        check_function(function)
        functools.update_wrapper(self, function)
        self._slot = slot
        self._name = getattr(function, "__name__", repr(function))
        self._body = autograph.converted(function)
        self._rules = SplitRules(
            signature_of(function), non_split_inputs or (), input_split_axes or {}
        )
        self._options = {"autograph": False, **options}
        self._compiled: dict[Likeness, _Compiled] = {}
        self._timeline: Timeline | None = None

    def timeline(self) -> Timeline:
        """Returns when every pass runs, as planned for the graph that was made last.

        Unlike in the PyTorch package nothing is measured: TensorFlow starts the passes.

        Raises:
            SMPError: the function has not run yet, or there is only one partition.
        """
        if self._timeline is None:
            raise SMPError("there is a timeline after a call with more than one partition only.")
        return self._timeline

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one mini-batch."""
        try:
            return autograph.not_converted(self._call)(args, kwargs)
        except Exception as error:
            autograph.pass_through(error)
            raise

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Binds like a function, so that methods can be step functions."""
        return self if instance is None else types.MethodType(self, instance)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runtime = self._slot.get()
        if runtime.current_step is not None:
            raise SMPError(
                f"step function {self._name} was called from inside another step function; call "
                "one after the other, or undecorate the inner one."
            )
        if not tf.executing_eagerly():
            return without_plain(self._build(runtime, args, kwargs))
        key = Likeness((args, kwargs), _kind_of)
        arrays = [leaf for leaf in leaves_of((args, kwargs)) if _is_array(leaf)]
        if key not in self._compiled:
            self._compiled[key] = self._compile(Structure((args, kwargs), _is_array))
        compiled, rebuilds = self._compiled[key]
        try:
            number, made = compiled(*map(_as_tensor, arrays))
        except Exception:
            if not rebuilds:
                # A first trace that failed leaves a tf.function that refuses new variables.
                del self._compiled[key]
            raise
        return rebuilds[int(number)](made)

    def _compile(self, structure: Structure) -> _Compiled:
        """Returns the step as a tf.function of its tensors, for calls with the same other values.

        Returns:
            the function, and what puts the result of each of its traces together from tensors.
        """
        rebuilds: list[Any] = []

        def run(*tensors: Any) -> Any:
            args, kwargs = structure.filled(tensors)
            result = self._build(self._slot.get(), args, kwargs)
            made: list[Any] = []
            rebuilds.append(taken_apart(result, made))
            return tf.constant(len(rebuilds) - 1), made

        return tf.function(run, **self._tf_options()), rebuilds

    def _tf_options(self) -> dict[str, Any]:
        """Returns the options of ``tf.function``, for a function of all tensors in a row."""
        options = dict(self._options)
        if options.get("input_signature") is not None:
            options["input_signature"] = tf.nest.flatten(options["input_signature"])
        return options

    @property
    def name(self) -> str:
        """That of the function."""
        return self._name

    def profile(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ModelProfile | None:
        """Makes the graph of a call, which never runs, and returns what the call costs. Local.

        Returns:
            None if it asks for no gradients.

        Raises:
            ConfigError: the process is not alone.
            UnsupportedError: it trains several models.
        """
        runtime = self._slot.get()
        if runtime.topology.size > 1:
            raise ConfigError(
                f"one process plans for a job; received {runtime.topology.size}: start the script "
                "without a launcher."
            )
        structure = Structure((args, kwargs), _is_array)
        arrays = [leaf for leaf in leaves_of((args, kwargs)) if _is_array(leaf)]
        found: list[ModelProfile] = []

        def run(*tensors: Any) -> None:
            args, kwargs = structure.filled(tensors)
            cut = list(tensors_to_cut(TENSORS, self._rules, args, kwargs).values())
            batch = cut[0][0].shape[cut[0][1]] if cut else runtime.config.microbatches

            def look(step: StepInProgress, body: Body, share: float) -> None:
                if step.trains:
                    own = self._name, step.calls[0], len(step.models), body.operations
                    found.append(profile_of(runtime, *own, int(batch), share))

            self._build(runtime, args, kwargs, look)

        specs = [tf.TensorSpec(each.shape, each.dtype) for each in arrays]
        apart(lambda: tf.function(run, autograph=False).get_concrete_function(*specs))
        return found[0] if found else None

    def _end(self, planning: Planning, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Ends a process that plans: now, or in the step where that alone knows the sizes."""
        arrays = [leaf for leaf in leaves_of((args, kwargs)) if _is_array(leaf)]

        def end(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            profile = self.profile(args, kwargs)
            assert profile is not None
            planning.end(profile)

        if all(each.shape.is_fully_defined() for each in arrays if tf.is_tensor(each)):
            end(args, kwargs)
        structure = Structure((args, kwargs), _is_array)
        tf.py_function(lambda *given: end(*structure.filled(given)), arrays, [])

    def _build(
        self,
        runtime: TFRuntime,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        look: Callable[[StepInProgress, Body, Any], None] | None = None,
    ) -> Any:
        """Adds the step to the present graph.

        Args:
            runtime: of this process.
            args, kwargs: of the call.
            look: is given the step when it is made, and the share of its first microbatch.
        """
        cut, weights = split(self._rules, runtime.config.microbatches, args, kwargs)
        results = []
        progress = Progress(f"building the graph of step {self._name}", runtime.rank == 0)
        with progress:
            first = runtime.coordinates.dp_rank * len(cut.calls)
            graph = tf.compat.v1.get_default_graph()
            checks = [
                *checks_of(cut, weights),
                *alike(runtime, self._name, self._rules, args, kwargs),
            ]
            if runtime.measuring is not None:
                checks.append(self._noticed(runtime, runtime.measuring))
            begin = len(graph.get_operations())
            number = runtime.step_number.assign_add(1)
            note_places(graph, [])
            step = StepInProgress(graph, number, progress, first, len(cut.calls), begin=begin)
            runtime.current_step = step
            try:
                for microbatch, (some, named) in enumerate(cut.calls):
                    step.microbatch = microbatch
                    step.calls.append([])
                    progress.stage = f"microbatch {microbatch + 1} of {len(cut.calls)}"
                    start = functools.partial(step.start_of_gradients, weights[microbatch])
                    with tf.name_scope(f"microbatch_{microbatch}"), starting_from(start):
                        results.append(self._body(*some, **named))
                progress.stage = "the order of its passes"
                body = self._finish(runtime, step, checks)
            finally:
                runtime.current_step = None
        if look is not None:
            look(step, body, weights[0])
        elif runtime.planning is not None and step.trains:
            self._end(runtime.planning, args, kwargs)
        return joined(results, weights)

    def _noticed(self, runtime: TFRuntime, measuring: CountedSteps) -> Any:
        """Returns a tensor that is there when it is noted that the step begins."""

        def note() -> Any:
            measuring.begins(self._name, runtime.close)
            return np.int64(0)

        return tf.numpy_function(note, [], tf.int64)

    def _finish(self, runtime: TFRuntime, step: StepInProgress, checks: Sequence[Any]) -> Body:
        """Puts the passes of all microbatches in order, and what waits for others after checks.

        Returns:
            what the body made itself.
        """
        if not any(step.calls):
            raise SMPError(
                f"step function {self._name} did not call a DistributedModel; its results must "
                "depend on the model: call the model in it, or remove the decorator."
            )
        body = Body(self._name, step.calls, step.begin)
        body.refuse_kept()
        runtime.links.begin_after(checks, body.operations)
        is_split = runtime.topology.pp_size > 1
        if is_split:
            give_seeds(body.operations, runtime.unseeded + runtime.coordinates.dp_rank, self._name)
        if is_split or keep_tapes(step.calls[0]):
            # A process that holds none of these variables must take the same order, too.
            meet = runtime.communicator.allgather(body.meets_models(), CommGroup.PP_GROUP)
            timeline = impose_order(
                step.calls,
                runtime.coordinates.pp_rank,
                runtime.topology.pp_size,
                runtime.config.pipeline,
                runtime.config.active_microbatches,
                runtime.links,
                is_serial=any(meet),
            )
            if is_split:
                self._timeline = runtime.timeline = timeline
        return body


def step(
    slot: RuntimeSlot[TFRuntime],
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Iterable[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    **options: Any,
) -> Any:
    """Makes a step function; usable with and without parentheses. See ``StepFunction``."""

    def decorate(function: Callable[..., Any]) -> StepFunction:
        return StepFunction(slot, function, non_split_inputs, input_split_axes, options)

    return decorate if function is None else decorate(function)


def _as_tensor(array: Any) -> Any:
    return tf.convert_to_tensor(array) if isinstance(array, np.ndarray) else array


def _is_array(value: Any) -> bool:
    return isinstance(value, (tf.Tensor, np.ndarray))


def _kind_of(tensor: Any) -> Hashable:
    """Returns what counts of a tensor here: TensorFlow itself tells shapes and dtypes apart."""
    if _is_array(tensor):
        return "array"
    return (type(tensor) if is_composite(tensor) else tensor.ref(),)
