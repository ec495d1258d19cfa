"""The arguments of a step: agreeing on them, handing them out, splitting them.

Rank 0 of a pipeline says what it was called with (shapes, types, plain Python arguments, flags);
the others take its word, and the inputs that they need, from it. Published scripts pass empty
tensors on the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.common.microbatch import (
    SplitRules,
    in_order,
    split_arguments,
)
from smdistributed.modelparallel.torch.compat.private.tensors import overlapping
from smdistributed.modelparallel.torch.execute.links import Transfer
from smdistributed.modelparallel.torch.model.distributed import models_of
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.runtime.tensors import TENSORS
from smdistributed.modelparallel.torch.stepping.batch import (
    Call,
    CallKind,
    Header,
    MiniBatch,
    Recalled,
    State,
)
from smdistributed.modelparallel.torch.stepping.first_rank import hear, say
from smdistributed.modelparallel.torch.stepping.misfits import misfits_named
from smdistributed.modelparallel.torch.stepping.moving import Mover
from smdistributed.modelparallel.torch.tensors.nested import (
    map_tensors,
    tensors_in,
)
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec


class StepInputs:
    """The arguments of one step function, on one rank.

    Args:
        runtime: the state of the library in this process.
        rules: which arguments are split.
    """

    def __init__(self, runtime: TorchRuntime, rules: SplitRules) -> None:
        self._runtime = runtime
        self._links = runtime.links
        self._rules = rules
        self._mover = Mover(runtime.device, rules)
        self._pp_rank = runtime.coordinates.pp_rank
        self._sending: list[Transfer] = []

    def _kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallKind:
        """Returns what this rank was called with."""
        tensors = tensors_in((args, kwargs))
        specs = tuple(_given(tensor) for tensor in tensors)
        return CallKind(specs, overlapping(tensors), self._state())

    def _state(self) -> State:
        device = self._runtime.device.type
        return State(
            (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
            ),
            tuple(
                (model.number, model.holder.version, *model.holder.fakes.flags())
                for model in models_of(self._runtime)
            ),
        )

    def agree(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seed: int,
        recall: Callable[[MiniBatch], Recalled | None],
        agree_seed: Callable[[int, Call], int] | None = None,
    ) -> MiniBatch:
        """Agrees with the other ranks of the pipeline on what is called. Collective: PP_GROUP.

        Args:
            args, kwargs: what this rank was called with.
            seed: of the random numbers of the step; that of rank 0 of the pipeline counts.
            recall: tells whether the call is known; asked on rank 0 of the pipeline.
            agree_seed: has that agree with its like in other pipelines on the seed; None: it is
                its own.

        Raises:
            SMPError: this rank was called in another way.
            Exception: what splitting raised on rank 0 of the pipeline, on every rank.
        """
        signature = self._rules.signature
        communicator = self._runtime.communicator
        if self._pp_rank == 0:
            made: list[MiniBatch] = []

            def make() -> Header:
                # Tensors go by their positions, and those are the signature's.
                given, moved = self._mover.move(args, kwargs)
                call = in_order(signature, *given)
                agreed = seed if agree_seed is None else agree_seed(seed, call)
                mine = self._kind(*call)
                calls, weights = self.split(call)
                batch = MiniBatch(Header(mine, agreed), call, calls, weights, moved)
                header = Header(mine, agreed, recall(batch))
                made.append(replace(batch, header=header))
                return header

            say(communicator, make)
            return made[0]
        header: Header = hear(communicator)
        call = in_order(signature, args, kwargs)
        self._check(self._kind(*call), header.kind)
        calls, weights = self.split(self._stand_ins(header.kind, *call))
        return MiniBatch(header, call, calls, weights)

    def misfits_named(self, batch: MiniBatch) -> AbstractContextManager[None]:
        """Inside, an error of a microbatch names arguments of which its pieces may not fit."""

        def call() -> Call:
            is_given = self._pp_rank == 0
            return batch.given if is_given else self._stand_ins(batch.header.kind, *batch.given)

        return misfits_named(self._rules, len(batch.calls), call)

    def exchange(
        self, batch: MiniBatch, needed: Sequence[set[int]], written: Collection[int]
    ) -> list[Sequence[torch.Tensor]]:
        """Returns the tensor arguments of each microbatch: real where this rank computes with them.

        The first rank does not wait until the others take them, but for those that it may write to.
        Collective: PP_GROUP.

        Args:
            batch: what is called.
            needed: for each pp_rank, the positions of the tensors that it computes with, among
                those of a microbatch.
            written: the positions of those that the step changes in place.
        """
        tensors: list[Sequence[torch.Tensor]] = [tensors_in(call) for call in batch.calls]
        if not _are_in_their_places(batch, tensors):
            # Which tensors of the batch these are, only the object knows that cuts itself.
            everything = set(range(len(batch.header.kind.tensors)))
            needed = [everything if each else each for each in needed]
            written = everything if written else written
        if self._pp_rank == 0:
            self._send(tensors_in(batch.given), needed, written)
            return tensors
        received = self._receive(batch.header.kind, needed[self._pp_rank])
        calls, _ = self.split(_with_tensors(*batch.given, received))
        return [tensors_in(call) for call in calls]

    def check_written(self, batch: MiniBatch, written: Sequence[Mapping[int, object]]) -> None:
        """Raises if microbatches change an argument that others show: microbatches, or arguments.

        Args:
            batch: what is called.
            written: for each microbatch, the positions of the tensors that it changes in place.

        Raises:
            UnsupportedError: they do.
        """
        positions = set().union(*written)
        if not positions:
            return
        tensors = [tensors_in(call) for call in batch.calls]
        may_be_any = not _are_in_their_places(batch, tensors)
        for pair in batch.header.kind.overlapping:
            if may_be_any or not positions.isdisjoint(pair):
                raise UnsupportedError(
                    "the step function changes a tensor in place that it was given, and another "
                    f"one that it was given shares its memory (they are numbers {pair[0]} and "
                    f"{pair[1]} of the tensors of the call): with several partitions that one "
                    "would not show what is written. Change a copy: x = x.clone()."
                )
        if len(batch.calls) == 1:
            return
        first, second = tensors[:2]
        for position in positions:
            if first[position] is second[position]:
                raise UnsupportedError(
                    "the step function changes a tensor in place that it was given and that is "
                    "not split over microbatches: with several partitions one microbatch would "
                    f"not see what another one has written (its place among the {len(first)} "
                    f"tensors of the call is {position}). Change a copy: x = x.clone()."
                )

    def write(self, batch: MiniBatch, written: Sequence[Mapping[int, torch.Tensor]]) -> None:
        """Writes to the batch what the step function has changed in place, as one process does.

        On other ranks than the first of the pipeline, if they were given tensors of its shapes.

        Args:
            batch: what was called.
            written: for each microbatch, what has become of tensors, by their positions.
        """
        if any(written):
            self._write(batch, written)
        self._mover.end(batch.moved)

    def _write(self, batch: MiniBatch, written: Sequence[Mapping[int, torch.Tensor]]) -> None:
        own = [tuple(each.shape) for each in tensors_in(batch.given)]
        if own != [each.shape for each in batch.header.kind.tensors]:
            return
        calls, _ = self.split(batch.given)
        with torch.no_grad():
            for call, found in zip(calls, written, strict=True):
                tensors = tensors_in(call)
                for position, value in found.items():
                    tensors[position].detach().copy_(value)

    def sent(self) -> None:
        """Waits until other ranks have what ``exchange`` sent; on a GPU its stream waits."""
        while self._sending:
            self._sending.pop().wait()

    def _send(
        self,
        tensors: Sequence[torch.Tensor],
        needed: Sequence[set[int]],
        written: Collection[int],
    ) -> None:
        for target in range(1, len(needed)):
            for position in sorted(needed[target]):
                self._sending.append(self._links.send(tensors[position], target))
        if any(position in written for positions in needed[1:] for position in positions):
            self.sent()

    def _receive(self, kind: CallKind, needed: set[int]) -> list[torch.Tensor]:
        received = []
        for position, each in enumerate(kind.tensors):
            if position in needed:
                buffer = torch.empty(each.shape, dtype=each.dtype, device=self._device(each))
                tensor = self._links.receive(buffer, 0).wait()
            else:
                tensor = torch.empty(each.shape, dtype=each.dtype, device="meta")
            received.append(tensor.requires_grad_(each.requires_grad))
        return received

    def _check(self, mine: CallKind, theirs: CallKind) -> None:
        """Raises if this rank was called in another way than the first of the pipeline."""
        if len(theirs.tensors) != len(mine.tensors):
            raise SMPError(
                f"rank {self._runtime.rank}: the step function was called with "
                f"{len(mine.tensors)} tensors here and with {len(theirs.tensors)} on the first "
                "rank of the pipeline; every rank must pass the same structure (empty tensors of "
                "the right batch size will do)."
            )
        if not mine.state.agrees_with(theirs.state):
            raise SMPError(
                f"rank {self._runtime.rank}: training flags, requires_grad, grad mode or the "
                "modules of a model differ from those on the first rank of the pipeline; call "
                "model.train(), model.eval() and the like on every rank."
            )

    def calls(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Call]:
        """Returns what this rank alone would give each microbatch."""
        return self.split(in_order(self._rules.signature, args, kwargs))[0]

    def split(self, call: Call, most: int | None = None) -> tuple[Sequence[Call], Sequence[float]]:
        """Returns the calls of the microbatches, and their shares of the batch.

        Args:
            call: the arguments of a step.
            most: microbatches there are; None for what the job has.
        """
        most = self._runtime.config.microbatches if most is None else most
        return split_arguments(TENSORS, self._rules, most, *call)

    def _stand_ins(self, kind: CallKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Returns the arguments with fakes of rank 0's tensors in the places of its own."""
        mode, device = self._runtime.fake_mode, self._runtime.device
        with mode:
            fakes = [each.empty(device) for each in kind.tensors]
        return _with_tensors(args, kwargs, fakes)

    def _device(self, spec: TensorSpec) -> torch.device:
        return spec.device if spec.device.type == "cpu" else self._runtime.device


def _given(tensor: torch.Tensor) -> TensorSpec:
    """Returns the spec of an argument, as every rank has it.

    Raises:
        UnsupportedError: it is not dense.
    """
    if tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"a step function got a tensor of layout {tensor.layout}: only dense tensors go from "
            "one partition to another. Give it tensor.to_dense(), or its indices and values, and "
            "make the sparse tensor inside one module."
        )
    return TensorSpec.of(tensor).on_every_rank


def _are_in_their_places(batch: MiniBatch, tensors: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether each microbatch has a part of each tensor of the batch, as far as can be seen.

    An object that cuts itself may have fewer of them, such as one for each example.

    Args:
        batch: what is called.
        tensors: of each microbatch.
    """
    return all(len(each) == len(batch.header.kind.tensors) for each in tensors)


def _with_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> Call:
    replacements = iter(tensors)
    replaced: Call = map_tensors((args, kwargs), lambda tensor: next(replacements))
    return replaced
