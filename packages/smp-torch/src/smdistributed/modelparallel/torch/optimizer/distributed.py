"""The optimizer that replaces the user's: ``smp.DistributedOptimizer``.

Source: smd_model_parallel_pytorch.rst, DistributedOptimizer.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from smdistributed.modelparallel.common.errors import (
    NotPartitionedError,
    SMPError,
    UnsupportedError,
)
from smdistributed.modelparallel.torch.absence.optimizers import zero_grad
from smdistributed.modelparallel.torch.gradients.norm import over_slices
from smdistributed.modelparallel.torch.model.distributed import DistributedModel, models_of
from smdistributed.modelparallel.torch.optimizer.checks import (
    check_replaced,
    check_slices,
    check_update,
    needs_wholes,
    updates_masters,
)
from smdistributed.modelparallel.torch.optimizer.early_state import cut_early_state
from smdistributed.modelparallel.torch.optimizer.named_state import NamedState
from smdistributed.modelparallel.torch.optimizer.shard_names import ShardNames
from smdistributed.modelparallel.torch.optimizer.whole_update import update_wholes
from smdistributed.modelparallel.torch.optimizers.base import FusedOptimizer
from smdistributed.modelparallel.torch.precision.loss_scale import DynamicLossScale, LossScale
from smdistributed.modelparallel.torch.precision.master_update import FP16_Optimizer, MasterUpdate
from smdistributed.modelparallel.torch.precision.one_pass_adam import SMALLEST_ALONE, OnePassAdam
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime


class DistributedOptimizer(ShardNames, torch.optim.Optimizer):
    """A torch optimizer over the parameters of a distributed model.

    It may be built before or after the model is wrapped or partitioned: parameters of other ranks
    have no gradient here, so the wrapped optimizer passes over them and keeps no state for them.
    Attributes that are not its own are those of the wrapped optimizer, and torch's learning rate
    schedulers take either of the two.

    With ``fp16``, ``bf16`` or ``shard_optimizer_state`` the wrapped optimizer updates masters: in
    its parameter groups they take the places of parameters, from the first ``step`` on, or when
    state is read or loaded. Those that other ranks update are not in its groups then. With sharded
    data parallelism they are the blocks of this rank, as soon as there are some.

    Args:
        runtime: the state of the library in this process.
        optimizer: the torch optimizer to wrap.
        loss_scale: of fp16: a fixed factor, or how it follows.

    Attributes:
        optimizer: the wrapped optimizer.
        fp16_optimizer: what it updates by with ``fp16`` or ``bf16``; else None.

    Raises:
        TypeError: ``optimizer`` is no ``torch.optim.Optimizer``.
        ValueError: a parameter is in it twice.
        SMPError: it holds parameters that tensor parallelism has replaced.
        UnsupportedError: its update of one parameter needs the gradients of others, and ranks have
            those of some parameters; or all of the parameter, and parameters are sharded.
    """

    # A fused optimizer would take loss scaling into its own step, past what the ranks share.
    _step_supports_amp_scaling = False
    # Compatibility: Accelerate, through which the Trainer of Transformers passes every optimizer,
    # leaves this one as it is; its wrapper would hide what is not torch's own.
    _is_accelerate_prepared = True

    # Not initialised by the base class: groups and state are the wrapped optimizer's.
    def __init__(
        self,
        runtime: TorchRuntime,
        optimizer: torch.optim.Optimizer,
        loss_scale: float | DynamicLossScale = 1.0,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "DistributedOptimizer takes a torch.optim.Optimizer; received "
                f"{type(optimizer).__name__}."
            )
        check_update(runtime, optimizer)
        config = runtime.config
        self.optimizer = optimizer
        self._runtime = runtime
        self.fp16_optimizer: FP16_Optimizer | None = None
        self._masters: MasterUpdate | None = None
        #: For how many groups it is known, and whether it updates on wholes.
        self._wholes: tuple[int, bool] | None = None
        self._is_updating_wholes = False
        if config.fp16 or config.bf16:
            scale = LossScale(runtime, loss_scale) if config.fp16 else None
            self.fp16_optimizer = FP16_Optimizer(runtime, optimizer, self._models_of(self), scale)
            self._masters = self.fp16_optimizer
        elif updates_masters(runtime, optimizer):
            self._masters = MasterUpdate(runtime, optimizer, self._models_of(self))
        self._check_duplicates()
        self._check_replaced()
        if (
            isinstance(optimizer, FusedOptimizer)
            and self._masters is None
            and runtime.topology.tp_size > 1
        ):
            optimizer.whole_norms = functools.partial(_whole_norms, runtime, self._models_of(self))
        runtime.optimizers.append(weakref.ref(self))
        self._adopt_shards()

    @staticmethod
    def _models_of(this: DistributedOptimizer) -> Callable[[], list[Any]]:
        """Returns what finds the models, without a cycle: who lives must not depend on a cycle."""
        found = weakref.ref(this)

        def models() -> list[Any]:
            own = found()
            return [] if own is None else own._models()

        return models

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's."""
        self._adopt_shards()
        return self.optimizer.param_groups

    def _adopt_shards(self) -> None:
        """Puts shards into the groups of the wrapped optimizer, as soon as there are any."""
        if self._masters is not None and self._runtime.sharding_groups is not None:
            self._masters.adopt()

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
        own = {id(parameter) for group in self._groups() for parameter in group}
        return any(id(parameter) in own for parameter in model.parameters())

    @property
    def is_updating(self) -> bool:
        """Whether what its masters, or whole parameters, are updated by runs."""
        return self._is_updating_wholes or (self._masters is not None and self._masters.is_updating)

    def take_gradients(self) -> None:
        """Brings gradients to what the wrapped optimizer updates; the next ``step`` takes these."""
        if self._masters is not None:
            self._masters.take_gradients()

    def _groups(self) -> list[list[torch.Tensor]]:
        """Returns the parameters that the script gave, by parameter group."""
        if self._masters is None:
            return [list(group["params"]) for group in self.optimizer.param_groups]
        store = self._masters.store
        groups: list[list[torch.Tensor]] = []
        for number, group in enumerate(self.optimizer.param_groups):
            if number >= len(store.groups):  # not taken yet
                groups.append(list(group["params"]))
                continue
            given: dict[int, torch.Tensor] = {id(each): each for each in store.groups[number]}
            for each in map(store.parameter_of, group["params"]):
                given.setdefault(id(each), each)
            groups.append(list(given.values()))
        return groups

    @property
    def applied_loss_scale(self) -> Any:
        """What ``model.backward`` multiplies losses by; None for nothing."""
        return None if self._masters is None else self._masters.loss_scale

    @property
    def overflow(self) -> bool:
        """Whether the last update was left out, on all ranks, as a gradient was not finite.

        It waits for the device. Without ``fp16`` and ``bf16`` it is the wrapped one's, or False.

        Source: model-parallel-extended-features-pytorch-fp16.md.
        """
        if self.fp16_optimizer is None:
            return bool(getattr(self.optimizer, "overflow", False))
        return self.fp16_optimizer.overflow

    @property
    def step_was_skipped(self) -> bool:
        """The same as ``overflow``, as Accelerate asks for it."""
        return self.overflow

    @property
    def loss_scale(self) -> Any:
        """The factor of losses under fp16, for which it waits; else the wrapped optimizer's."""
        scale = self.applied_loss_scale
        return self.optimizer.loss_scale if scale is None else scale.scale.item()  # type: ignore[attr-defined]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies the gradients that the step function left; call it outside the step function.

        With sharded data parallelism ``sdp_gradient_clipping`` bounds the norm of the gradients
        first. A process without parameters of its own does nothing. Under fp16 it is left out on
        all ranks where a gradient is not finite on one; see ``overflow``. Collective: WORLD, with
        ``fp16``, ``shard_optimizer_state`` or sharded data parallelism.

        Raises:
            SMPError: it holds parameters that tensor parallelism has replaced since; it was called
                inside a step function, whose body runs once a microbatch; under fp16, gradients did
                not come from ``model.backward``, or are not finite with the least loss scale.
            UnsupportedError: FusedLamb or FusedNovoGrad with masters, which take norms of whole
                tensors, has parameters that are split over tensor-parallel ranks.
        """
        if self._runtime.is_in_step:
            raise SMPError(
                "optimizer.step was called inside a step function, which runs once for each "
                "microbatch; call it after the step function has returned."
            )
        self._check_replaced()
        self._check_slices()
        for model in self._accumulating_models():
            model.data_parallel.complete_accumulation()
        if self.needs_wholes:
            return self._update_wholes(closure)
        cut_early_state(self.optimizer)
        with self._parameters_awake():
            return self._update(None if closure is None else self._resting(closure))

    @property
    def needs_wholes(self) -> bool:
        """Whether its updates look at more than a rank has; see ``checks.needs_wholes``."""
        if self._masters is not None:
            return False
        groups = len(self.optimizer.param_groups)
        if self._wholes is None or self._wholes[0] != groups:
            has_slices = any(True for _ in self._models_in_slices())
            found = needs_wholes(self._runtime, self.optimizer, has_slices=has_slices)
            if not all(model.partitioned for model in self._models()):
                return found  # of which there may be slices yet
            self._wholes = groups, found
        return self._wholes[1]

    def _models_in_slices(self) -> Iterator[DistributedModel]:
        """Yields the models of which it updates slices."""
        own = {id(each) for group in self._groups() for each in group}
        for model in self._models() if self._runtime.topology.tp_size > 1 else ():
            if not own.isdisjoint(map(id, model.split_parameters())):
                yield model

    @contextlib.contextmanager
    def _parameters_awake(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for model in self._models():
                stack.enter_context(model.parameters_awake())
            yield

    def _resting(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a closure of the script, to which slices stand for whole parameters."""

        @functools.wraps(closure)
        def call() -> Any:
            for model in self._models():
                model.rest()
            try:
                return closure()
            finally:
                for model in self._models():
                    model.wake()

        return call

    def _update(self, closure: Callable[[], Any] | None) -> Any:
        if self._masters is not None:
            return self._masters.step(closure)
        if closure is not None:
            return self.optimizer.step(closure)
        if OnePassAdam.takes(self.optimizer, self._runtime.device):
            with OnePassAdam({}, None, SMALLEST_ALONE):
                return self.optimizer.step()
        return self.optimizer.step()

    def _update_wholes(self, closure: Callable[[], Any] | None) -> Any:
        self._is_updating_wholes = True
        try:
            return update_wholes(self._runtime, self.optimizer, closure)
        finally:
            self._is_updating_wholes = False

    def _check_replaced(self) -> None:
        check_replaced(self._runtime, (each for group in self._groups() for each in group))

    def _check_slices(self) -> None:
        if self._masters is None or not any(True for _ in self._models_in_slices()):
            return
        if not getattr(self.optimizer, "takes_norms_of_tensors", False):
            check_slices(self.optimizer)
            return
        raise UnsupportedError(
            f"{type(self.optimizer).__name__} takes the norm of each whole tensor, and got "
            "masters of parameters that are split over tensor-parallel ranks: use "
            "smp.optimizers.FusedAdam, or one of torch that works number by number."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, as torch's."""
        with self._parameters_awake():
            zero_grad(self.optimizer, set_to_none)
            if self._masters is not None:
                self._masters.store.forget_gradients(set_to_none)
        for model in self._accumulating_models():
            own = {id(each) for group in self._groups() for each in group}
            if all(id(each) in own for each in model.parameters() if each.requires_grad):
                model.data_parallel.restart_accumulation()

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales the fp32 gradients of the next update, so that their norm is at most ``max_norm``.

        Call it before ``step``. Collective: MP_GROUP; with ``shard_optimizer_state``, and under
        fp16, WORLD.

        Shape: the norm is a scalar.

        Args:
            max_norm: the largest norm allowed.
            norm_type: order of the norm.

        Returns:
            The norm before clipping, over the whole model, without the loss scale.

        Raises:
            UnsupportedError: neither ``fp16`` nor ``bf16`` is configured.

        Source: model-parallel-extended-features-pytorch-fp16.md.
        """
        if self.fp16_optimizer is None:
            raise UnsupportedError(
                "clip_master_grads needs fp16 or bf16 in the configuration: without, clip with "
                "smp.clip_grad_norm_, which takes the norm over all partitions together."
            )
        return self.fp16_optimizer.clip(max_norm, norm_type)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as torch's.

        Raises:
            ValueError: a parameter is in it twice.
        """
        self.optimizer.add_param_group(param_group)
        self._check_duplicates()
        self._check_replaced()

    # ------------------------------------------------------------------ state

    @property
    def _named(self) -> NamedState:
        models = self._models()
        for model in models:
            model.follow_changes()  # a parameter may have another name since the last step
        return NamedState(
            self._runtime,
            self.optimizer,
            self._masters,
            models,
            self._groups(),
            is_whole=self.needs_wholes,
        )

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """Returns the state of this rank's parameters, and whether that is only a part.

        It has torch's form, with the names of parameters in place of their numbers. With half
        precision the state of a parameter has its fp32 value as ``master`` besides, and the whole
        has ``loss_scale``.

        Shape: those of the wrapped optimizer's tensors: the parameter's own, or a scalar.

        Args:
            gather_if_shard: with ``shard_optimizer_state``, bring the shards of the DP_GROUP
                together on each of its ranks, which is collective over it: ``state`` is a list
                then, with the dict of each rdp_rank; False: the dict of the own shard.

        Raises:
            NotPartitionedError: the model is not partitioned yet.

        Source: smd_model_parallel_pytorch.rst, DistributedOptimizer.
        """
        if any(not model.partitioned for model in self._models()):
            raise NotPartitionedError(
                "which part of the optimizer state belongs to this rank is known after the first "
                "call of a step function, which partitions the model."
            )
        return self._named.local(gather=gather_if_shard)

    def state_dict(self, gather_to_rank0: bool = False) -> dict[str, Any]:
        """Returns the state over all partitions in torch's own form.

        A torch optimizer over the same parameters of the plain model can load it. Collective:
        every rank of the PP_GROUP; with tensor parallelism of the MP_GROUP; with
        ``shard_optimizer_state`` of WORLD.

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
        if not all(model.partitioned for model in models):
            state = self.optimizer.state_dict()
        else:
            state = self._named.whole(to_rank0=gather_to_rank0)
        return {} if gather_to_rank0 and self._runtime.rank != 0 else state

    def names_of_groups(self) -> list[list[str]]:
        """Returns the names of the parameters of each parameter group, of all ranks. Local."""
        return self._named.group_names()

    def orig_state_dict(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's own ``state_dict``: this rank's, by number."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], gather_if_shard: bool = True) -> None:
        """Loads the state of the whole model, or the parts that the ranks give together.

        The settings of the parameter groups are loaded at once, the state of parameters as soon as
        the model is partitioned. Collective for a partial state: every rank of the PP_GROUP; with
        ``shard_optimizer_state`` of WORLD.

        Args:
            state_dict: from ``state_dict``, ``local_state_dict``, or a torch optimizer over the
                same parameters in the same order. Of a list of shards also that of this rdp_rank
                alone, in a job of as many.
            gather_if_shard: accepted; a state says itself what it is part of.

        Raises:
            ValueError: it is for other numbers of parameters.
            CheckpointError: a parameter of this rank is not in it.

        Source: smd_model_parallel_pytorch.rst, DistributedOptimizer.
        """
        state = self._named.load_settings(state_dict)
        self._when_partitioned(lambda: self._named.load(state))

    def _when_partitioned(self, action: Callable[[], None]) -> None:
        waiting = [model for model in self._models() if not model.partitioned]
        if waiting:
            waiting[0].holder.when_partitioned(lambda: self._when_partitioned(action))
        else:
            action()

    # ------------------------------------------------------------------ parameters

    def _accumulating_models(self) -> list[DistributedModel]:
        """Returns the models with gradients of fewer steps than ``backward_passes_per_step``."""
        return [
            model
            for model in models_of(self._runtime)
            if model.data_parallel.is_accumulating and self.serves(model)
        ]

    def _models(self) -> list[DistributedModel]:
        return [model for model in models_of(self._runtime) if self.serves(model)]

    def _check_duplicates(self) -> None:
        names = {
            id(parameter): name
            for model in models_of(self._runtime)
            for name, parameter in model.get_module().named_parameters()
        }
        seen: set[int] = set()
        for number, group in enumerate(self._groups()):
            for place, parameter in enumerate(group):
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


def _whole_norms(
    runtime: TorchRuntime,
    models: Callable[[], list[Any]],
    parameters: Sequence[torch.Tensor],
    norms: torch.Tensor,
    order: float,
) -> torch.Tensor:
    """Combines norms of slices, in place of which it puts those of the whole tensors."""
    split = {id(each) for model in models() for each in model.split_parameters()}
    places = [place for place, each in enumerate(parameters) if id(each) in split]
    if places:
        norms[places] = over_slices(runtime, norms[places], order)
    return norms
