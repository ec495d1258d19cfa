"""The optimizer that replaces the user's: ``smp.DistributedOptimizer``.

Source: smd_model_parallel_pytorch.rst, DistributedOptimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from smdistributed.modelparallel.common.errors import (
    NotPartitionedError,
    SMPError,
    UnsupportedError,
)
from smdistributed.modelparallel.torch.gradients.norm import over_slices
from smdistributed.modelparallel.torch.model.distributed import DistributedModel, models_of
from smdistributed.modelparallel.torch.model.slices import SlicedTensors
from smdistributed.modelparallel.torch.model.state import PARTIAL_KEY, collect
from smdistributed.modelparallel.torch.optimizer import state as optimizer_state
from smdistributed.modelparallel.torch.optimizers.base import FusedOptimizer
from smdistributed.modelparallel.torch.record.nested import map_tensors
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime


class DistributedOptimizer(torch.optim.Optimizer):
    """A torch optimizer over the parameters of a distributed model.

    It may be built before or after the model is wrapped or partitioned: parameters of other ranks
    have no gradient here, so the wrapped optimizer passes over them and keeps no state for them.
    Attributes that are not its own are those of the wrapped optimizer, and torch's learning rate
    schedulers take either of the two.

    Args:
        runtime: the state of the library in this process.
        optimizer: the torch optimizer to wrap.

    Raises:
        TypeError: ``optimizer`` is no ``torch.optim.Optimizer``.
        ValueError: a parameter is in it twice.
        UnsupportedError: its update of one parameter needs the gradients of all, and the pipeline
            has several partitions.
    """

    # A fused optimizer would take loss scaling into its own step, past what the ranks share.
    _step_supports_amp_scaling = False
    # Compatibility: Accelerate, through which the Trainer of Transformers passes every optimizer,
    # leaves this one as it is; its wrapper would hide what is not torch's own.
    _is_accelerate_prepared = True
    step_was_skipped = False

    # Not initialised by the base class: groups and state are the wrapped optimizer's.
    def __init__(self, runtime: TorchRuntime, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "DistributedOptimizer takes a torch.optim.Optimizer; received "
                f"{type(optimizer).__name__}."
            )
        if isinstance(optimizer, torch.optim.LBFGS) and runtime.topology.pp_size > 1:
            raise UnsupportedError(
                "LBFGS searches along the gradient of the whole model, of which a rank has a part; "
                "use it with pipeline_parallel_degree 1."
            )
        self.optimizer = optimizer
        self._runtime = runtime
        self._check_duplicates()
        if isinstance(optimizer, FusedOptimizer) and runtime.topology.tp_size > 1:
            optimizer.whole_norms = self._whole_norms
        runtime.optimizers.append(weakref.ref(self))

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.defaults

    def serves(self, model: DistributedModel) -> bool:
        """Tells whether it holds a parameter of ``model``."""
        own = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        return any(id(parameter) in own for parameter in model.parameters())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies the gradients that the step function left; call it outside the step function.

        A process without parameters of its own does nothing.

        Raises:
            SMPError: called inside a step function, whose body runs once a microbatch.
        """
        if self._runtime.current_step is not None:
            raise SMPError(
                "optimizer.step was called inside a step function, which runs once for each "
                "microbatch; call it after the step function has returned."
            )
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def _whole_norms(
        self, parameters: Sequence[torch.Tensor], norms: torch.Tensor, order: float
    ) -> torch.Tensor:
        """Combines norms of slices, in place of which it puts those of the whole tensors."""
        split = {id(each) for model in self._models() for each in model.split_parameters()}
        places = [place for place, each in enumerate(parameters) if id(each) in split]
        if places:
            norms[places] = over_slices(self._runtime, norms[places], order)
        return norms

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, as torch's."""
        self.optimizer.zero_grad(set_to_none)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> None:
        """Clips the master gradients of half precision, which is not there yet.

        Raises:
            UnsupportedError: always.

        Source: model-parallel-extended-features-pytorch-fp16.md.
        """
        raise UnsupportedError(
            "clip_master_grads needs fp16, which is not supported yet: clip with "
            "smp.clip_grad_norm_, which takes the norm over all partitions together."
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as torch's.

        Raises:
            ValueError: a parameter is in it twice.
        """
        self.optimizer.add_param_group(param_group)
        self._check_duplicates()

    # ------------------------------------------------------------------ state

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """Returns the state of this rank's parameters, and whether that is only a part.

        It has torch's form, with the names of parameters in place of their numbers.

        Shape: those of the wrapped optimizer's tensors: the parameter's own, or a scalar.

        Args:
            gather_if_shard: without effect: optimizer state is not sharded yet.

        Raises:
            NotPartitionedError: the model is not partitioned yet.

        Source: smd_model_parallel_pytorch.rst, DistributedOptimizer.
        """
        if any(not model.partitioned for model in self._models()):
            raise NotPartitionedError(
                "which part of the optimizer state belongs to this rank is known after the first "
                "call of a step function, which partitions the model."
            )
        groups = self._group_names()
        state = optimizer_state.to_names(self.optimizer.state_dict(), groups, self._own_names())
        is_part = self._runtime.topology.pp_size > 1 or bool(self._sliced())
        return {**state, PARTIAL_KEY: is_part}

    def state_dict(self, gather_to_rank0: bool = False) -> dict[str, Any]:
        """Returns the state over all partitions in torch's own form.

        A torch optimizer over the same parameters of the plain model can load it. Collective:
        every rank of the PP_GROUP; with tensor parallelism of the MP_GROUP.

        Args:
            gather_to_rank0: give every process but rank 0 an empty dict.

        Raises:
            NotPartitionedError: a loaded state still waits for the partition of the model.
            CommError: a rank did not take part.

        Source: smd_model_parallel_pytorch.rst, DistributedOptimizer.
        """
        models = self._models()
        for model in models:
            model.holder.check_nothing_waits()
        runtime = self._runtime
        sliced = self._sliced()
        is_split = runtime.topology.pp_size > 1 or bool(sliced)
        state = self.optimizer.state_dict()
        if is_split and all(model.partitioned for model in models):
            local = self.local_state_dict()
            local["state"] = sliced.to_send(local["state"])
            own = map_tensors(local, torch.Tensor.cpu)
            parts = collect(runtime, own, sliced.group, to_rank0=gather_to_rank0)
            if parts:
                merged = self._merged(sliced, parts)
                state = optimizer_state.to_numbers(merged, self._ordered(merged))
        return {} if gather_to_rank0 and runtime.rank != 0 else state

    def orig_state_dict(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's own ``state_dict``: this rank's, by number."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], gather_if_shard: bool = True) -> None:
        """Loads the state of the whole model, or the parts that the ranks give together.

        The settings of the parameter groups are loaded at once, the state of parameters as soon as
        the model is partitioned. Collective for a partial state: every rank of the PP_GROUP.

        Args:
            state_dict: from ``state_dict``, ``local_state_dict``, or a torch optimizer over the
                same parameters in the same order.
            gather_if_shard: without effect: optimizer state is not sharded yet.

        Raises:
            ValueError: it is for other numbers of parameters.
            CheckpointError: a parameter of this rank is not in it.

        Source: smd_model_parallel_pytorch.rst, DistributedOptimizer.
        """
        groups = self._group_names()
        state: Mapping[str, Any] = state_dict
        if not optimizer_state.is_named(state):
            state = optimizer_state.to_names(
                state, groups, {name for each in groups for name in each}
            )
        if len(state["param_groups"]) != len(groups):
            raise ValueError(
                f"the state has {len(state['param_groups'])} parameter groups, the optimizer has "
                f"{len(groups)}."
            )
        bare = {"state": {}, "param_groups": state["param_groups"]}
        self.optimizer.load_state_dict(optimizer_state.to_numbers(bare, groups))
        self._when_partitioned(lambda: self._load(state))

    def _load(self, state: Mapping[str, Any]) -> None:
        groups, own = self._group_names(), self._own_names()
        if state.get(PARTIAL_KEY, False):
            given = {name for names in optimizer_state.names_in(state) for name in names}
            # Under the same partition every rank has what it needs, and nothing travels.
            group = self._sliced().group
            if any(self._runtime.communicator.allgather(not own <= given, group)):
                part = map_tensors(dict(state), torch.Tensor.cpu)
                sliced = self._sliced()
                state = self._merged(sliced, collect(self._runtime, part, sliced.group))
        optimizer_state.check_covers(state, groups, own)
        # A copy, as torch would go on with the given tensors themselves.
        sliced = self._sliced()
        values = {
            name: map_tensors(sliced.cut(name, value), torch.Tensor.clone)
            for name, value in state["state"].items()
            if name in own
        }
        # The settings are those of now: the script may have changed them since they were loaded.
        now = {"state": values, "param_groups": self.optimizer.state_dict()["param_groups"]}
        self.optimizer.load_state_dict(optimizer_state.to_numbers(now, groups))

    def _when_partitioned(self, action: Callable[[], None]) -> None:
        waiting = [model for model in self._models() if not model.partitioned]
        if waiting:
            waiting[0].holder.when_partitioned(lambda: self._when_partitioned(action))
        else:
            action()

    # ------------------------------------------------------------------ parameters

    def _models(self) -> list[DistributedModel]:
        return [model for model in models_of(self._runtime) if self.serves(model)]

    def _names(self) -> dict[int, str]:
        """Returns the name of each parameter of the models, by id."""
        models = self._models()
        if not models and self._runtime.topology.pp_size > 1:
            raise SMPError(
                "the optimizer holds no parameter of a DistributedModel: make the model before "
                "the state of its optimizer is read or loaded."
            )
        return {
            id(parameter): f"{number}.{name}" if len(models) > 1 else name
            for number, model in enumerate(models)
            for name, parameter in model.get_module().named_parameters()
        }

    def _sliced(self) -> SlicedTensors:
        """Returns the parameters that are split over tensor-parallel ranks."""
        models = self._models()
        prefixes = [f"{number}." if len(models) > 1 else "" for number in range(len(models))]
        holders = {prefix: model.holder for prefix, model in zip(prefixes, models, strict=True)}
        return SlicedTensors.of(self._runtime, holders)

    @staticmethod
    def _merged(sliced: SlicedTensors, parts: list[Any]) -> dict[str, Any]:
        """Returns the union of the states that ranks gave, with slices joined."""
        merged = optimizer_state.merge(parts)
        return {**merged, "state": sliced.merge([part["state"] for part in parts])}

    def _group_names(self) -> list[list[str]]:
        """Returns the names of the parameters of each group, of all ranks."""
        names = self._names()
        return [
            # A parameter of no model goes by its place; every rank has it.
            [
                names.get(id(each), f"#{number}.{place}")
                for place, each in enumerate(group["params"])
            ]
            for number, group in enumerate(self.param_groups)
        ]

    def _own_names(self) -> set[str]:
        """Returns the names of the parameters that are on this rank."""
        here = {id(each) for model in self._models() for each in model.local_parameters()}
        foreign = {name for key, name in self._names().items() if key not in here}
        return {name for names in self._group_names() for name in names} - foreign

    def _ordered(self, merged: Mapping[str, Any]) -> Sequence[Sequence[str]]:
        """Returns the groups of a merged state in the order of the whole optimizer."""
        own, found = self._group_names(), optimizer_state.names_in(merged)
        if all(set(names) == set(others) for names, others in zip(own, found, strict=True)):
            return own
        # Built over the parameters of this rank alone: the order of the model.
        places = {name: place for place, name in enumerate(self._names().values())}
        return [sorted(names, key=lambda name: places.get(name, len(places))) for names in found]

    def _check_duplicates(self) -> None:
        names = {
            id(parameter): name
            for model in models_of(self._runtime)
            for name, parameter in model.get_module().named_parameters()
        }
        seen: set[int] = set()
        for number, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) in seen:
                    name = names.get(id(parameter), f"of shape {tuple(parameter.shape)}")
                    raise ValueError(
                        f"parameter {name} is in the optimizer twice (again in group {number} at "
                        f"place {place}), and would be updated twice: give each parameter once."
                    )
                seen.add(id(parameter))


def optimizers_of(runtime: TorchRuntime) -> list[DistributedOptimizer]:
    """Returns the optimizers of this process that exist, in order of creation."""
    return cast(list[DistributedOptimizer], runtime.live_optimizers())
