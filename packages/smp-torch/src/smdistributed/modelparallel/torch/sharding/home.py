"""The sharded parameters of one model on this rank: cut, gathered while used, reduced, updated.

Source: model-parallel-extended-features-pytorch-sharded-data-parallelism.md.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.parts.at_rest import PartView
from smdistributed.modelparallel.torch.parts.blocks import Blocks
from smdistributed.modelparallel.torch.sharding.accumulation import Accumulation
from smdistributed.modelparallel.torch.sharding.agreement import Agreement, Required
from smdistributed.modelparallel.torch.sharding.gradients import ShardedViews, SoFar
from smdistributed.modelparallel.torch.sharding.layout import UnitLayout, group_names
from smdistributed.modelparallel.torch.sharding.parameter import Shard, ShardedParameter
from smdistributed.modelparallel.torch.sharding.residency import Residency
from smdistributed.modelparallel.torch.sharding.row_sums import row_sums
from smdistributed.modelparallel.torch.sharding.shard_memory import gather_blocks, shard_memory
from smdistributed.modelparallel.torch.sharding.transport import ShardingGroups
from smdistributed.modelparallel.torch.sharding.unit import Unit

#: A unit has at most this part of what may be gathered, and of the model, so that some fit.
_PART_OF_LIMIT = 4
_PART_OF_MODEL = 8
_DOING = {
    Required.NOTHING: "waits",
    Required.BEGIN: "begins a step or a call of the model",
    Required.END_OF_PASS: "is done with a backward pass",
    Required.END: "is done with a step or a call of the model",
    Required.CONFIRMED: "has done all that was recorded",
}


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """How a model is sharded.

    Attributes:
        most_live: elements that may be gathered at a time.
        bucket_elements: of gradients that travel in one message.
        overlapping: reduce gradients before a backward pass ends.
        accumulation: over how many steps gradients are summed.
        num_copies: of the model, and of its slices.
    """

    most_live: int
    bucket_elements: int
    overlapping: bool
    accumulation: Accumulation
    num_copies: tuple[int, int]


class ShardedModel:
    """See the module.

    Args:
        groups: who exchanges.
        options: how.
        device: where the parameters are.
        may_gather: tells whether the model runs, so that parameters are used by all ranks.
        rests: tells whether it is between two steps, and nothing of the model runs.
        has_begun: called before the first gradient of a backward pass.

    Attributes:
        generation: how often the parameters were given other values.
        held: see ``Home``.
        view_class: likewise.
        when: likewise.
        is_read_in_blocks: whether functions of torch get the own blocks.
    """

    def __init__(
        self,
        groups: ShardingGroups,
        options: ShardingOptions,
        device: torch.device,
        may_gather: Callable[[], bool],
        rests: Callable[[], bool],
        has_begun: Callable[[], object],
    ) -> None:
        self._groups = groups
        self._options = options
        self._may_gather = may_gather
        self._rests = rests
        self._agreement = agreement = Agreement(
            groups.collectives, groups.members, groups.course, self._describe
        )
        memory = shard_memory(groups, device)
        self.residency = Residency(memory, device, agreement, options.most_live)
        self.gradients = ShardedViews(
            groups,
            row_sums(groups, device, options.bucket_elements),
            agreement,
            self.residency.units,
            bucket_elements=options.bucket_elements,
            overlapping=options.overlapping,
            accumulation=options.accumulation,
            num_copies=options.num_copies,
            has_begun=has_begun,
        )
        self.generation = 0
        self.held = "each rank of the sharding group has a block"
        self.view_class: type[torch.Tensor] = PartView
        self.when = ", if the parameter is no slice of tensor parallelism"
        self.is_read_in_blocks = False
        self._is_in_pass = False

    @property
    def units(self) -> Sequence[Unit]:
        """What is gathered together, in the order of the model."""
        return self.residency.units

    def take(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        slices: Mapping[str, object],
        whole: Callable[[str, nn.Parameter], torch.Tensor],
    ) -> None:
        """Cuts parameters, and lets what is not of this rank go, one at a time.

        Collective: the sharding group, and as ``whole``.

        Args:
            named: the parameters with their names, in the order of the model; each once.
            slices: has the names of those that are slices.
            whole: gives the values of one, the same on all ranks that hold it.
        """
        parameters = dict(named)
        total = sum(each.numel() for each in parameters.values())
        budget = max(1, min(self._options.most_live // _PART_OF_LIMIT, total // _PART_OF_MODEL))

        def kind(name: str) -> tuple[torch.dtype, bool]:
            return parameters[name].dtype, name in slices

        kinds = [
            [(name, parameters[name]) for name in group]
            for names in group_names([(name, each.numel()) for name, each in named], budget)
            for _, group in itertools.groupby(sorted(names, key=_stable(kind)), kind)
        ]
        layouts = [
            UnitLayout(tuple(tuple(each.shape) for _, each in chosen), self._groups.degree)
            for chosen in kinds
        ]
        dtypes = [chosen[0][1].dtype for chosen in kinds]
        shards = self.residency.shard_memory.take(
            [(layout.width, dtype) for layout, dtype in zip(layouts, dtypes, strict=True)]
        )
        for chosen, layout, shard in zip(kinds, layouts, shards, strict=True):
            is_sliced = chosen[0][0] in slices
            number = len(self.units)
            unit = Unit(number, chosen, layout, self._groups.index, is_sliced, shard)
            for place, (name, parameter) in enumerate(chosen):
                unit.take(place, whole(name, parameter), self)
            self.residency.units.append(unit)

    def _describe(self, kind: Required, number: int) -> str:
        if kind is Required.GATHER:
            return f"uses {self.units[number].names[0]}"
        if kind in (Required.WHOLE, Required.WHOLE_GRADIENT):
            name = [name for unit in self.units for name in unit.names][number]
            told = name if kind is Required.WHOLE else f"the gradient of {name}"
            return f"uses {told} between steps"
        return _DOING[kind]

    # ------------------------------------------------------------------ use

    def enter(self, units: Iterable[int]) -> None:
        """See ``Home``."""
        self.residency.enter(units)

    def leave(self, units: Iterable[int]) -> None:
        """See ``Home``."""
        self.residency.leave(units)

    def is_at_rest(self, blocks: Blocks) -> bool:
        """See ``Home``: ranks of tensor parallelism have other slices, which nothing gathers."""
        unit, _ = _place_of(blocks)
        return not self.units[unit].is_sliced and self._rests()

    def prepare(self) -> None:
        """See ``Home``."""
        if torch.is_grad_enabled():
            self.gradients.watch()

    def differentiable(self, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor | None:
        """See ``Home``: autograd knows the parameter itself."""
        return None

    def differentiated(self, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """See ``Home``: it is the whole one."""
        return gradient

    def agree(self, blocks: Blocks) -> None:
        """See ``Home``."""
        unit, place = _place_of(blocks)
        before = sum(len(each.names) for each in self.units[:unit])
        kind = Required.WHOLE_GRADIENT if blocks.is_gradient else Required.WHOLE
        self._agreement.meet(kind, before + place)

    def gather(self, blocks: Blocks) -> torch.Tensor:
        """See ``Home``."""
        self.agree(blocks)
        # A backward pass that gave no gradients to add up has left what it read.
        self.residency.empty()
        self.residency.meet_on_device()
        unit, place = _place_of(blocks)
        places = map(list, map(self.units[unit].layout.places, range(self._groups.degree)))
        parts = [found[place][0] for found in places]
        return gather_blocks(self._groups, parts, blocks.values.detach(), blocks.shape)

    def check_use(self, name: str, what: str) -> None:
        """See ``Home``.

        Raises:
            SMPError: the model does not run.
        """
        if not self._may_gather():
            raise SMPError(
                f"{what} asks for the values of {name} outside of a step function, and this "
                f"rank has a shard of it, one of {self._groups.degree}: read state_dict() of the "
                "DistributedModel, which every rank calls, write by its load_state_dict(), and "
                "run the model by calling the DistributedModel."
            )

    def unit_at(self, key: int) -> Unit | None:
        """See ``Gathered``."""
        return self.residency.owner_of.get(key)

    def memory_of(self, unit: int) -> torch.Tensor:
        """See ``Gathered``."""
        return self.residency.need(unit)

    def view_of(self, shard: Shard) -> torch.Tensor:
        """Returns a view that lies in the memory of a unit as a parameter of it does."""
        unit = self.units[shard.unit]
        memory = torch.empty(unit.num_elements, device="meta")
        return unit.layout.views(memory)[shard.place]

    # ------------------------------------------------------------------ steps

    def begin(self) -> None:
        """Starts a step, or a call outside of steps. Collective: the sharding group."""
        self._is_in_pass = False
        if self.units:
            self.residency.begin()
            self.gradients.begin()

    def enter_pass(self) -> None:
        """Starts a backward pass."""
        self.leave_pass()
        self._is_in_pass = True

    def leave_pass(self) -> None:
        """Ends the backward pass that has begun, if one has. Collective: the sharding group."""
        if self._is_in_pass:
            self._is_in_pass = False
            self.gradients.end_pass()

    def end(self, used_anywhere: Callable[[torch.Tensor], None]) -> None:
        """Ends a step with a backward pass; then gradients are final. Collective: DP_GROUP."""
        self._is_in_pass = True
        self.leave_pass()
        self.gradients.end_step(used_anywhere)

    @contextlib.contextmanager
    def capturing(self, *, differentiates: bool) -> Iterator[None]:
        """Inside, a microbatch is captured: what it begins beside ends with it.

        Args:
            differentiates: it has a backward pass.
        """
        # What was done before, with what ranks read and write of each other, is over on all.
        self.residency.meet_on_device()
        self._is_in_pass = differentiates
        yield
        self.leave_pass()
        self.residency.settle()
        self.residency.meet_on_device()

    def forget(self) -> None:
        """Lets go of all that was captured: nothing of it was done."""
        self._is_in_pass = False
        self.residency.forget()
        self.gradients.forget()

    def launched(self, so_far: SoFar) -> None:
        """Takes note that a captured microbatch has been launched, with its backward pass.

        Args:
            so_far: what there was of gradients when it had been captured.
        """
        self._is_in_pass = False
        self.residency.repeat_order()
        self.gradients.resume(so_far)

    def updated(self) -> None:
        """Takes note that parameters have other values."""
        self.generation += 1
        self.residency.empty()

    def close(self, *, failed: bool) -> None:
        """Lets all that is gathered go. Collective: the sharding group, unless it failed."""
        if failed:
            self.residency.abandon()
        elif self.units:
            self.residency.end()

    # ------------------------------------------------------------------ memory

    def kept_bytes(self) -> int:
        """Returns the bytes of what this rank keeps of the parameters between steps."""
        return sum(unit.shard.numel() * unit.shard.element_size() for unit in self.units)


def _stable(kind: Callable[[str], tuple[torch.dtype, bool]]) -> Callable[[str], tuple[str, bool]]:
    """Returns what orders names by kind, and leaves their order as it is otherwise."""
    return lambda name: (str(kind(name)[0]), kind(name)[1])


def _place_of(blocks: Blocks) -> tuple[int, int]:
    """Returns the numbers of the unit of a parameter, and of the parameter in it."""
    return cast(tuple[int, int], blocks.key)


def is_sharded(parameter: object) -> bool:
    """Tells whether a parameter has been cut."""
    return isinstance(parameter, ShardedParameter)
