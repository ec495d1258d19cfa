"""Mini-batches of a step with one partition that run as CUDA graphs.

Ranks that exchange within a pass, those of a sharding or a tensor-parallel group, decide together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

from smdistributed.modelparallel.torch.execute.bodies import (
    Arguments,
    AsTheyAre,
    Bodies,
    BodyTape,
    Call,
    TakenDown,
)
from smdistributed.modelparallel.torch.execute.captured_bodies import (
    CapturedBodies,
    ConfirmedBodies,
    capture_bodies,
)
from smdistributed.modelparallel.torch.execute.graphs import Graphs
from smdistributed.modelparallel.torch.execute.taped_runs import TapedRuns
from smdistributed.modelparallel.torch.model.distributed import DistributedModel
from smdistributed.modelparallel.torch.random.keys import CapturedDraws
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.sharding.home import is_sharded
from smdistributed.modelparallel.torch.stepping.captures import Captures, Due, Kind, graphs_for
from smdistributed.modelparallel.torch.tape.answers import is_answered
from smdistributed.modelparallel.torch.tape.tape import Tape

_Kind = Kind[list[BodyTape], CapturedBodies]
#: Kinds that are told apart, as of batches of all lengths.
_MOST_KNOWN = 1000
#: Of those that look alike.
_MOST_ANSWERED = 4


class BodyCaptures:
    """The captured mini-batches of one step function.

    Args:
        runtime: the state of the library in this process; there is one partition.
        graphs: capture bodies.
        name: of the step function, for messages.
        is_asked_for: see ``Captures``.
        runs: compile what lies between products of bodies.
        begin_pass: does what comes before a backward pass that Python did not begin itself.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        graphs: Graphs,
        name: str,
        *,
        is_asked_for: bool,
        runs: TapedRuns,
        begin_pass: Callable[[], None],
    ) -> None:
        self._runtime = runtime
        self._graphs = graphs
        groups = runtime.sharding_groups
        self._course = None if groups is None else groups.course
        self._captures = Captures[list[BodyTape], CapturedBodies](
            graphs,
            runtime.tensor_group if groups is None else groups,
            name,
            runtime.rank,
            runtime.device,
            is_asked_for=is_asked_for,
        )
        self._runs = runs
        self._begin_pass = begin_pass
        self._devices = tuple(dict.fromkeys(("cpu", runtime.device.type)))
        #: By how they look; those that look alike have other answers.
        self._kinds: dict[Hashable, list[_Kind]] = {}

    def of(
        self,
        calls: Sequence[Call],
        weights: Sequence[float],
        models: Sequence[DistributedModel],
        around: str,
        enter: Callable[[int], None],
    ) -> Bodies:
        """Returns what runs the bodies of a mini-batch.

        Collective: the sharding group.

        Args:
            calls: the arguments of its microbatches.
            weights: by what their losses count.
            models: that there are.
            around: what takes part in the step from outside; see ``takes_part``.
            enter: called with the number of each microbatch that is captured before it.
        """
        runtime = self._runtime
        given = [each for call in calls for each in Arguments(call).tensors]
        kinds = self._kinds_of(_looks(calls, weights, models), models)
        kind = self._kind(kinds, calls)
        here = [each for model in models for _, each in model.local_named_parameters()]
        whole = [each for each in here if not is_sharded(each)]
        shards = [
            each.data_parallel.shards.model
            for each in models
            if each.data_parallel.shards is not None
        ]

        def captured(tapes: list[BodyTape]) -> CapturedBodies:
            foreseen = [each for model in models for each in model.data_parallel.foresee()]

            def enter_captured(microbatch: int) -> None:
                enter(microbatch)
                if microbatch == len(calls) - 1:
                    for each in foreseen:
                        each.enter_last_pass()

            return capture_bodies(
                self._graphs,
                tapes,
                calls,
                whole,
                shards,
                self._course,
                runtime.tensor_group,
                [CapturedDraws(runtime.random, each.num_draws) for each in tapes],
                runtime.random,
                self._devices,
                enter_captured,
                foreseen,
                self._runs,
            )

        due = Due(
            whole,
            given,
            around=around,
            adds_up=lambda: (
                any(each.grad is not None for each in whole)
                or any(each.gradients.adds_steps_up for each in shards)
            ),
            refusal=lambda tapes: next(filter(None, (each.tape.refusal for each in tapes)), ""),
            fits=lambda replay: True,  # what it depends on is what tells kinds apart
            capture=captured,
        )
        replay = self._captures.decide(kind, due)
        if replay is not None:
            return ConfirmedBodies(
                replay,
                runtime.device,
                self._devices,
                runtime.random,
                self._course,
                runtime.tensor_group,
                self._begin_pass,
            )
        if kind.is_taken_down:
            modules = [module for model in models for module in model.get_module().modules()]
            pairs = zip(calls, weights, strict=True)
            looks = {_looks([call], [weight], []) for call, weight in pairs}
            taken = TakenDown(
                runtime.device,
                self._devices,
                runtime.random,
                runtime.fake_mode,
                modules,
                # Once that they are was not borne out, each is taken down.
                are_alike=kind.captures == 0 and len(looks) == 1,
            )
            kind.tapes = taken.tapes
            return taken
        return AsTheyAre()

    def _kinds_of(self, looks: Hashable, models: Sequence[DistributedModel]) -> list[_Kind]:
        """Returns what is known of mini-batches that look so; it goes with any of the models."""
        if (kinds := self._kinds.get(looks)) is None:
            if len(self._kinds) == _MOST_KNOWN:
                return [Kind(why_not="there are too many kinds of mini-batches")]
            kinds = self._kinds[looks] = []
            for model in models:
                # Of a step function that has the model in hand, too, nothing may be kept.
                weakref.finalize(model, _forget, weakref.ref(self), looks).atexit = False
        return kinds

    def _kind(self, kinds: list[_Kind], calls: Sequence[Call]) -> _Kind:
        """Returns the kind of a mini-batch, by what it answers those that ask ahead."""
        new = None
        for kind in kinds:
            tapes = _tapes_of(kind)
            if len(tapes) < len(calls):
                new = new or kind
                continue
            random, devices = self._runtime.random, self._devices
            if all(
                is_answered(tape, Arguments(call).tensors, random, devices)
                for tape, call in zip(tapes, calls, strict=True)
            ):
                return kind
        if new is None:
            is_full = len(kinds) >= _MOST_ANSWERED
            why_not = "what its Python asks is answered in too many ways" if is_full else ""
            kinds.append(new := Kind(why_not=why_not))
        return new

    def forget(self, looks: Hashable) -> None:
        """Lets go of mini-batches that look so."""
        self._kinds.pop(looks, None)


