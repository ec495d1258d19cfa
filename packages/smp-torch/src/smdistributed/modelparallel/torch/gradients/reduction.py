"""Averaging gradients over data-parallel ranks, bucket by bucket.

A step has several backward passes on a rank: one a microbatch, and one more for each time that a
microbatch comes back to it. The caller says of each pass which gradients it completes. A parameter
is *final* when its gradient has been accumulated in that pass, or else when the pass is over, or
else at the end of the step; what nobody announced is final at the end. A bucket leaves when all of
its parameters are final and the buckets before it have left, so that all ranks agree on the order.

Within a pass, autograd accumulates a gradient once, except where checkpoints differentiate on
their own. So only parameters that an earlier pass has seen accumulate once, and none more often,
leave within a pass.

Where optimizer state is sharded, a bucket has gradients for one owner, which alone gets the means;
on the others something stands in their places then (``gradients.elsewhere``).

Sparse gradients are dense on their way, and have the rows of all replicas then.

A parameter that has no gradient on any replica keeps none; one that has a gradient on some counts
as zero on the others and gets the average on all. That is what DistributedDataParallel does with
``find_unused_parameters``.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.torch.compat.private.backward import when_backward_ends
from smdistributed.modelparallel.torch.compat.private.distributed import GradBucket, is_future
from smdistributed.modelparallel.torch.gradients.buckets import Bucket, make_buckets
from smdistributed.modelparallel.torch.gradients.departures import Departures, Foreseen
from smdistributed.modelparallel.torch.gradients.elsewhere import StandIns
from smdistributed.modelparallel.torch.gradients.owners import Owners
from smdistributed.modelparallel.torch.gradients.replicas import Replicas
from smdistributed.modelparallel.torch.sharding.accumulation import Accumulation
from smdistributed.modelparallel.torch.tensors.sparse_rows import of_rows, rows_of, rows_of_all

#: (bucket) -> a future of the reduced tensor
Hook = Callable[[GradBucket], torch.futures.Future[Any]]
_REDUCING = "reducing gradients with"
#: Updates are counted up to here, and from zero again: a byte travels with the flags.
_COUNTED = 255


class GradientReduction:
    """Reduces the gradients of this rank's parameters with those of its replicas.

    Args:
        replicas: those that hold the same parameters.
        overlapping: reduce while the last backward pass runs.
        accumulation: over how many steps gradients are summed.
        bucket_bytes: size of a bucket.
        as_bucket_view: gradients are left in the buckets instead of copied out of them.
        waits_for_end: tells whether gradients are reduced at the end of a step, one kind after the
            other, whatever ``overlapping`` says.
        is_outside_step: tells whether a backward pass runs that belongs to no step function; it
            is reduced when it ends.
        updates: gives how often optimizers have been stepped.
        owners: who gets the gradient of each parameter; None: everybody.
    """

    def __init__(
        self,
        replicas: Replicas,
        *,
        overlapping: bool,
        accumulation: Accumulation,
        bucket_bytes: int,
        as_bucket_view: bool,
        waits_for_end: Callable[[], bool],
        is_outside_step: Callable[[], bool],
        updates: Callable[[], int],
        owners: Owners | None = None,
    ) -> None:
        self._replicas = replicas
        self._overlapping = overlapping
        self._accumulation = accumulation
        self._bucket_bytes = bucket_bytes
        self._as_bucket_view = as_bucket_view
        self._waits_for_end = waits_for_end
        self._is_outside_step = is_outside_step
        self._updates = updates
        #: At the last reduction; None before the first.
        self._updates_before: int | None = None
        self._owners = owners
        self._hook: Hook | None = None
        self._names: dict[nn.Parameter, str] = {}
        self._watched: set[nn.Parameter] = set()
        self._reduced: list[nn.Parameter] = []
        self._buckets: list[Bucket] = []
        self._steps_done = 0
        #: What owners had before: the others do not have it, and it is not averaged again.
        self._earlier: dict[nn.Parameter, torch.Tensor] = {}
        self._stand_ins = StandIns()
        #: Whether this rank has reduced gradients since the last update by owners.
        self._has_reduced = False
        self._once: set[nn.Parameter] = set()
        self._repeatedly: set[nn.Parameter] = set()
        self._is_armed = False
        self.has_begun = False
        self._reset()

    # ------------------------------------------------------------------ set-up

    def watch(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Takes the parameters of this rank, once they are here, and when they have changed."""
        # Buckets and stand-ins have the forms of parameters, which may be others now.
        self._reduced = []
        self._stand_ins.forget()
        self._names = {parameter: name for name, parameter in parameters}
        self._follow_requires_grad()

    def memory(self) -> list[torch.Tensor]:
        """Returns the buckets, and what owners keep of gradients of earlier steps."""
        return [*(bucket.flat for bucket in self._buckets), *self._earlier.values()]

    @property
    def reduced(self) -> Sequence[nn.Parameter]:
        """Those whose gradients travel in buckets."""
        return self._reduced

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do after a backward pass."""
        return self._replicas.size > 1 or self._hook is not None

    @property
    def has_hook(self) -> bool:
        """Whether the user's hook reduces."""
        return self._hook is not None

    def set_hook(self, hook: Hook) -> None:
        """Lets the user's function reduce.

        Raises:
            RuntimeError: there is one already, or gradients have been computed.
        """
        if self._hook is not None:
            raise RuntimeError("a communication hook is registered already; one can be.")
        if self.has_begun:
            raise RuntimeError(
                "a communication hook must be registered before the first backward pass."
            )
        self._hook = hook
        self._follow_requires_grad()

    def _follow_requires_grad(self) -> None:
        """Makes new buckets when parameters were frozen or set free since the last step."""
        if not self.is_needed:
            return
        reduced = [parameter for parameter in self._names if parameter.requires_grad]
        if len(reduced) == len(self._reduced) and all(
            new is old for new, old in zip(reduced, self._reduced, strict=True)
        ):
            return
        this = weakref.ref(self)

        def note(parameter: torch.Tensor) -> None:
            reduction = this()
            if reduction is not None:
                reduction._accumulated(parameter)

        note.only_counts = True  # type: ignore[attr-defined] # see execute/weight_gradients.py

        for parameter in reduced:
            if parameter not in self._watched:
                self._watched.add(parameter)
                parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        self._reduced = reduced
        self._buckets = self._make_buckets(reduced)

    def _make_buckets(self, parameters: list[nn.Parameter]) -> list[Bucket]:
        if self._owners is None:
            return make_buckets(parameters, self._bucket_bytes)
        buckets = []
        for owner in range(self._replicas.size):
            owned = [each for each in parameters if self._owners.of(each) == owner]
            buckets += make_buckets(owned, self._bucket_bytes)
        places = {parameter: place for place, parameter in enumerate(parameters)}

        def first_place(bucket: Bucket) -> int:
            return min(places[parameter] for parameter, _ in bucket.slots)  # type: ignore[index]

        # In the order in which gradients come, as one owner's are.
        return sorted(buckets, key=first_place, reverse=True)

    # ------------------------------------------------------------------ a step

    def begin(self) -> None:
        """Starts a step."""
        self._follow_requires_grad()
        if self._owners is not None and self._replicas.size > 1 and not self._steps_done:
            self._stand_ins.remove(self._reduced)
            self._earlier = {
                each: each.grad.clone()
                for each in self._reduced
                if each.grad is not None and self._owners.is_own(each)
            }
        self._reset()

    def _reset(self) -> None:
        self.has_gradients = False
        self._completes: Set[nn.Parameter] = frozenset()
        self._counts: collections.Counter[nn.Parameter] = collections.Counter()
        self._departures = Departures(self._buckets)
        self._futures: list[torch.futures.Future[Any]] = []
        self._without: set[torch.Tensor] = set()
        #: Which rows sparse gradients have: of this rank, and in the end of all replicas.
        self._rows: dict[torch.Tensor, torch.Tensor] = {}
        self._active: Sequence[int] | None = None

    @property
    def everything(self) -> frozenset[nn.Parameter]:
        """All parameters that get gradients."""
        return frozenset(self._reduced)

    def enter_pass(self, completes: Set[nn.Parameter]) -> None:
        """Starts a backward pass.

        Args:
            completes: parameters to whose gradients no later pass of this step adds.
        """
        self._leave_pass()
        self._completes = completes

    def _leave_pass(self) -> None:
        for parameter, count in self._counts.items():
            (self._once if count == 1 else self._repeatedly).add(parameter)
        self._counts.clear()
        if self._overlaps:
            for parameter in self._completes:
                self._launch(self._departures.finish(parameter))
        self._completes = frozenset()

    @property
    def _overlaps(self) -> bool:
        may = self._overlapping and self.is_needed and self._ends_accumulation
        return may and not self._waits_for_end()

    @property
    def _ends_accumulation(self) -> bool:
        return self._accumulation.ends_after(self._steps_done)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Called by autograd after it has added to a gradient."""
        assert isinstance(parameter, nn.Parameter)
        if not self._is_armed and self._is_outside_step():
            self._arm(parameter)
        self.has_gradients = self.has_begun = True
        if self._departures.is_final(parameter):
            raise SMPError(
                f"the gradient of {self._names[parameter]} changed after its reduction over the "
                "data-parallel ranks had begun: this step's backward passes differ from those "
                "before. Give DistributedModel overlapping_allreduce=False."
            )
        self._counts[parameter] += 1
        if parameter in self._completes and self._overlaps and self._accumulates_once(parameter):
            self._launch(self._departures.finish(parameter))

    def _accumulates_once(self, parameter: torch.Tensor) -> bool:
        """Whether a backward pass adds once to a gradient, as far as passes before tell."""
        return parameter in self._once and parameter not in self._repeatedly

    def foresee(self) -> Foreseen:
        """Returns what knows when buckets leave in a step whose passes are captured now."""
        overlaps = self._overlapping and self.is_needed
        departures = Departures(self._buckets if overlaps else ())
        return Foreseen(departures, self.everything, self._accumulates_once)

    def _arm(self, first: nn.Parameter) -> None:
        """Reduces at the end of a backward pass that no step function runs.

        Raises:
            UnsupportedError: owners have gradients from before, one of them with another one added.
        """
        self.begin()
        if self._earlier.keys() - {first}:
            raise UnsupportedError(
                "with shard_optimizer_state gradients of several backward passes outside of step "
                "functions cannot be added up: they have gone to the ranks that update their "
                "parameters. Call zero_grad() before each, or differentiate in a step function."
            )
        self._earlier.clear()
        self.enter_pass(self.everything)
        self._is_armed = True

        def end() -> None:
            self._is_armed = False
            self.end()

        when_backward_ends(end)

    def end(self) -> None:
        """Ends a step with a backward pass; then gradients are final.

        Collective: DP_GROUP, where an accumulation ends.

        Raises:
            UnsupportedError: a gradient is sparse in more than rows, or for a communication hook.
        """
        self.has_begun = True
        self._leave_pass()
        if self._ends_accumulation:
            self._end_accumulation()
        else:
            self._steps_done += 1

    def _end_accumulation(self) -> None:
        self._steps_done = 0
        if not self._buckets:
            return
        self._launch(self._departures.finish_all())
        self._has_reduced = True
        before, self._updates_before = self._updates_before, self._updates()
        is_used = self._used_anywhere(None if before is None else self._updates_before - before)
        for bucket in self._buckets:
            for parameter, view in bucket.slots:
                if self._owners is not None and not self._owners.is_own(parameter):  # type: ignore[arg-type]
                    self._show_elsewhere(parameter, is_used(parameter))  # type: ignore[arg-type]
                elif parameter not in self._without or is_used(parameter):
                    self._store(parameter, view)
        self._add_earlier()
        self._reset()

    def _show_elsewhere(self, parameter: nn.Parameter, is_used: bool) -> None:
        assert self._owners is not None
        owner = self._replicas.members[self._owners.of(parameter)]
        self._stand_ins.put(parameter, self._names[parameter], owner, is_used=is_used)

    @torch.no_grad()
    def _add_earlier(self) -> None:
        """Makes up for the share of what only owners had: of a mean it is one of all replicas."""
        for parameter, gradient in self._earlier.items():
            if parameter.grad is not None:
                parameter.grad.add_(gradient, alpha=1 - 1 / self._replicas.size)
        self._earlier.clear()

    @property
    def is_accumulating(self) -> bool:
        """Whether there are gradients that have not been reduced."""
        return self._steps_done > 0

    def complete(self) -> None:
        """Reduces what steps have added up that nobody has. Collective: DP_GROUP, if any."""
        if self._steps_done and self._buckets:
            self._follow_requires_grad()
            self._reset()
            self._end_accumulation()

    # ------------------------------------------------------------------ one bucket

    def _launch(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self._launch_one(bucket)

    @torch.no_grad()
    def _launch_one(self, bucket: Bucket) -> None:
        self._announce()
        for parameter, view in bucket.slots:
            gradient = parameter.grad
            if gradient is None:
                self._without.add(parameter)
                view.zero_()
            elif gradient.layout is not torch.strided:
                self._rows[parameter] = rows_of(gradient, self._names[parameter])  # type: ignore[index]
                self._check_no_hook(parameter)
                view.copy_(gradient.to_dense())
            elif gradient is not view:
                view.copy_(gradient)
                if self._as_bucket_view:
                    parameter.grad = view
        self._futures.append(self._start(bucket))

    def _check_no_hook(self, parameter: torch.Tensor) -> None:
        if self._hook is not None:
            raise UnsupportedError(
                f"{self._names[parameter]} has a sparse gradient, which no communication hook "  # type: ignore[index]
                "takes: leave the hook out, or give its layer sparse=False."
            )

    def _announce(self) -> None:
        if self._active is None:
            self._active = self._replicas.announce(self._replicas.reduces)

    def _take_results(self) -> None:
        own = self._hook is None  # what the user's hook raises is the user's
        with self._replicas.blaming(_REDUCING) if own else contextlib.nullcontext():
            for bucket, future in zip(self._buckets, self._futures, strict=True):
                bucket.take_result(future)

    def _start(self, bucket: Bucket) -> torch.futures.Future[Any]:
        if self._hook is not None:
            future = self._hook(bucket.handle)
            if not is_future(future):
                raise TypeError(
                    "a communication hook must return a torch.futures.Future of the reduced "
                    f"tensor; received {type(future).__name__}."
                )
            if self._replicas.device.type == "cpu":
                # A hook may go on communicating in callbacks. NCCL runs these at once, gloo when
                # it has finished, in a thread of its own: then ranks would differ in the order.
                future.wait()
            return future
        assert self._active is not None
        if self._replicas.divides_by_active:
            bucket.flat.mul_(self._replicas.size / len(self._active))
        with self._replicas.blaming(_REDUCING):
            if self._owners is not None and self._replicas.size > 1:
                owner = self._owners.of(bucket.slots[0][0])  # type: ignore[arg-type]
                return self._replicas.start_mean(bucket.flat, owner)
            return allreduce_hook(self._replicas.group, bucket.handle)  # type: ignore[arg-type]

    def _used_anywhere(
        self, updates: int | None, *, is_missing: bool = False
    ) -> Callable[[torch.Tensor], bool]:
        """Returns a function that tells whether some replica has a gradient of a parameter.

        Takes the results of the reduction, too.

        Args:
            updates: how often optimizers have been stepped since the last time; None: no matter.
            is_missing: this rank updates without a backward pass.

        Raises:
            SMPError: gradients of several steps were reduced together, or some ranks have none.
        """
        if self._replicas.size == 1:
            self._take_results()
            return lambda parameter: parameter not in self._without
        flags = [int(each not in self._without) for each in self._reduced]
        dense = [int(each not in self._without | self._rows.keys()) for each in self._reduced]
        count = None if updates is None else updates % _COUNTED
        # Both largest, so that they tell of the least and the most.
        ends = [0, 0] if count is None else [count, _COUNTED - count]
        # On the host, so that no GPU is waited for.
        missing = [0] * (0 if self._owners is None else self._replicas.size)
        if is_missing:
            missing[self._replicas.own] = 1
        used = torch.tensor([*ends, *missing, *flags, *dense], dtype=torch.uint8, device="cpu")
        self._take_largest(used)
        self._take_results()
        most, least, *told = used.tolist()
        missing, told = told[: len(missing)], told[len(missing) :]
        flags, dense = told[: len(flags)], told[len(flags) :]
        self._check_missing(missing)
        if updates is not None and most + least > _COUNTED:
            raise SMPError(
                "data-parallel ranks must reduce the gradients of a step together; received "
                f"those of steps after different numbers of updates, {updates} on this rank. A "
                "rank made no backward pass in a step in which others did: call backward on "
                "every rank, of a loss that is multiplied by zero where it does not count."
            )
        found = zip(self._reduced, flags, dense, strict=True)
        sizes: dict[torch.Tensor, int] = {
            each: len(each) for each, flag, is_dense in found if flag and not is_dense
        }
        self._rows = rows_of_all(sizes, self._rows, self._take_largest)
        if not self._without:
            return lambda parameter: True
        anywhere = {parameter for parameter, flag in zip(self._reduced, flags, strict=True) if flag}
        return anywhere.__contains__

    def _take_largest(self, numbers: torch.Tensor) -> None:
        """Takes the largest of each number over the replicas. Collective: they."""
        with self._replicas.blaming(_REDUCING):
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._replicas.group)

    def _check_missing(self, missing: Sequence[int]) -> None:
        """Raises if some replicas, but not all, update without a backward pass."""
        if any(missing) and not all(missing):
            members = zip(self._replicas.members, missing, strict=True)
            names = ", ".join(str(rank) for rank, is_missing in members if is_missing)
            raise SMPError(
                "with shard_optimizer_state all data-parallel ranks must make a backward pass "
                f"before an update, or none; received none from rank {names}: call backward on "
                "every rank, of a loss that is multiplied by zero where it does not count."
            )

    def check_reduced(self) -> None:
        """Makes sure before an update by owners that no replica waits for own gradients.

        A rank that has made no backward pass since the last update takes the place of one in the
        reduction of the others, who learn of it there; where no rank has, nothing happens.
        Collective: the replicas, if this rank has made none.

        Raises:
            SMPError: others have made one.
        """
        if self._owners is None or self._replicas.size == 1 or self._has_reduced:
            return
        self._has_reduced = True
        kept = [bucket.flat.clone() for bucket in self._buckets]  # gradients may be in them
        self._announce()
        try:
            self._give_zeros(is_missing=True)
        finally:
            for bucket, values in zip(self._buckets, kept, strict=True):
                bucket.flat.copy_(values)

    def updated(self) -> None:
        """Takes note of an update by owners."""
        self._has_reduced = False

    def _give_zeros(self, *, is_missing: bool = False) -> None:
        for bucket in self._buckets:
            bucket.flat.zero_()
            self._futures.append(self._start(bucket))
        self._without.update(self._reduced)
        self._used_anywhere(None, is_missing=is_missing)
        self._reset()

    @torch.no_grad()
    def _store(self, parameter: torch.Tensor, view: torch.Tensor) -> None:
        if parameter in self._rows:
            parameter.grad = of_rows(view, self._rows[parameter])
        elif self._as_bucket_view:
            parameter.grad = view
        elif parameter.grad is None or parameter.grad.is_sparse:
            parameter.grad = torch.empty_like(parameter).copy_(view)
        else:
            parameter.grad.copy_(view)

    # ------------------------------------------------------------------ without a batch

    def restart_accumulation(self) -> None:
        """Counts the steps up to a reduction from zero again, on all replicas alike."""
        self._steps_done = 0
        self._earlier.clear()

    def forget_updates(self) -> None:
        """Counts updates from the next reduction on, as replicas have made different numbers."""
        self._updates_before = None

    def shadow(self, active: Sequence[int]) -> None:
        """Takes part in the others' reduction, with zeros, and discards the result."""
        self.begin()
        self._active = active
        self._give_zeros()
