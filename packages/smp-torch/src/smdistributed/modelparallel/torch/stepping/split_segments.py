"""The microbatches of a pipelined step whose sequences several ranks share.

The step is recorded, cut and ordered for whole sequences. Then each segment is tried on fakes: what
a rank has of each value that it gives, and what is exchanged for it (``execute.split_programs``).
Every rank of the pipeline tries all segments, and finds the same.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.microbatch import SplitRules
from smdistributed.modelparallel.torch.compat.calling_line import line_of
from smdistributed.modelparallel.torch.compat.private.modes import quiet_fakes
from smdistributed.modelparallel.torch.compat.transformers_runs import (
    transformers_as_in_a_real_run,
)
from smdistributed.modelparallel.torch.context_parallel.group import ContextGroup
from smdistributed.modelparallel.torch.context_parallel.layout import Layout
from smdistributed.modelparallel.torch.context_parallel.proving import Proofs
from smdistributed.modelparallel.torch.context_parallel.run import Ways
from smdistributed.modelparallel.torch.execute.program import Program
from smdistributed.modelparallel.torch.execute.split_programs import (
    SplitPlan,
    SplitProgram,
    split_plan,
)
from smdistributed.modelparallel.torch.model.distributed import models_of
from smdistributed.modelparallel.torch.planning.segments import Plan, SegmentNodes
from smdistributed.modelparallel.torch.record.failure import Failure
from smdistributed.modelparallel.torch.record.passes import Passed
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.stepping.batch import Call, MiniBatch
from smdistributed.modelparallel.torch.stepping.sequences import (
    SequenceDims,
    agreed_seed,
    arguments_of,
)
from smdistributed.modelparallel.torch.tensors.nested import tensors_in
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec

#: Plans of which it is known how they are computed.
_MOST_SPLIT = 64
#: Where the tensors of a microbatch have their sequences, and how long these are.
_Key = tuple[int, tuple[Layout | None, ...]]


class SplitSegments:
    """Finds out how the plans of a step function are computed with pieces of sequences.

    Args:
        runtime: the state of the library in this process.
        group: the ranks that share them.
        rules: which arguments of the function are split.
        dims: where they have their sequences.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        group: ContextGroup,
        rules: SplitRules,
        dims: Mapping[str, int | None],
    ) -> None:
        self._runtime = runtime
        self._group = group
        self._rules = rules
        self._dims = SequenceDims(rules, dims, group.size)
        self._proofs = Proofs(group)
        self._known: OrderedDict[tuple[Plan, _Key], SplitPlan] = OrderedDict()

    def agree(self, seed: int, call: Call) -> int:
        """Returns the seed of the step, the same on all ranks. Collective: CP_GROUP.

        Raises:
            SMPError: they were called with different batches.
        """
        return agreed_seed(self._group, seed, arguments_of(self._rules, *call))

    def check(self, batch: MiniBatch) -> None:
        """Raises if it cannot be told where sequences are, or they do not divide.

        Raises:
            ConfigError: so it is.
        """
        for call in batch.calls:
            self._dims.of(*call)

    def of(self, passed: Sequence[Passed], batch: MiniBatch) -> tuple[SplitPlan, ...]:
        """Returns how microbatches are computed. Collective: PP_GROUP, if something is new.

        Raises:
            UnsupportedError: one cannot be computed from pieces.
        """
        found: list[SplitPlan] = []
        is_new = False
        failure: Exception | None = None
        for each, call in zip(passed, batch.calls, strict=True):
            key = self._key(call)
            if (each.plan, key) not in self._known and failure is None:
                is_new = True
                try:
                    self._known[each.plan, key] = self._split(each, call, key)
                except Exception as error:
                    failure = error
            if failure is None:
                self._known.move_to_end((each.plan, key))
                found.append(self._known[each.plan, key])
        if is_new:
            self._compare(failure)
        while len(self._known) > max(_MOST_SPLIT, len(passed)):
            self._known.popitem(last=False)
        return tuple(found)

    def let_go(self) -> None:
        """Forgets everything, and the models with it; every rank must, before the same call."""
        self._known.clear()
        self._proofs = Proofs(self._group)

    def _compare(self, failure: Exception | None) -> None:
        """Raises if a rank cannot compute with pieces. Collective: PP_GROUP."""
        told = None if failure is None else Failure.of(failure)
        everyones = self._runtime.communicator.allgather(told, CommGroup.PP_GROUP)
        if failure is not None:
            raise failure
        for each in everyones:
            if each is not None:
                raise each.error()

    def _key(self, call: Call) -> _Key:
        given, length = self._dims.of(*call)
        layouts = {id(tensor): layout for tensor, layout in given}
        return length, tuple(layouts.get(id(each)) for each in tensors_in(call))

    def _split(self, passed: Passed, call: Call, key: _Key) -> SplitPlan:
        plan = passed.plan
        split = SplitPlan(self._proofs, *key, [Ways(self._proofs) for _ in plan.segments])
        specs = [TensorSpec.of(each) for each in tensors_in(call)]
        with self._runtime.fake_mode:
            inputs = [each.empty(self._runtime.device) for each in specs]
        inputs += passed.constants_read()
        with self._on_fakes():
            split_plan(plan, split, inputs, lambda segment: self._program(plan, segment, split))
        own = self._runtime.coordinates.pp_rank
        for segment in plan.segments:
            if segment.rank != own:
                del split.programs[segment.index]
        return split

    def _program(self, plan: Plan, segment: SegmentNodes, split: SplitPlan) -> SplitProgram:
        runtime = self._runtime

        def make(check: Callable[..., None]) -> Program:
            return Program(plan, segment, runtime.device, runtime.random, check=check)

        return SplitProgram(make, segment, split, runtime.fake_mode, runtime.random.apart)

    @contextlib.contextmanager
    def _on_fakes(self) -> Iterator[None]:
        """Inside, models have fakes in the places of their parameters and buffers."""
        with contextlib.ExitStack() as stack:
            for model in models_of(self._runtime):
                stack.enter_context(model.holder.fakes.in_place())
            stack.enter_context(transformers_as_in_a_real_run())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(quiet_fakes())
            try:
                yield
            except SMPError:
                raise
            except Exception as error:
                line = line_of(error)
                place = "" if line is None else f" ({os.path.basename(line[0])}:{line[1]})"
                raise UnsupportedError(
                    "context_parallel_degree beside pipeline_parallel_degree tries each part of a "
                    "step on stand-ins of pieces of the sequence, which have no numbers, and a "
                    f"module of this step fails on them{place}: {type(error).__name__}: {error} "
                    "Let it do without the numbers of its tensors, or set one of the degrees to 1."
                ) from error
