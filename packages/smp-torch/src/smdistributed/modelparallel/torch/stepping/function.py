"""The step decorator: one call of the user's function becomes a pipelined mini-batch.

Source: smd_model_parallel_common_api.rst, The Library's Core APIs.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from smdistributed.modelparallel.common.errors import ConfigError, SMPError, UnsupportedError
from smdistributed.modelparallel.common.microbatch import (
    SplitRules,
    check_function,
    signature_of,
)
from smdistributed.modelparallel.common.planning.simulator import Timeline
from smdistributed.modelparallel.common.runtime import RuntimeSlot
from smdistributed.modelparallel.common.search.profile import ModelProfile
from smdistributed.modelparallel.torch.activations.offloading import ActivationMemory
from smdistributed.modelparallel.torch.compat.private.compiled import as_written
from smdistributed.modelparallel.torch.context_parallel.group import ContextGroup
from smdistributed.modelparallel.torch.execute.compiled_runs import CompiledRuns
from smdistributed.modelparallel.torch.execute.taped_runs import TapedRuns
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.stepping.body_captures import body_captures_of
from smdistributed.modelparallel.torch.stepping.eager import EagerStep
from smdistributed.modelparallel.torch.stepping.pipelined import PipelinedStep
from smdistributed.modelparallel.torch.stepping.planned import PlannedStep
from smdistributed.modelparallel.torch.stepping.replaying import replays_of
from smdistributed.modelparallel.torch.stepping.sequences import check_dims
from smdistributed.modelparallel.torch.stepping.split_segments import SplitSegments
from smdistributed.modelparallel.torch.stepping.split_sequences import SplitSequences

NOT_COMPILED = (
    "step function {} is not compiled itself, since its backward pass runs over all partitions; "
    "compile the model, or modules in it."
)
#: What ``torch.compile`` takes besides what it compiles.
_COMPILER_OPTIONS = ("backend", "mode", "options", "fullgraph", "dynamic")


class StepFunction:
    """A decorated step function; call it like the function it wraps.

    Each call splits the tensor arguments into microbatches, runs the body once for each, and
    returns the body's result with a ``StepOutput`` in place of each tensor. With more than one
    partition the Python of the body runs on every rank, for every microbatch, before anything is
    computed; tensors have shapes and types then, but no values.

    Collective: every process, in the same order.

    Args:
        slot: holds the runtime from ``smp.init`` on.
        function: the user's function.
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: batch axis by argument name; 0 for all others.
        detach_outputs: detach returned tensors.
        static: the Python of the function is promised to do the same in every call.
        cuda_graphs: passes are captured as CUDA graphs; "auto": with one partition see
            ``body_captures_of``.
        compiling: options of ``torch.compile``, if what lies between modules is compiled.
        sequence_dims: with ``context_parallel_degree``, the dim of the sequence by argument name.

    Raises:
        ConfigError: an option names no argument of the function, or that is none whose calls
            return results.
    """

    def __init__(
        self,
        slot: RuntimeSlot[TorchRuntime],
        function: Callable[..., Any],
        non_split_inputs: Iterable[str] | None,
        input_split_axes: Mapping[str, int] | None,
        detach_outputs: bool,
        static: bool,
        cuda_graphs: bool | Literal["auto"],
        compiling: Mapping[str, Any] | None,
        sequence_dims: Mapping[str, int | None],
    ) -> None:
        check_function(function)
        check_dims(sequence_dims)
        if as_written(function) is not function:
            function = as_written(function)
            warnings.warn(NOT_COMPILED.format(function.__name__), stacklevel=5)
        functools.update_wrapper(self, function)
        self._slot = slot
        self._function = function
        self._rules = SplitRules(
            signature_of(function), non_split_inputs or (), input_split_axes or {}
        )
        self._detach_outputs = detach_outputs
        self._static = static
        self._cuda_graphs = cuda_graphs
        self._compiling = compiling
        self._sequence_dims = sequence_dims
        self._engine: EagerStep | PipelinedStep | PlannedStep | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one mini-batch."""
        runtime = self._slot.get()
        if runtime.is_in_step:
            raise SMPError(
                f"step function {self._function.__name__} was called from inside another step "
                "function; call one after the other, or undecorate the inner one."
            )
        if runtime.measuring is not None:
            runtime.measuring.begins(self.name, runtime.close)
        if self._engine is None or self._engine.runtime is not runtime:
            self._engine = self._make(runtime)
        return self._engine.run(args, kwargs)

    def _make(self, runtime: TorchRuntime) -> EagerStep | PipelinedStep | PlannedStep:
        if runtime.planning is not None:
            return self._planned(runtime, runtime.planning.device)
        given = runtime, self._function, self._rules, self._detach_outputs
        if (group := runtime.context_group) is not None:
            return self._with_sequences(runtime, group)
        compiled = None if self._compiling is None else CompiledRuns(self._compiling)
        runs = TapedRuns(
            compiled,
            runtime.device,
            tuple(dict.fromkeys(("cpu", runtime.device.type))),
            runtime.fake_mode,
            are_differentiated=runtime.topology.pp_size > 1,
        )
        asked = runtime, self.name, self._cuda_graphs, runs
        if runtime.topology.pp_size == 1:
            return EagerStep(*given, functools.partial(body_captures_of, *asked))
        return PipelinedStep(*given, self._static, replays_of(*asked), compiled)

    def _with_sequences(
        self, runtime: TorchRuntime, group: ContextGroup
    ) -> EagerStep | PipelinedStep:
        given = runtime, self._function, self._rules, self._detach_outputs
        if not self._detach_outputs:
            raise UnsupportedError(
                f"step function {self.name} has detach_outputs=False, and with "
                "context_parallel_degree gradients end with the step: call model.backward in "
                "it, and leave detach_outputs out."
            )
        if runtime.topology.pp_size > 1:
            segments = SplitSegments(runtime, group, self._rules, self._sequence_dims)
            return PipelinedStep(*given, self._static, None, None, segments)
        sequences = SplitSequences(runtime, group, self._function, self._rules, self._sequence_dims)
        return EagerStep(*given, lambda _: None, sequences)

    def _planned(self, runtime: TorchRuntime, device: str = "") -> PlannedStep:
        return PlannedStep(runtime, self._function, self._rules, self._cuda_graphs, device)

    def profile(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> ModelProfile:
        """Records a call, and returns what it costs; computes nothing of the model. Local.

        Args:
            args, kwargs: of the call.
            device: the kind that is planned for. Operations are timed where it is this process's.

        Raises:
            ConfigError: the process is not alone, or the call does not train.
        """
        runtime = self._slot.get()
        if runtime.topology.size > 1:
            raise ConfigError(
                f"one process plans for a job; received {runtime.topology.size}: start the script "
                "without a launcher."
            )
        recorded = self._planned(runtime, device).looked_at(args, kwargs)
        if isinstance(recorded, ModelProfile):
            return recorded
        raise ConfigError(
            f"a plan is for a step that trains; {self.name} asks for no gradients: call "
            "model.backward in it."
        )

    def foresee(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Records a call, and has it known what its passes will hold; computes nothing. Local.

        Raises:
            ConfigError: there are several partitions, or the call does not train.
        """
        runtime = self._slot.get()
        if runtime.topology.pp_size > 1:
            raise ConfigError(
                "with several partitions it is known what passes hold when the first step has been "
                f"recorded, before it is computed; received step function {self.name}, to record "
                "it apart: call smp.memory() after the step, or read the log."
            )
        held = self._planned(runtime).held(args, kwargs)
        if held is None:
            raise ConfigError(
                f"what passes hold is known of a step that trains; {self.name} asks for no "
                "gradients: call model.backward in it."
            )
        runtime.passes.note(self._function, [held])

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Binds like a function, so that methods can be step functions."""
        return self if instance is None else types.MethodType(self, instance)

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(self._function.__name__)

    def timeline(self) -> Timeline:
        """Returns when every action of the last call ran, in seconds from its start.

        Collective: every rank of the PP_GROUP. On a GPU these are the times of the device, which
        is waited for. Between hosts they are as exact as the clocks of these agree.

        Raises:
            SMPError: the function has not run yet, or there is only one partition.
        """
        if not isinstance(self._engine, PipelinedStep):
            raise SMPError("there is a timeline after a call with more than one partition only.")
        return self._engine.timeline()

    def activation_memory(self) -> ActivationMemory:
        """Returns where the activations that checkpointing saved were in the last call.

        Of this rank; an addition of this library. Local.

        Raises:
            SMPError: ``offload_activations`` is not set, or the function has not run yet.
        """
        offloading = None if self._engine is None else self._engine.offloading
        if offloading is None:
            raise SMPError(
                "activations are counted where they are offloaded: set offload_activations to "
                f"True, and call step function {self.name}."
            )
        return dataclasses.replace(offloading.memory)


def step(
    slot: RuntimeSlot[TorchRuntime],
    function: Callable[..., Any] | None = None,
    *,
    non_split_inputs: Iterable[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
    static: bool = False,
    cuda_graphs: bool | Literal["auto"] = "auto",
    compile: bool | Mapping[str, Any] = False,
    sequence_dims: Mapping[str, int | None] | None = None,
) -> Any:
    """Makes a step function; usable with and without parentheses. See ``StepFunction``."""
    compiling = _options_of(compile)
    if cuda_graphs not in (True, False, "auto"):
        raise ConfigError(f'cuda_graphs is True, False or "auto"; received {cuda_graphs!r}.')

    def decorate(function: Callable[..., Any]) -> StepFunction:
        return StepFunction(
            slot,
            function,
            non_split_inputs,
            input_split_axes,
            detach_outputs,
            static,
            cuda_graphs,
            compiling,
            {} if sequence_dims is None else sequence_dims,
        )

    return decorate if function is None else decorate(function)


def _options_of(compile: object) -> Mapping[str, Any] | None:
    """Returns the options of ``torch.compile``; None where nothing is to be compiled.

    Raises:
        ConfigError: they are none.
    """
    if isinstance(compile, bool):
        return {} if compile else None
    if isinstance(compile, Mapping):
        unknown = [str(each) for each in compile if each not in _COMPILER_OPTIONS]
        if not unknown:
            return dict(compile)
        raise ConfigError(
            f"compile takes the options of torch.compile; received {', '.join(unknown)}: choose of "
            f"{', '.join(_COMPILER_OPTIONS)}."
        )
    raise ConfigError(
        "compile is True, False, or a dictionary of options of torch.compile; received "
        f"{compile!r}."
    )
