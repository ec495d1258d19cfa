"""Sharded parameters of one model, and the replicas that have the same shards."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.activations.kept import SavingHooks
from smdistributed.modelparallel.torch.compat.private.backward import (
    is_in_backward,
    when_backward_ends,
)
from smdistributed.modelparallel.torch.compat.private.below import is_of_unusable_tensor
from smdistributed.modelparallel.torch.gradients.replicas import Replicas, ReplicasOfSlices
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.sharding.accumulation import Accumulation
from smdistributed.modelparallel.torch.sharding.home import ShardedModel, ShardingOptions
from smdistributed.modelparallel.torch.sharding.saved_tensors import saving_places


class Shards:
    """What a model does together with the ranks of its sharding group.

    Args:
        runtime: the state of the library in this process; it has sharding groups.
        replicas: all data-parallel ranks.
        replicas_of_slices: those with the same slices.
        overlapping: reduce gradients before a backward pass ends.
        accumulation: over how many steps gradients are summed.

    Attributes:
        model: the sharded parameters.
        runs: whether the model runs for real, on all ranks alike.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        replicas: Replicas,
        replicas_of_slices: ReplicasOfSlices,
        *,
        overlapping: bool,
        accumulation: Accumulation,
    ) -> None:
        assert runtime.sharding_groups is not None
        self._runtime = runtime
        self._replicas = replicas
        self._replicas_of_slices = replicas_of_slices
        self._is_armed = False
        self.runs = False
        config, topology = runtime.config, runtime.topology
        self.model = ShardedModel(
            runtime.sharding_groups,
            ShardingOptions(
                most_live=config.sdp_max_live_parameters,
                bucket_elements=config.sdp_reduce_bucket_size,
                overlapping=overlapping,
                accumulation=accumulation,
                num_copies=(topology.dp_cp_size, topology.rdp_cp_size),
            ),
            runtime.device,
            may_gather=_method_or_false(self._may_gather),
            rests=_method_or_false(self._rests),
            has_begun=_method_or_false(self._arm),
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields the sharded parameters of this rank."""
        return (each for unit in self.model.units for each in unit.parameters)

    def take(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        slices: Mapping[str, object],
        fill: Callable[[nn.Parameter], None],
    ) -> None:
        """Cuts parameters into shards, with the values of the first replica. Collective: DP_GROUP.

        Args:
            parameters: with their names, in the order of the model.
            slices: has the names of those that are slices.
            fill: gives one its values if it has none.
        """
        named = list(parameters)
        largest: dict[torch.dtype, int] = {}
        for _, each in named:
            largest[each.dtype] = max(each.numel(), largest.get(each.dtype, 0))
        # Not where the parameter is, as what is mapped from a file would come into memory for good;
        # and one place for all, since freed ones between which others are made stay unused.
        places = {
            dtype: torch.empty(size, dtype=dtype, device=self._runtime.device)
            for dtype, size in largest.items()
        }

        def whole(name: str, parameter: nn.Parameter) -> torch.Tensor:
            fill(parameter)
            values = places[parameter.dtype][: parameter.numel()].view(parameter.shape)
            values.copy_(parameter.detach())
            replicas = self._replicas_of_slices if name in slices else self._replicas
            replicas.broadcast([values], 0)
            return values

        self.model.take(named, slices, whole)

    def enter_pass(self) -> None:
        """Starts a backward pass of a step."""
        if self.model.units:
            self.model.enter_pass()

    def end(self) -> None:
        """Ends a step with a backward pass. Collective: DP_GROUP."""
        if self.model.units:
            self.model.end(self._used_anywhere)

    def complete(self) -> None:
        """Makes gradients of what steps have added up that nobody has reduced. Collective."""
        self.model.gradients.complete(self._used_anywhere)

    def _used_anywhere(self, flags: torch.Tensor) -> None:
        replicas = self._replicas
        if replicas.size > 1:
            with replicas.blaming("reducing gradients with"):
                dist.all_reduce(flags, dist.ReduceOp.MAX, group=replicas.group)

    # ------------------------------------------------------------------ outside of steps

    @contextlib.contextmanager
    def called_outside_steps(self) -> Iterator[None]:
        """Inside, the model runs outside of step functions. Collective: the sharding group."""
        if self.runs:
            yield
            return
        self.model.begin()
        with running([self]):
            yield

    def _may_gather(self) -> bool:
        """Tells whether all ranks use the parameters of the model now."""
        return self.runs or is_in_backward()

    def _rests(self) -> bool:
        """Tells whether all ranks run the Python of the script, between two steps."""
        return not (self._runtime.is_in_step or self._may_gather())

    def _arm(self) -> bool:
        """Reduces at the end of a backward pass that no step function runs."""
        if self._is_armed or not is_outside_step(self._runtime):
            return False
        self._is_armed = True

        def end() -> None:
            self._is_armed = False
            self.end()
            self.model.close(failed=False)

        when_backward_ends(end)
        return True


@contextlib.contextmanager
def running(shards: Sequence[Shards | None]) -> Iterator[SavingHooks]:
    """Inside, models run: autograd keeps no sharded parameters, and all go at the end.

    Yields what autograd saves tensors with.
    """
    own = [each for each in shards if each is not None]
    failed = True
    for each in own:
        each.runs = True
    try:
        with saving_places([each.model for each in own]) as saving:
            yield saving
        failed = False
    except (RuntimeError, TypeError) as error:
        if not own or not is_of_unusable_tensor(error):
            raise
        raise UnsupportedError(
            "code in a compiled language, or a function of torch that looks at the class of a "
            "tensor, could not use a parameter that is in shards (sharded_data_parallel_degree): "
            "give it what parameter.clone() returns, which has all of it and its gradient."
        ) from error
    finally:
        for each in own:
            each.runs = False
            each.model.close(failed=failed)


def is_outside_step(runtime: TorchRuntime) -> bool:
    """Tells whether a backward pass that runs now belongs to no step function."""
    return runtime.topology.pp_size == 1 and not runtime.is_in_step


def _method_or_false(method: Callable[[], bool]) -> Callable[[], bool]:
    """Returns a function that does not keep the object of a method alive."""
    found = weakref.WeakMethod(method)

    def call() -> bool:
        own = found()
        return own is not None and own()

    return call
