"""The Python of a step: it runs for every microbatch, on every rank, before anything is computed.

Rank 0 of the pipeline runs first: it alone has the inputs, so it answers what the code asks about
them. It tells the others its answers and the way that each microbatch went, in rounds of some
milliseconds, so that they run beside it; they run the same code and must go the same ways. With a
microbatch of which nothing is known, as in a first step, whose Python takes seconds, all ranks
begin at once, and are told each answer when it is found. An exception of the user's is raised on
every rank, before anything of the step was sent.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensorMode, past_recording
from smdistributed.modelparallel.torch.model.distributed import DistributedModel, models_of
from smdistributed.modelparallel.torch.planning.changed_buffers import (
    buffers_apart,
    check_shared,
    title_of,
)
from smdistributed.modelparallel.torch.planning.segments import Plan, cut
from smdistributed.modelparallel.torch.planning.shared_hooks import check_shared_hooks
from smdistributed.modelparallel.torch.planning.spread_gradients import spread_gradients
from smdistributed.modelparallel.torch.record.buffers_before import Earlier
from smdistributed.modelparallel.torch.record.failure import Failure
from smdistributed.modelparallel.torch.record.fakes import Slot
from smdistributed.modelparallel.torch.record.ir import Graph, NodeKind
from smdistributed.modelparallel.torch.record.passes import Passed
from smdistributed.modelparallel.torch.record.questions.decisions import (
    GivenDecisions,
    OwnDecisions,
)
from smdistributed.modelparallel.torch.record.recorder import Recorder
from smdistributed.modelparallel.torch.record.scene import Scene
from smdistributed.modelparallel.torch.record.trace.buffers import keep_on
from smdistributed.modelparallel.torch.record.trace.tree import Trace, Way
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.stepping.batch import (
    Asked,
    Call,
    MiniBatch,
    Recalled,
    Round,
)
from smdistributed.modelparallel.torch.stepping.looking_ahead import LookingAhead, StepAhead
from smdistributed.modelparallel.torch.stepping.placing import place_models
from smdistributed.modelparallel.torch.stepping.question_plans import QuestionPlans
from smdistributed.modelparallel.torch.stepping.tracing import Tracing
from smdistributed.modelparallel.torch.tensors.nested import tensors_in
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec

logger = logging.getLogger(__name__)

#: Kinds of microbatches that are remembered.
_MOST_TRACES = 64
#: Ways that a trace may have; one that has more is forgotten: something is new in every step.
_MOST_WAYS = 32
#: Plans kept in all.
_MOST_PLANS = 64
#: Operations on fakes that PyTorch remembers, numbers included: some 40 MB.
_MOST_OPERATIONS = 2**14
#: A round ends with the microbatch in which it becomes so long; to tell of it takes half a
#: millisecond.
_ROUND_SECONDS = 4e-3


class Lockstep:
    """The microbatches of one step function, and the ways that they go.

    Args:
        runtime: the state of the library in this process.
        function: the user's function.
        inside: a context in which the function may run; told the recorder.
        compiles_runs: what lies between modules is compiled.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        function: Callable[..., Any],
        inside: Callable[[Recorder], AbstractContextManager[None]],
        *,
        compiles_runs: bool,
    ) -> None:
        self._runtime = runtime
        self._function = function
        self._inside = inside
        self._tracing = Tracing(runtime, function, compiles_runs=compiles_runs)
        self._is_first = runtime.coordinates.pp_rank == 0
        self._traces: OrderedDict[tuple[object, ...], Trace] = OrderedDict()
        self._ways_in: dict[Trace, int] = {}
        self._numbers = itertools.count()
        self._scene: tuple[object, Scene] | None = None
        self._plans: OrderedDict[str, list[Plan]] = OrderedDict()
        self._passed: list[Passed] = []
        self._new: dict[int, Way] = {}
        #: What rank 0 of the pipeline has told of this step.
        self._said: list[Round] = []
        #: That it told in the middle of a microbatch.
        self._unread: Round | None = None
        #: It asks a question of all ranks, and this one has not joined yet.
        self._is_asked = False
        self._question_plans = QuestionPlans(runtime, self._cut)
        self._ahead: StepAhead | None = None

    # ------------------------------------------------------------------ a step

    def recall(self, batch: MiniBatch) -> Recalled | None:
        """Returns None: no call is known before its Python has run."""
        return None

    def passes(self, batch: MiniBatch) -> list[Passed]:
        """Runs the Python of all microbatches. Collective: PP_GROUP; in a first call WORLD.

        Raises:
            SMPError: the ranks of the pipeline do not go the same ways.
            Exception: the user's.
        """
        self._passed, self._new, self._said = [], {}, []
        self._unread, self._is_asked = None, False
        try:
            self._ahead = self._step_ahead()
            return self._run(batch)
        finally:
            self._ahead = None

    def _run(self, batch: MiniBatch) -> list[Passed]:
        run = self._lead if self._is_first else self._follow
        is_whole = False
        while not is_whole:
            failure = run(batch)
            last = self._said[-1]
            if last.failure is not None:
                raise failure or last.failure.error()
            if last.is_open:
                self._compare(failure)
                self._runtime.tensor_group.recorded()  # before all ranks place the models
                self._compare(self._closed(batch))
            is_whole = self._num_said == len(batch.calls)
        if any(each.is_new for each in self._said):
            self._agree(failure)
        elif not self._is_first:
            self._check()
        if failure is not None:
            raise failure
        self._bring_buffers_together()
        self._forget()
        return self._passed

    @property
    def _num_said(self) -> int:
        """Of how many microbatches rank 0 of the pipeline has told."""
        return sum(len(each.answers) for each in self._said)

    def _lead(self, batch: MiniBatch) -> Exception | None:
        """Runs microbatches up to the last, or to one that shows what the partition may be.

        Returns:
            what the user's code raised.
        """
        communicator, num_calls = self._runtime.communicator, len(batch.calls)
        answers: list[Sequence[Any]] = []
        ways: list[int | None] = []
        known = len(self._new)
        raised: Exception | None = None
        is_open = is_saying = False
        began = time.perf_counter()

        def say(*, asks: bool = False, begins: bool = False) -> None:
            nonlocal is_saying, known, began
            is_new = is_open or len(self._new) > known
            failure = None if raised is None else Failure.of(raised)
            told = tuple(map(tuple, answers))
            said = Round(told, tuple(ways), is_new, is_open, begins, asks, failure)
            self._said.append(said)
            is_saying = True
            communicator.tell(said, CommGroup.PP_GROUP)
            is_saying = False
            answers.clear()
            ways.clear()
            known, began = len(self._new), time.perf_counter()

        def tell(of_all: bool, answer: Any) -> None:
            communicator.tell(Asked(of_all, answer), CommGroup.PP_GROUP)

        try:
            with self._on_fakes() as recorder:
                while len(self._passed) < num_calls and not is_open:
                    if ways and time.perf_counter() - began > _ROUND_SECONDS:
                        with past_recording():
                            say()
                    ahead = self._looking_ahead(recorder)
                    begins = self._is_unknown(batch)
                    decisions = OwnDecisions(
                        ahead, functools.partial(say, asks=True), tell, begun=begins
                    )
                    answers.append(decisions.answers)
                    if begins:
                        with past_recording():
                            say(begins=True)
                    passed = self._pass(recorder, batch, decisions)
                    ways.append(None if passed.way is None else passed.way.number)
                    is_open = passed.way is None
        except Exception as error:
            if is_saying:
                raise
            raised = error
        say()
        return raised

    def _follow(self, batch: MiniBatch) -> Exception | None:
        """Runs the microbatches that rank 0 of the pipeline runs.

        Returns:
            what was raised here; what rank 0 says was heard to the end all the same.
        """
        raised: Exception | None = None
        is_last = is_hearing = False
        try:
            with self._on_fakes() as recorder:
                while not is_last:
                    is_hearing = True
                    with past_recording():
                        said = self._hear()
                    is_hearing = False
                    if said is None:
                        raise _not_decided_on(self._runtime.rank)
                    is_last = self._is_last(batch, said)
                    for position, answers in enumerate(said.answers, 1):
                        is_last_told = position == len(said.answers)
                        begins = said.begins and is_last_told
                        asks = said.asks and is_last_told
                        given = GivenDecisions(
                            functools.partial(tuple, answers),
                            self._looking_ahead(recorder),
                            self._hear_question if begins or asks else None,
                            self._join,
                            begun=begins,
                        )
                        self._pass(recorder, batch, given)
                        if self._is_asked:
                            raise _not_decided_on(self._runtime.rank)
        except Exception as error:
            if is_hearing:
                raise
            raised = error
            self._decline(error)
        while not is_last:
            said = self._hear()
            is_last = said is not None and self._is_last(batch, said)
            assert raised is not None
            self._decline(raised)
        return raised

    def _hear(self) -> Round | None:
        """Hears of some microbatches; None: of a question of one that has come to its end here."""
        said = self._unread or self._next()
        self._unread = None
        if isinstance(said, Asked):
            return None
        self._said.append(said)
        self._is_asked |= said.asks
        return said

    def _is_last(self, batch: MiniBatch, said: Round) -> bool:
        """Whether no more microbatches follow for now."""
        is_whole = self._num_said == len(batch.calls) and not (said.begins or said.asks)
        return is_whole or said.is_open or said.failure is not None

    def _next(self) -> Round | Asked:
        """Returns what rank 0 of the pipeline tells next."""
        said: Round | Asked = self._runtime.communicator.hear(CommGroup.PP_GROUP)
        self._is_asked |= isinstance(said, Asked) and said.of_all
        return said

    # ------------------------------------------------------------------ questions of all ranks

    def _step_ahead(self) -> StepAhead:
        """Returns what is computed ahead of a step, for questions about activations."""
        models = models_of(self._runtime)
        is_possible = self._runtime.context_group is None and all(
            model.data_parallel.shards is None for model in models
        )
        return StepAhead(self._runtime, self._question_plans, is_possible=is_possible)

    def _looking_ahead(self, recorder: Recorder) -> LookingAhead:
        """Returns what answers the questions of the next microbatch."""
        assert self._ahead is not None
        return self._ahead.microbatch(recorder.computed_before)

    def _hear_question(self) -> tuple[bool, Any]:
        """Hears of the next question of a microbatch in which all ranks have answered one.

        Raises:
            SMPError: rank 0 of the pipeline asks none.
        """
        said = self._next()
        if isinstance(said, Round):
            self._unread = said
            if said.failure is not None:
                raise said.failure.error()
            raise SMPError(
                "a decision is made here that the first rank of the pipeline did not make: every "
                "rank must run the same code with the same settings."
            )
        return said.of_all, said.answer

    def _join(self) -> None:
        self._is_asked = False

    def _decline(self, error: Exception) -> None:
        """Lets the others know that this rank does not come to the question that they ask."""
        if self._is_asked:
            self._is_asked = False
            with contextlib.suppress(Exception):  # it is raised on all ranks
                assert self._ahead is not None
                self._ahead.compare("", error)

    def _pass(
        self, recorder: Recorder, batch: MiniBatch, decisions: OwnDecisions | GivenDecisions
    ) -> Passed:
        position = len(self._passed)
        call = batch.calls[position]
        random = self._runtime.random
        random.begin(batch.header.seed, rehearsal=True)
        random.enter_pass(position, backward=False)
        trace = self._trace(batch, call)
        earlier = tuple(map(Earlier, self._passed, batch.calls))
        share_of = functools.partial(_share_of, models_of(self._runtime), batch.weights[position])
        passed = recorder.run(trace, self._function, call, decisions, earlier, share_of)
        self._passed.append(passed)
        assert self._ahead is not None
        self._ahead.note(trace, call, passed)
        self._note(trace, passed.way)
        return passed

    def _is_unknown(self, batch: MiniBatch) -> bool:
        """Whether nothing is known of the next microbatch, whose Python then takes long."""
        call = batch.calls[len(self._passed)]
        return not self._trace(batch, call).start.following

    def _note(self, trace: Trace, way: Way | None) -> None:
        if way is not None and way.plan is None and way.number not in self._new:
            self._new[way.number] = way
            self._ways_in[trace] = self._ways_in.get(trace, 0) + 1

    def _closed(self, batch: MiniBatch) -> Exception | None:
        """Decides the partition; returns why it fails on this rank, which others may not see."""
        try:
            self._close(batch)
        except Exception as error:
            return error
        return None

    def _close(self, batch: MiniBatch) -> None:
        """Decides the partition of models, from the microbatch that has run last."""
        passed = self._passed[-1]
        self._tracing.measure(CommGroup.WORLD)
        assert passed.opened is not None
        place_models(self._runtime, passed.profile, passed.opened.models, self._tracing.costs)
        with self._on_fakes() as recorder:
            passed.way = recorder.close(passed)
        for model in models_of(self._runtime):
            model.holder.fakes.check_current()
        self._note(self._trace(batch, batch.calls[len(self._passed) - 1]), passed.way)

    @contextlib.contextmanager
    def _on_fakes(self) -> Iterator[Recorder]:
        runtime, scene = self._runtime, self._scene_now()
        name = getattr(self._function, "__name__", str(self._function))
        where = f"in step function {name}, whose Python each rank runs at a time of its own"
        with (
            runtime.communicator.reach.only([runtime.rank], where),
            self._tracing.metered(models_of(runtime), scene) as meter,
        ):
            recorder = Recorder(
                scene,
                runtime.fake_mode,
                runtime.device,
                runtime.random,
                meter,
                self._numbers.__next__,
                runtime.topology.members(CommGroup.DP_GROUP, runtime.rank),
                runtime.topology.members(CommGroup.TP_GROUP, runtime.rank),
            )
            with self._inside(recorder), recorder.on_fakes():
                yield recorder

    # ------------------------------------------------------------------ what is kept

    def _scene_now(self) -> Scene:
        models = models_of(self._runtime)
        key = tuple((each.number, each.holder.version, each.holder.partitioned) for each in models)
        if self._scene is None or self._scene[0] != key:
            leaves = {
                module: leaf
                for model in models
                if model.holder.partitioned
                for module, leaf in model.holder.placement.leaves.items()
            }
            scene = Scene(
                [model.holder.fakes for model in models],
                leaves,
                [model.holder.fakes for model in models if not model.holder.partitioned],
                [self._function],
            )
            self._scene = key, scene
        return self._scene[1]

    def _trace(self, batch: MiniBatch, call: Call) -> Trace:
        specs = tuple(TensorSpec.of(tensor) for tensor in tensors_in(call))
        key = (batch.header.kind.state, specs)
        trace = self._traces.get(key)
        if trace is None:
            with self._runtime.fake_mode:
                fakes = [each.empty(self._runtime.device) for each in specs]
            trace = self._traces[key] = Trace(fakes)
        self._traces.move_to_end(key)
        return trace

    def let_go(self) -> None:
        """Forgets everything; every rank must, before the same call."""
        self._scene = None
        self._passed, self._new, self._said = [], {}, []
        for known in (self._traces, self._ways_in, self._plans):
            known.clear()

    def _forget(self) -> None:
        for key, trace in list(self._traces.items())[:-_MOST_TRACES]:
            del self._traces[key]
            self._ways_in.pop(trace, None)
        for key, trace in list(self._traces.items()):
            if self._ways_in.get(trace, 0) > _MOST_WAYS:
                del self._traces[key], self._ways_in[trace]
        if len(FakeTensorMode.cache) > _MOST_OPERATIONS:
            FakeTensorMode.cache_clear()

    # ------------------------------------------------------------------ new ways

    def _agree(self, failure: Exception | None = None) -> None:
        """Makes plans of new ways, and makes sure that all ranks have the same.

        Args:
            failure: why there are none on this rank.
        """
        orders = {number: way.graph.names() for number, way in self._new.items()}
        trials = {number: way.graph.trials(orders[number]) for number, way in self._new.items()}
        mine = (orders if self._is_first else {}, trials)
        everyones = self._runtime.communicator.allgather(mine, CommGroup.PP_GROUP)
        self._tracing.measure(CommGroup.PP_GROUP)
        try:
            for number, way in () if failure is not None else self._new.items():
                found = [each[1].get(number, {}) for each in everyones]
                way.graph.take(orders[number], found, self._partition_of())
                way.graph.put_in_order(everyones[0][0].get(number, ()))
                spread_gradients(way.graph, self._partition_of(), self._owner_of())
                plan = self._plan(way)
                self._check_hooks(plan)
                way.plan = plan
        except Exception as error:
            failure = error
        models = [model for model in models_of(self._runtime) if model.holder.partitioned]
        for passed in self._passed:
            for model in models:
                model.drawing.take(passed.profile)
        self._compare(failure)

    def _check_hooks(self, plan: Plan) -> None:
        """Makes sure that hooks on gradients do in the passes of a plan what they do in one."""
        fakes = [each.holder.fakes for each in models_of(self._runtime) if each.holder.is_partial]
        for each in fakes:
            each.hooks.look(each.named_parameters())
        hooks = [hook for each in fakes for hook in each.hooks.found]
        where = "in a hook on gradients, which is tried out"
        with self._runtime.communicator.reach.only([self._runtime.rank], where):
            check_shared_hooks(plan, hooks)

    def _plan(self, way: Way) -> Plan:
        """Cuts a graph, or returns the plan of one that does the same."""
        alike = self._plans.setdefault(way.graph.digest(), [])
        self._plans.move_to_end(way.graph.digest())
        for plan in alike:
            if plan.graph.does_as(way.graph):
                return plan
        plan = self._cut(way.graph)
        _check_inputs(plan)
        alike.append(plan)
        while len(self._plans) > _MOST_PLANS:
            self._plans.popitem(last=False)
        return plan

    def _cut(self, graph: Graph) -> Plan:
        """Cuts a graph along the partition."""
        check_shared(graph, self._is_shared)
        return cut(graph, self._partition_of(), self._owner_of(), self._tracing.costs)

    def _bring_buffers_together(self) -> None:
        """Has microbatches read, and change, a buffer of a split module on one rank.

        Those that leave it as it is could read it on each, but for others that change it. All
        ranks have the same plans, and find the same.
        """
        plans = dict.fromkeys(passed.plan for passed in self._passed)
        apart = buffers_apart(plans) if len(plans) > 1 else {}
        if not apart:
            return
        for way in [way for way in self._known_ways() if way.plan in plans]:
            if any(node.target is torch.autograd.grad for node in way.graph.nodes):
                continue  # it has been spread over the segments that it has
            for slot, rank in apart.items():
                keep_on(way.graph, slot, title_of(slot), rank)
            way.plan = self._plan(way)

    def _is_shared(self, slot: Slot) -> bool:
        """Whether a buffer has copies on all ranks, of which modules that stay whole read some."""
        return any(
            model.holder.placement.is_shared(slot)
            for model in models_of(self._runtime)
            if model.holder.partitioned and slot in model.holder.fakes.slots
        )

    def _owner_of(self) -> Callable[[Slot], int]:
        """Returns what tells the partition that holds a parameter."""
        models = [model for model in models_of(self._runtime) if model.holder.partitioned]

        def owner_of(slot: Slot) -> int:
            for model in models:
                if slot in model.holder.fakes.slots:
                    return model.holder.placement.owner_of(slot)
            raise AssertionError("a recorded parameter belongs to no model")

        return owner_of

    def _partition_of(self) -> dict[nn.Module, int]:
        """Returns the partition of each module that has one."""
        return {
            module: partition
            for model in models_of(self._runtime)
            if model.holder.partitioned
            for module, partition in model.holder.placement.partition_of.items()
        }

    def _compare(self, failure: Exception | None) -> None:
        """Makes sure that all ranks went the same ways. Collective: PP_GROUP.

        Raises:
            SMPError: they did not, or another rank failed.
            Exception: the failure.
        """
        communicator = self._runtime.communicator
        ranks = self._runtime.topology.members(CommGroup.PP_GROUP, self._runtime.rank)
        done = [] if failure is not None else self._passed
        mine = (
            "" if failure is None else f"{type(failure).__name__}: {failure}",
            [passed.way.number for passed in done if passed.way],
            [way.plan.digest() for way in self._new.values() if done and way.plan],
        )
        everyones = communicator.allgather(mine, CommGroup.PP_GROUP)
        if failure is not None:
            raise failure
        if all(each == everyones[0] for each in everyones):
            return
        for rank, each in zip(ranks, everyones, strict=True):
            if each[0]:
                raise SMPError(f"the step function failed on rank {rank}: {each[0]}")
        everything = communicator.allgather(
            [way.plan.lines() for way in self._new.values() if way.plan], CommGroup.PP_GROUP
        )
        first = [line for lines in everything[0] for line in lines]
        for rank, theirs in zip(ranks, everything, strict=True):
            lines = [line for lines in theirs for line in lines]
            if lines == first and everyones[ranks.index(rank)] == everyones[0]:
                continue
            raise _different(
                next(
                    (pair for pair in zip(first, lines, strict=False) if pair[0] != pair[1]),
                    (f"{len(first)} nodes", f"{len(lines)} nodes"),
                ),
                ranks[0],
                rank,
            )

    def _check(self) -> None:
        """Makes sure that microbatches went the ways that they went on rank 0 of the pipeline."""
        ways = [way for each in self._said for way in each.ways]
        for passed, theirs in zip(self._passed, ways, strict=False):
            if passed.way is None or theirs is None or passed.way.number == theirs:
                continue
            other = next((way for way in self._known_ways() if way.number == theirs), None)
            lines = ("another way", "this way")
            if other is not None:
                lines = next(
                    (
                        (str(one), str(mine))
                        for one, mine in zip(other.entries, passed.way.entries, strict=False)
                        if one is not mine
                    ),
                    lines,
                )
            ranks = self._runtime.topology.members(CommGroup.PP_GROUP, self._runtime.rank)
            raise _different(lines, ranks[0], self._runtime.rank)

    def _known_ways(self) -> list[Way]:
        found = []
        for trace in self._traces.values():
            pending = [trace.start]
            while pending:
                entry = pending.pop()
                pending += entry.following
                if entry.way is not None:
                    found.append(entry.way)
        return found


