"""What executes a model: its traces, and what this process has of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import NotPartitionedError, UnsupportedError
from smdistributed.modelparallel.tensorflow.compat import autograph, graphs, keras
from smdistributed.modelparallel.tensorflow.compat.gradients import is_recorded
from smdistributed.modelparallel.tensorflow.compat.isolation import apart
from smdistributed.modelparallel.tensorflow.compat.operations import unnoted
from smdistributed.modelparallel.tensorflow.execute.backward import (
    Backward,
    Differentiate,
    refuse_vectorizing,
)
from smdistributed.modelparallel.tensorflow.execute.program import LocalPrograms
from smdistributed.modelparallel.tensorflow.execute.replay import Replay
from smdistributed.modelparallel.tensorflow.gradients.kept import bring_kept
from smdistributed.modelparallel.tensorflow.gradients.meeting import on_all
from smdistributed.modelparallel.tensorflow.gradients.replicas import begin_alike
from smdistributed.modelparallel.tensorflow.model.agreement import agree
from smdistributed.modelparallel.tensorflow.model.second_gradients import differentiated_again
from smdistributed.modelparallel.tensorflow.model.signature import (
    Signature,
    example,
    signature,
)
from smdistributed.modelparallel.tensorflow.parameters.owners import Owner, note, owner_of
from smdistributed.modelparallel.tensorflow.parameters.variables import (
    Home,
    ModelVariables,
    home_of,
    path_of,
)
from smdistributed.modelparallel.tensorflow.planning.placement import Placement, place
from smdistributed.modelparallel.tensorflow.planning.segments import Plan, cut
from smdistributed.modelparallel.tensorflow.record.tracing import LayerNames, Trace, trace
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime
from smdistributed.modelparallel.tensorflow.stepping.progress import Progress

#: Calls a model on tensors; returns its result and its losses.
Run = Callable[[Sequence[Any]], tuple[Any, list[Any]]]
_Variables = Callable[[], tuple[list[Any], list[Any]]]


class NoVariablesYet(list[Any]):
    """The variables of a model that was asked for them before it had any; of no use later on.

    Args:
        engine: of the model.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def __iter__(self) -> Iterator[Any]:
        """Goes through no variables.

        Raises:
            NotPartitionedError: the model has got variables since.
        """
        if self._engine.is_partitioned:
            raise NotPartitionedError(
                f"variables of {self._engine.name} are there after its first call in a step "
                "function; received what it had before, none: ask for model.trainable_variables "
                "again, after that call."
            )
        return super().__iter__()