def _tapes_of(kind: _Kind) -> list[Tape]:
    """Returns what was taken down of mini-batches of a kind; nothing until it was."""
    if kind.replay is not None:
        return [each.tape.tape for each in kind.replay.bodies]
    return [each.tape for each in kind.tapes or ()]


def _forget(captures: weakref.ref[BodyCaptures], looks: Hashable) -> None:
    if (found := captures()) is not None:
        found.forget(looks)


def body_captures_of(
    runtime: TorchRuntime,
    name: str,
    cuda_graphs: bool | Literal["auto"],
    runs: TapedRuns,
    begin_pass: Callable[[], None],
) -> BodyCaptures | None:
    """Returns the captured mini-batches of a step function; None where none are captured.

    Args:
        runtime: the state of the library in this process; there is one partition.
        name: of the step function.
        cuda_graphs: whether the script asks for them; "auto": not where shards travel by messages,
            which a graph would have in it.
        runs, begin_pass: see ``BodyCaptures``.
    """
    groups = runtime.sharding_groups
    if cuda_graphs == "auto" and groups is not None and groups.make_memory is None:
        return None
    is_mixed = groups is not None and runtime.tensor_group.size > 1
    graphs = graphs_for(runtime, name, cuda_graphs, "slices are in shards" if is_mixed else "")
    if graphs is None:
        return None
    return BodyCaptures(
        runtime,
        graphs,
        name,
        is_asked_for=cuda_graphs is True,
        runs=runs,
        begin_pass=begin_pass,
    )


def _looks(
    calls: Sequence[Call], weights: Sequence[float], models: Sequence[DistributedModel]
) -> Hashable:
    """Returns what is burnt into captured kernels of what they are given."""
    tensors = tuple(
        tuple(
            (each.shape, each.stride(), each.dtype, each.device) for each in Arguments(call).tensors
        )
        for call in calls
    )
    return tensors, tuple(weights), tuple((id(each), each.training) for each in models)
