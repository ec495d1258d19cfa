"""Data parallelism of one model: its replicas start alike, stay alike and share their gradients.

Source: smd_model_parallel_pytorch.rst, DistributedModel.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.torch.gradients.departures import Foreseen
from smdistributed.modelparallel.torch.gradients.owners import Owners
from smdistributed.modelparallel.torch.gradients.reduction import GradientReduction
from smdistributed.modelparallel.torch.gradients.replicas import (
    Exchange,
    Replicas,
    ReplicasOfSlices,
)
from smdistributed.modelparallel.torch.gradients.shards import Shards, is_outside_step
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.sharding.accumulation import Accumulation
from smdistributed.modelparallel.torch.sharding.home import is_sharded

_BYTES_PER_MB = 1024 * 1024
_NUMBERS: dict[str, tuple[str, tuple[type, ...]]] = {
    "backward_passes_per_step": ("an integer of at least 1", (int,)),
    "bucket_cap_mb": ("a number above 0", (int, float)),
}


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions:
    """The arguments of ``DistributedModel`` that are about data parallelism.

    Attributes:
        overlapping_allreduce: reduce each bucket of gradients as soon as it is complete.
        backward_passes_per_step: step calls whose gradients are summed before they are reduced.
        average_grads_across_microbatches: divide summed gradients by the number of microbatches.
        bucket_cap_mb: size of a bucket, in MiB.
        broadcast_buffers: buffers follow the first rank of the DP_GROUP at each step.
        gradient_as_bucket_view: leave gradients in the buckets.
        find_unused_parameters: without effect: unused parameters are always found.

    Raises:
        TypeError: a value has another type.
        ValueError: a number is too small.
    """

    overlapping_allreduce: bool = True
    backward_passes_per_step: int = 1
    average_grads_across_microbatches: bool = True
    bucket_cap_mb: float = 25
    broadcast_buffers: bool = True
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            rule, kinds = _NUMBERS.get(name, ("True or False", (bool,)))
            # A bool is an int in Python, but no number.
            if not isinstance(value, kinds) or (name in _NUMBERS and isinstance(value, bool)):
                raise TypeError(f"{name} must be {rule}; received {value!r}.")
            if isinstance(value, int | float) and name in _NUMBERS and value <= 0:
                raise ValueError(f"{name} must be {rule}; received {value!r}.")


class DataParallel:
    """What a model does together with its replicas.

    Args:
        runtime: the state of the library in this process.
        options: how.
    """

    def __init__(self, runtime: TorchRuntime, options: DataParallelOptions) -> None:
        self._runtime = runtime
        self.options = options
        self._replicas = Replicas(runtime)
        self._parameters: list[tuple[str, nn.Parameter]] | None = None
        self._find_buffers: Callable[[], Callable[[], Iterable[torch.Tensor]] | None] | None = None
        self._replicas_of_slices = ReplicasOfSlices(runtime, self._replicas)
        self._slices: list[tuple[str, nn.Parameter]] = []
        kinds = (self._replicas, self._replicas_of_slices)
        self._owners = [Owners(each) for each in kinds] if self._has_owners else []
        self._accumulation = Accumulation(options.backward_passes_per_step)
        #: What is together with the ranks of a sharding group; None without.
        self.shards = None
        if runtime.sharding_groups is not None:
            self.shards = Shards(
                runtime,
                *kinds,
                overlapping=options.overlapping_allreduce,
                accumulation=self._accumulation,
            )
        self._reduction, self._slice_reduction = self._reductions = [
            GradientReduction(
                replicas,
                overlapping=options.overlapping_allreduce,
                accumulation=self._accumulation,
                bucket_bytes=int(options.bucket_cap_mb * _BYTES_PER_MB),
                as_bucket_view=options.gradient_as_bucket_view,
                waits_for_end=self._is_joining_with_slices,
                is_outside_step=functools.partial(is_outside_step, runtime),
                updates=lambda: runtime.num_updates,
                owners=owners,
            )
            for replicas, owners in zip(kinds, self._owners or (None, None), strict=True)
        ]

    def _is_joining_with_slices(self) -> bool:
        # Replicas without batches follow one kind of reduction to its end, then the next.
        return self._replicas.is_joining and bool(self._slices)

    def attach(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        slices: Iterable[tuple[str, nn.Parameter]],
        buffers: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        """Takes the tensors of this rank, once they are here, and those of the first replica.

        Collective: DP_GROUP.

        Args:
            parameters: that all data-parallel ranks hold, with their names.
            slices: those that only the ranks of the RDP_GROUP have in common.
            buffers: method that gives the buffers, of which code may replace one. Kept as a weak
                reference: which models live must not depend on when a rank collects cycles.
        """
        self._parameters, self._slices = _whole(parameters), _whole(slices)
        self._find_buffers = weakref.WeakMethod(buffers)
        self._broadcast_all(source=0)
        self.watch(self._parameters, self._slices)

    def watch(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        slices: Iterable[tuple[str, nn.Parameter]],
    ) -> None:
        """Takes the parameters of this rank, which the user has changed for others."""
        self._parameters, self._slices = _whole(parameters), _whole(slices)
        if self._slices and self._reduction.has_hook:
            self._refuse_hook()
        for owners, named in zip(self._owners, (self._parameters, self._slices), strict=False):
            owners.assign([parameter for _, parameter in named])
        self._reduction.watch(self._parameters)
        self._slice_reduction.watch(self._slices)

    def _buffers(self) -> Iterable[torch.Tensor]:
        buffers = None if self._find_buffers is None else self._find_buffers()
        return () if buffers is None else buffers()

    def _broadcast_all(self, source: int) -> None:
        tensors = [parameter for _, parameter in self._parameters or ()]
        self._replicas.broadcast([*tensors, *self._buffers()], source)
        slices = [parameter for _, parameter in self._slices]
        self._replicas_of_slices.broadcast(slices, self._replicas_of_slices.beside(source))

    # ------------------------------------------------------------------ sharded state

    @property
    def _has_owners(self) -> bool:
        return self._runtime.config.shard_optimizer_state

    def speaks_for(self, parameter: nn.Parameter, *, is_slice: bool) -> bool:
        """Tells whether of the ranks that have the same of a parameter this is the first one."""
        place, groups = self._runtime.coordinates, self._runtime.sharding_groups
        num_blocks = groups.degree if groups is not None and is_sharded(parameter) else 1
        return place.rdp_cp_rank < num_blocks and (is_slice or place.tp_rank == 0)

    def updates(self) -> dict[nn.Parameter, bool]:
        """Returns for each parameter on this rank whether this rank updates it."""
        kinds = (self._parameters or [], self._slices)
        if not self._owners:
            in_shards = () if self.shards is None else self.shards.parameters()
            whole = (parameter for named in kinds for _, parameter in named)
            return dict.fromkeys((*whole, *in_shards), True)
        return {
            parameter: owners.is_own(parameter)
            for owners, named in zip(self._owners, kinds, strict=True)
            for _, parameter in named
        }

    def check_reduced(self) -> None:
        """Makes sure before an update by owners, or a norm for it, that nobody waits for gradients.

        Collective: DP_GROUP, if this rank has made no backward pass since the last update.

        Raises:
            SMPError: others have made one.
        """
        for each in self._reductions:
            each.check_reduced()

    def share_updates(self) -> None:
        """Gives all ranks the parameters that their owners have updated. Collective: DP_GROUP."""
        for each in self._reductions:
            each.updated()
        for owners in self._owners:
            owners.share()
        if self.shards is not None:
            self.shards.model.updated()

    # ------------------------------------------------------------------ steps

    @property
    def gradient_scale(self) -> Literal["mean", "sum"]:
        """How the gradients of microbatches combine; with a communication hook, that averages."""
        averages = self.options.average_grads_across_microbatches
        return "mean" if averages and not self._reduction.has_hook else "sum"

    def gradient_memory(self) -> list[torch.Tensor]:
        """Returns what gradients lie in on their way, besides those that parameters have."""
        found = [tensor for each in self._reductions for tensor in each.memory()]
        return found if self.shards is None else found + self.shards.model.gradients.memory()

    def copied_gradients(self) -> set[nn.Parameter]:
        """Returns the parameters whose gradients are in buckets besides."""
        if self.options.gradient_as_bucket_view:
            return set()
        return {parameter for each in self._reductions for parameter in each.reduced}

    @property
    def reduces(self) -> bool:
        """Whether backward passes matter to it: there are replicas, or a communication hook."""
        return self.shards is not None or any(each.is_needed for each in self._reductions)

    @property
    def has_gradients(self) -> bool:
        """Whether the step in progress has given this rank a gradient."""
        in_shards = self.shards is not None and self.shards.model.gradients.has_gradients
        return in_shards or any(each.has_gradients for each in self._reductions)

    @property
    def is_joining(self) -> bool:
        """Whether replicas may have run out of batches."""
        return self._replicas.is_joining

    @property
    def sets_buffers(self) -> bool:
        """Whether the start of a step gives this rank the buffers of another one."""
        is_alone = self._replicas.size == 1
        return self._broadcasts_buffers and not is_alone and any(True for _ in self._buffers())

    @property
    def _broadcasts_buffers(self) -> bool:
        return self.options.broadcast_buffers and self._runtime.config.ddp

    def share_buffers(self) -> None:
        """Gives replicas the buffers of the first, before a step. Collective: DP_GROUP."""
        has_buffers = self._broadcasts_buffers
        exchange = Exchange.BUFFERS if has_buffers else Exchange.NOTHING
        active = self._replicas.announce(exchange)
        if has_buffers:
            self._replicas.broadcast(self._buffers(), active[0])

    def begin_step(self) -> None:
        """Starts a step, when buffers are shared."""
        for each in self._reductions:
            each.begin()
        if self.shards is not None:
            self.shards.model.begin()

    def enter_pass(self, completes: Set[nn.Parameter]) -> None:
        """Starts a backward pass; no later one of this step adds to gradients in ``completes``."""
        for each in self._reductions:
            each.enter_pass(completes)
        if self.shards is not None:
            self.shards.enter_pass()

    def enter_last_pass(self) -> None:
        """Starts the last backward pass of this step."""
        for each in self._reductions:
            each.enter_pass(each.everything)
        if self.shards is not None:
            self.shards.enter_pass()

    def foresee(self) -> list[Foreseen]:
        """Returns what knows when gradients leave in a step whose passes are captured now."""
        return [each.foresee() for each in self._reductions]

    def end_step(self) -> None:
        """Ends a step with a backward pass: gradients are reduced. Collective: DP_GROUP."""
        for each in self._reductions:
            each.end()
        if self.shards is not None:
            self.shards.end()

    @property
    def is_accumulating(self) -> bool:
        """Whether steps have added gradients up that have not been reduced."""
        in_shards = self.shards is not None and self.shards.model.gradients.is_accumulating
        return in_shards or any(each.is_accumulating for each in self._reductions)

    def complete_accumulation(self) -> None:
        """Reduces what steps have added up that nobody has reduced.

        Collective: DP_GROUP, if there is any.
        """
        if self._replicas.is_joining:
            return
        for each in self._reductions:
            each.complete()
        if self.shards is not None:
            self.shards.complete()

    def restart_accumulation(self) -> None:
        """Takes note that all gradients have been cleared, on all ranks alike."""
        for each in self._reductions:
            each.restart_accumulation()
        if self.shards is not None:
            self.shards.model.gradients.restart_accumulation()

    # ------------------------------------------------------------------ the user's calls

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """See ``DistributedModel.no_sync``."""
        return self._accumulation.withheld()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """See ``DistributedModel.register_comm_hook``."""
        if not callable(hook):
            raise TypeError(
                f"a communication hook must be callable; received {type(hook).__name__}."
            )
        self._need_ddp("register_comm_hook")
        if not self.options.overlapping_allreduce:
            raise RuntimeError(
                "register_comm_hook needs overlapping_allreduce=True; it is False: leave it at "
                "its default."
            )
        if self.shards is not None:
            raise UnsupportedError(
                "register_comm_hook reduces to every data-parallel rank, and with "
                "sharded_data_parallel_degree above 1 gradients go to the ranks that have the "
                "shards: leave one of them out."
            )
        if self._has_owners:
            raise UnsupportedError(
                "register_comm_hook reduces to every data-parallel rank, and with "
                "shard_optimizer_state a gradient goes to the one that updates its parameter: "
                "leave one of them out."
            )
        if self._slices:
            self._refuse_hook()
        self._reduction.set_hook(lambda bucket: hook(state, bucket))

    @contextlib.contextmanager
    def join(
        self, divide_by_initial_world_size: bool, enable: bool, throw_on_early_termination: bool
    ) -> Iterator[None]:
        """See ``DistributedModel.join``."""
        self._need_ddp("join")
        config = self._runtime.config
        if config.fp16 or config.bf16 or self._has_owners or self.shards is not None:
            raise UnsupportedError(
                "model.join needs every replica to update by itself: with fp16, bf16, "
                "shard_optimizer_state or sharded_data_parallel_degree above 1 the ranks update "
                "together, so give every rank the same "
                "number of batches."
            )
        if not enable or self._replicas.size == 1:
            yield
            return
        with self._replicas.join(
            self._shadow,
            self._adopt,
            divide_by_initial_world_size=divide_by_initial_world_size,
            throw_on_early_termination=throw_on_early_termination,
        ):
            yield

    def _refuse_hook(self) -> None:
        raise UnsupportedError(
            "register_comm_hook reduces over the DP_GROUP, and this model has parameters that are "
            "split over tensor-parallel ranks, of which the RDP_GROUP has copies: leave the hook "
            "out, or the model whole."
        )

    def _need_ddp(self, what: str) -> None:
        if not self._runtime.config.ddp:
            raise RuntimeError(
                f"{what} needs the parameter ddp to be True; it is False: set ddp: True in the "
                "configuration."
            )

    # ------------------------------------------------------------------ after the last batch

    def _shadow(self, exchange: Exchange, active: Sequence[int]) -> None:
        if self._parameters is None:
            raise SMPError(
                f"rank {self._runtime.rank}: model.join needs one batch at least on every "
                "data-parallel rank before the model is partitioned: that happens in the first "
                "call of a step function, which this rank did not make."
            )
        if exchange is Exchange.BUFFERS:
            self._replicas.broadcast(self._buffers(), active[0])
        elif exchange is Exchange.GRADIENTS:
            self._reduction.shadow(active)
        elif exchange is Exchange.GRADIENTS_OF_SLICES:
            self._slice_reduction.shadow(self._replicas_of_slices.among(active))

    def _adopt(self, source: int) -> None:
        self._broadcast_all(source)
        for each in self._reductions:
            each.restart_accumulation()
            each.forget_updates()


def _whole(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    return [(name, each) for name, each in parameters if not is_sharded(each)]