@dataclass(eq=False)
class Engine:
    """What executes one DistributedModel.

    Attributes:
        runtime: of this process.
        name: of the model.
        model: what is executed.
        run: its own call.
        collect: returns its trainable and all its variables, wherever they live.
        losses: returns the losses of its layers after a call.
        is_tracing: whether the model's own call is being traced.
        is_partitioned: whether variables have their places.
        anchor: see ``anchor_variable``.
        layer_names: of its layers.
        placement: what is decided about it.
        example: positional arguments of its first call, as specs, and the others.
        steps: step functions of Keras's training loop.
        newest: trace of its last call in a graph that was made, and what this process executes.
    """

    runtime: TFRuntime
    name: str
    model: Any
    run: Callable[..., Any]
    collect: _Variables
    losses: Callable[[], list[Any]]
    is_tracing: bool = False
    is_partitioned: bool = False
    anchor: Any = None
    layer_names: LayerNames = field(default_factory=LayerNames)
    placement: Placement = field(default_factory=Placement)
    example: Any = None
    steps: dict[str, Any] = field(default_factory=dict)
    newest: tuple[Trace, LocalPrograms] | None = None

    def __post_init__(self) -> None:
        self.runtime.engines.add(self)
        self._variables = ModelVariables(
            self.runtime.coordinates.pp_rank, self.runtime.pipeline_ranks
        )
        self._replay = Replay(self.runtime.links, self.runtime.pipeline_ranks)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Adds a call of the model to the step whose graph is being made."""
        step = self.runtime.current_step
        refuse_vectorizing()
        is_nested = self._is_nested(step.graph)
        asked = signature(args, kwargs)
        asked = replace(asked, tensors=on_all(self.runtime, asked.tensors))
        # What encloses a loop or a branch asks for the gradients of all that goes in.
        wanted = tuple(_is_wanted(tensor, is_nested) for tensor in asked.tensors)
        # Python's state may be another one at each call of the body, and in each graph that is
        # made, as it may for TensorFlow; microbatches are the same call again.
        key = (self, len(step.calls[-1]), asked.key, wanted)
        step.models.add(self)
        if key not in step.programs:
            with tf.init_scope():
                run = functools.partial(self.run_on, asked)
                step.programs[key] = self.make(run, asked.tensors, wanted, step.progress)
        if self.example is None:
            self.example = example(args, kwargs)
        self.newest = traced, local = step.programs[key]
        differentiate = functools.partial(
            differentiated_again, self, step, asked, wanted, local, len(step.calls[-1])
        )
        with unnoted():
            outputs = self.add(step, local, asked.tensors, differentiate).attached()
        num_results = len(outputs) - traced.num_losses
        step.losses = outputs[num_results:]
        masks = outputs[num_results - len(traced.masked) : num_results]
        for number, mask in zip(traced.masked, masks, strict=True):
            keras.set_mask(outputs[number], mask)
        return traced.structure.filled(outputs)

    def add(
        self, step: Any, local: LocalPrograms, tensors: Sequence[Any], differentiate: Differentiate
    ) -> Backward:
        """Adds a call to the step; returns what has its outputs and computes its gradients."""
        key, calls = step.random_key(), step.calls[-1]
        return self._replay.call(
            local, tensors, key, [self.anchor_variable()], calls, differentiate
        )

    def build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Has the layers make their variables, which get no values yet, for inputs like these."""
        asked = signature(args, kwargs)
        run = functools.partial(self.run_on, asked)
        self._traced(run, asked.tensors, [False] * len(asked.tensors))

    def _is_nested(self, outermost: Any) -> bool:
        """Tells whether the present graph is a loop or a branch in the body of a step.

        Raises:
            UnsupportedError: the model cannot be called there.
        """
        around = graphs.enclosing(tf.compat.v1.get_default_graph(), outermost)
        if not all(graphs.is_control_flow(graph) for graph in around):
            raise UnsupportedError(
                f"the model {self.name} was called in a tf.function inside of a step function, "
                "which would be one graph for all microbatches: undecorate that function. A step "
                "function is compiled as a whole."
            )
        if around and self.runtime.links.has_order:
            raise UnsupportedError(
                f"the model {self.name} was called in a loop or a branch (of tf.while_loop, "
                "tf.cond, AutoGraph) in a step function, where transfers between GPUs have no "
                "order: write it in the model's call."
            )
        return bool(around)

    def anchor_variable(self) -> Any:
        """Returns a variable of the library whose gradient is asked for with all others.

        It is zero. Without one a process that trains nothing would never be asked for gradients,
        and the others would wait for its part of the backward pass.
        """
        if self.anchor is None:
            kind: Any = tf.keras.Variable if keras.IS_KERAS_3 else tf.Variable
            partition = self.runtime.coordinates.pp_rank
            home = Home(partition, self.runtime.pipeline_ranks[partition], is_here=True)
            # Not seen by a tf.function, which would make the graph again without new variables.
            self.anchor = keras.variable_of(apart(lambda: kind(0.0, name="smp_anchor")))
            self.anchor._smp_home = home
        return self.anchor

    def trainable(self, variables: Sequence[Any]) -> list[Any]:
        """Returns the trainable variables, those of other processes among them."""
        found = list(variables)
        return found if found or self.is_partitioned else NoVariablesYet(self)

    def _note_owners(self, variables: Sequence[Any]) -> None:
        """Lets values that are computed of variables know which partition has them."""
        if self.runtime.topology.pp_size == 1:
            return
        for each in variables:
            variable = keras.variable_of(each)
            home = home_of(variable)
            if home is None or home.partition is None or owner_of(variable) is not None:
                continue
            number = self.runtime.rendezvous.number(variable, self)
            owner = Owner(
                home.partition, home.is_here, path_of(variable), variable=variable, number=number
            )
            for known in (each, variable, variable.handle):
                note(known, owner)

    def make(
        self,
        run: Run,
        tensors: Sequence[Any],
        wanted: Sequence[bool],
        progress: Progress,
        has_effects: bool = True,
    ) -> tuple[Trace, LocalPrograms]:
        """Traces, places and cuts a call; gives variables their places. Collective: pipeline.

        Args:
            run: calls the model on tensors; returns its result and its losses.
            tensors: of the step, like those that it is called with.
            wanted: for each of them, whether its gradient is needed.
            progress: of the step.
            has_effects: see ``trace``.
        """
        runtime = self.runtime
        progress.stage = f"the operations of {self.name} and their gradients"
        traced, every = self._traced(run, tensors, wanted, has_effects)
        count = len(traced.operations)
        progress.stage = f"the partitions of the {count} operations of {self.name}"
        self._keep_homes([*every, *traced.foreign])
        plan = self._planned(tensors, traced)
        progress.stage = f"the passes of {self.name} in this process"
        is_alone = runtime.transport.size == 1
        local = LocalPrograms(
            plan,
            runtime.coordinates.pp_rank,
            runtime.unseeded,
            is_alone,
            runtime.has_one_core,
        )
        metrics = {id(variable) for variable in keras.variables_of_metrics(self.model)}
        begun = self._variables.settle(
            self.placement.homes, every, self._default_partition, metrics
        )
        begin_alike(runtime, begun)
        self._variables.claim(self.placement.homes, traced.foreign, plan.changed())
        self._note_owners([*every, *self._variables.made, *traced.foreign])
        bring_kept(runtime, traced.captured, traced.foreign)
        if not self.is_partitioned:
            self.is_partitioned = True
            runtime.is_partitioned = True
            hooks = list(runtime.post_partition_hooks)
            runtime.post_partition_hooks.clear()
            for hook in hooks:
                hook()  # which may want to be called for the next model as well
        return traced, local

    def _keep_homes(self, variables: Sequence[Any]) -> None:
        """Lets what reads variables be placed where they live, or where other models read them.

        A model may read what is another one's, which is called later.
        """
        others = [engine.placement.homes for engine in list(self.runtime.engines)]
        for variable in variables:
            key, home = id(keras.variable_of(variable)), home_of(variable)
            if home is not None and home.partition is not None:
                self.placement.homes.setdefault(key, home.partition)
            elif known := [homes[key] for homes in others if key in homes]:
                self.placement.homes.setdefault(key, min(known))

    def run_on(self, asked: Signature, tensors: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Calls the model on tensors, in a trace; returns its result and its losses."""
        args, kwargs = asked.arguments(tensors)
        with self.layer_names.watched(self.model):
            return self.run(*args, **kwargs), self.losses()

    def _traced(
        self, run: Run, tensors: Sequence[Any], wanted: Sequence[bool], has_effects: bool = True
    ) -> tuple[Trace, list[Any]]:
        """Returns the trace of a call, and all variables of the model."""
        self.is_tracing = True
        try:
            self._variables.number(keras.variables_made(self.model))
            with self.runtime.guard.suspended():
                traced = apart(
                    lambda: trace(
                        self.name,
                        self.layer_names,
                        autograph.converted(run),
                        [tf.TensorSpec(each.shape, each.dtype) for each in tensors],
                        wanted,
                        self._variables.create,
                        self._collect,
                        has_effects,
                    )
                )
            _, every = self.collect()
        finally:
            self.is_tracing = False
        return traced, every

    def _planned(self, tensors: Sequence[Any], traced: Trace) -> Plan:
        """Returns the plan of a trace, the same on all processes. Collective: pipeline."""
        config, pp_size = self.runtime.config, self.runtime.topology.pp_size
        placed = place(
            traced,
            self.placement,
            num_partitions=pp_size,
            is_automatic=config.auto_partition,
            default_partition=self._default_partition,
            optimize=config.optimize,
        )
        plan = cut(traced, placed, self.placement.homes, pp_size)
        if pp_size > 1:
            agree(self.runtime, self.name, tensors, plan.digest())
        return plan

    @property
    def _default_partition(self) -> int:
        config = self.runtime.config
        return 0 if config.auto_partition else config.default_partition

    def everywhere(self) -> tuple[list[Any], list[Any]]:
        """Returns the trainable and all variables of the model, wherever they live."""
        saved, self.is_tracing = self.is_tracing, True
        try:
            return self.collect()
        finally:
            self.is_tracing = saved

    def _collect(self) -> tuple[list[Any], list[Any]]:
        """Returns TensorFlow's variables, with those that Keras does not see (of modules)."""
        trainable, every = ([keras.variable_of(v) for v in kind] for kind in self.collect())
        known = {id(variable) for variable in every}
        unseen = [variable for variable in self._variables.made if id(variable) not in known]
        trainable += [variable for variable in unseen if variable.trainable]
        return trainable, [*every, *unseen]


def _is_wanted(tensor: Any, is_nested: bool) -> bool:
    """Tells whether the gradient of an input can be asked for."""
    is_continuous = tensor.dtype.is_floating or tensor.dtype.is_complex
    return is_continuous and (is_nested or is_recorded(tensor))