def _share_of(models: Sequence[DistributedModel], weight: float, module: nn.Module) -> float | None:
    """Returns by what a loss counts in the sum of a mini-batch; None if an optimizer scales it.

    Args:
        models: all.
        weight: the share of the microbatch in the batch.
        module: of the model whose loss it is.
    """
    (model,) = (each for each in models if each.get_module() is module)
    if model.scales_losses:
        return None
    return weight if model.data_parallel.gradient_scale == "mean" else 1.0


def _not_decided_on(rank: int) -> SMPError:
    return SMPError(
        f"the first rank of the pipeline makes a decision that is not made here, on rank {rank}: "
        "every rank must run the same code with the same settings."
    )


def _different(lines: tuple[str, str], first: int, rank: int) -> SMPError:
    return SMPError(
        "the ranks of the pipeline recorded different computations. Every rank must run "
        "the same code with the same settings; code that goes through a set of texts does so in "
        "another order in each process, unless PYTHONHASHSEED=0 is in the environment. The first "
        f"difference: rank {first}: {lines[0]}; rank {rank}: {lines[1]}."
    )


def _check_inputs(plan: Plan) -> None:
    """Raises if the gradient of an input would have to come from another rank."""
    for segment in plan.segments:
        for node in segment.nodes:
            if node.kind is NodeKind.INPUT and segment.rank and node.outputs[0].requires_grad:
                raise UnsupportedError(
                    f"{node.name} requires a gradient and is used on partition {segment.rank}: "
                    "gradients of inputs arrive only from the first partition. Use the input "
                    "there, or call requires_grad_(False) on it."
                )
