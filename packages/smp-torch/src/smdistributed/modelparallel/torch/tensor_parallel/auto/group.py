"""A module that was split as it is: its own forward runs, on slices, once for each rank's call."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.torch.compat.between import no_call
from smdistributed.modelparallel.torch.compat.private.backward import is_in_backward
from smdistributed.modelparallel.torch.compat.private.compiled import compile_like, run_as_written
from smdistributed.modelparallel.torch.state.alike import are_alike
from smdistributed.modelparallel.torch.state.seen import (
    HOOKS,
    HOOKS_OF_CALLS,
    MISSING,
    SeenState,
    value_of,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.agreement import (
    LaneCall,
    agreed,
    same_verdict,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.call_tensors import CallTensors
from smdistributed.modelparallel.torch.tensor_parallel.auto.calls import (
    WITHOUT_CACHE,
    Call,
    TensorForm,
    caches_in,
    tensors_in,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.draws import (
    SplitDraws,
    seeded,
    seeds_of_calls,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.inside import computing
from smdistributed.modelparallel.torch.tensor_parallel.auto.kept import copied
from smdistributed.modelparallel.torch.tensor_parallel.auto.lanes import (
    averaged,
    common,
    joined,
    summed,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.maps import number_of_maps
from smdistributed.modelparallel.torch.tensor_parallel.auto.meetings import examples_of
from smdistributed.modelparallel.torch.tensor_parallel.auto.outputs import (
    COMMON,
    MEAN,
    SAME,
    SUM,
    RefutedError,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.plan import Plan, counted_whole
from smdistributed.modelparallel.torch.tensor_parallel.auto.proof import prove
from smdistributed.modelparallel.torch.tensor_parallel.auto.proven import Proof
from smdistributed.modelparallel.torch.tensor_parallel.auto.split_linear import Gate
from smdistributed.modelparallel.torch.tensor_parallel.auto.template import Template
from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule


@dataclass
class Found:
    """How a module of the user's model can be split.

    Attributes:
        plan: what of it is split.
        template: to prove other forms of calls with.
        proofs: of the forms of calls that were seen.
        recorded: of those that were recorded alone, of which ranks have not told each other.
        kin: what was found of modules of the same plan, this one included.
    """

    plan: Plan
    template: Template
    proofs: dict[Key, Proof] = field(default_factory=dict)
    recorded: dict[Key, Proof] = field(default_factory=dict)
    kin: list[Found] = field(default_factory=list, repr=False, compare=False)

    @property
    def read(self) -> frozenset[tuple[str, str]]:
        """What any of its proofs has read."""
        return frozenset().union(*(each.read for each in self.proofs.values()))

    def shared_with(self, template: Template) -> Found | None:
        """Returns what is known of another module, if all that was proven holds for it too."""
        other = Found(self.plan, template, kin=self.kin)
        other.proofs = {key: proof for key in self.proofs if (proof := other._known(key))}
        if other.proofs.keys() != self.proofs.keys():
            return None
        self.kin.append(other)
        return other

    def _known(self, key: Key) -> Proof | None:
        """Returns the proof for a form of calls of a module that is alike."""
        own = self.template.module
        for each in self.kin:
            proof = each.proofs.get(key) or each.recorded.get(key)
            if proof is not None and are_alike(each.template.module, own, proof.read):
                return proof
        return None

    def proof_of(self, who: str, size: int, lane: LaneCall, *, training: bool) -> Proof:
        """Returns what is known of calls of this form, which is proven when it is new.

        Raises:
            SMPError: slices do not compute what the whole does.
        """
        grad_enabled = torch.is_grad_enabled()
        key = key_of(lane.call, lane.forms, training=training, grad_enabled=grad_enabled)
        if key not in self.proofs:
            self.proofs[key] = self._proven(key, who, size, lane, training=training)
        return self.proofs[key]

    def proof_for_shapes(self, who: str, size: int, lane: LaneCall, *, training: bool) -> Proof:
        """Returns a proof for a call of which this rank makes the shapes alone.

        One of calls with as many dims will do, as the call itself is proven when it is made.

        Raises:
            SMPError: slices do not compute what the whole does.
        """
        grad_enabled = torch.is_grad_enabled()
        key = key_of(lane.call, lane.forms, training=training, grad_enabled=grad_enabled)
        known = {**self.recorded, **self.proofs}
        if key in known:
            return known[key]
        found = next((proof for each, proof in known.items() if each.dims == key.dims), None)
        if found is None:
            found = self.recorded[key] = self._proven(key, who, size, lane, training=training)
        return found

    def _proven(self, key: Key, who: str, size: int, lane: LaneCall, *, training: bool) -> Proof:
        self.template.module.train(training)
        try:
            return self._known(key) or prove(
                *(self.template, self.plan, size, lane.call, lane.forms),
                grad_enabled=torch.is_grad_enabled(),
            )
        except RefutedError as error:
            raise SMPError(
                f"{who} was split, and is called in a way in which its slices do not compute "
                f"what it computes whole: {error}. Exclude it: "
                "smp.set_tensor_parallelism(module, enabled=False)."
            ) from error

    def follow(self, who: str, module: nn.Module, changed: Sequence[tuple[str, str]]) -> None:
        """Takes over to the template what a script has changed since; nothing is proven then.

        Args:
            who: the module, for messages.
            module: that was split.
            changed: names of modules in it and of their attributes.

        Raises:
            UnsupportedError: it is what has been split.
        """
        for owner, attribute in changed:
            inner, own = module.get_submodule(owner), self.template.module.get_submodule(owner)
            value = value_of(inner, attribute)
            is_map_of = owner in (*self.plan.columns, *self.plan.rows, *self.plan.attentions)
            is_new_map = isinstance(value, nn.Module) and number_of_maps(value) > 0
            if attribute in HOOKS_OF_CALLS and owner and self.plan.goes_on:
                raise UnsupportedError(
                    f"{who} is split as one, and computes the calls of all ranks, of which a hook "
                    f"on a module in it would see parts; {owner} has others than before now. "
                    "Exclude the first: smp.set_tensor_parallelism(module, enabled=False)."
                )
            if attribute in HOOKS:
                for each in (name for name in vars(own) if "hook" in name):
                    vars(own)[each] = copy.copy(vars(inner)[each])
            elif is_map_of or is_new_map or (owner, attribute) in self.plan.divided:
                raise UnsupportedError(
                    "what tensor_parallelism(auto=True) has split stays as it is; "
                    f"{who} has another {'.'.join(filter(None, (owner, attribute)))} now. "
                    "Exclude it: smp.set_tensor_parallelism(module, enabled=False)."
                )
            elif isinstance(value, nn.Module):
                own._modules[attribute] = copied(value, {})
            elif value is MISSING:
                vars(own).pop(attribute, None)
            else:
                is_shared = type(value).__name__.endswith("Config")  # see ``copied_with``
                vars(own)[attribute] = value if is_shared else copied(value, {})
        self.proofs, self.recorded = {}, {}

    def proof_like(self, result: Call, otherwise: Proof) -> Proof:
        """Returns one of calls that have as many tensors in their result."""
        number = len(result.paths)
        known = [otherwise, *self.proofs.values()]
        return next((each for each in known if len(each.outputs) == number), otherwise)


@dataclass(frozen=True)
class Key:
    """What calls have in common that one proof serves.

    Attributes:
        structure: of what a call is given.
        forms: of its tensors.
        training, grad_enabled: how it is made.
    """

    structure: str
    forms: tuple[tuple[torch.dtype, tuple[bool, ...]], ...]
    training: bool
    grad_enabled: bool

    @property
    def dims(self) -> object:
        """What calls have in common whose results have their parts along the same dims."""
        return self.structure, [(dtype, len(sizes)) for dtype, sizes in self.forms]


def key_of(call: Call, forms: Sequence[TensorForm], *, training: bool, grad_enabled: bool) -> Key:
    """Returns what calls have in common that one proof serves."""
    return Key(call.structure, tuple(form.key for form in forms), training, grad_enabled)


class Lane(nn.Module):
    """What a rank computes of one call: the forward as it is written, on slices, to be compiled.

    Exchanges lie before and after it, so a compiler finds nothing in it that other ranks have.

    Args:
        group: whose forward it is.
    """

    def __init__(self, group: ClosedGroup) -> None:
        super().__init__()
        self._group = (group,)  # none of its modules

    def forward(self, draws: SplitDraws | None, args: Any, kwargs: Any) -> Any:
        """Computes it; arguments are those of ``ClosedGroup.compute``."""
        return self._group[0].compute(draws, args, kwargs)

    def __reduce__(self) -> Any:
        """A copy of the module runs as it is written, as one does of any compiled module."""
        return type(None), ()


class ClosedGroup(DistributedModule):
    """The part of a split module's class that runs its forward on slices.

    Every rank computes the calls of all ranks, each on its slices; sums, or what is put side by
    side, are the result of the own call. Where code goes on with a sum, that is made in the middle
    of each call, so all ranks compute the calls in one order, that of the ranks. Forward and
    backward are collective: TP_GROUP.
    """

    _smp_found: Found
    _smp_gate: Gate
    _smp_seen: SeenState
    _smp_lane: Lane | None

    def compile_lanes(self, call: Any) -> None:
        """Has what lies between its exchanges run compiled, or as it is written.

        Args:
            call: of a compiled module that this one is a part of, by ``compiled_call``; None: it is
                part of none.
        """
        self._smp_lane = None
        if call is not None:
            kind: Any = type(self)
            lane = _lane_of(kind)(self)
            compile_like(call, lane)
            vars(self)["_smp_lane"] = lane  # none of its modules

    @run_as_written
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, also where what is around it is compiled. Collective: TP_GROUP.

        Raises:
            SMPError: the ranks call different modules, or this one in different ways.
        """
        group = self.tensor_group
        caches = caches_in((args, kwargs))
        # A call without tensors makes some of its parameters.
        makes_shapes = group.makes_shapes(*tensors_in((args, kwargs)) or self.parameters())
        if caches and not makes_shapes:
            if self._is_between_steps() and not torch.is_grad_enabled():
                return self._computed_whole(*args, **kwargs)
            self._leave_empty(caches)
        call = Call((args, kwargs))
        lanes, proofs = self._agreed(call, makes_shapes=makes_shapes)
        sums = bool(self._smp_found.plan.sums) or any(each.reductions for each in proofs)
        tensors_of = CallTensors(group, self.place, call, lanes, own_is_alike=sums)
        place = None if group.random is None else group.random.place()
        seeds: list[int | None] = [None] * group.size
        if self.training and not makes_shapes:
            seeds = seeds_of_calls(group, [each.draws for each in proofs])
        # A compiler calls other functions than code does, of which proofs know nothing.
        is_adapted = any(each.meetings or each.reductions for each in proofs)
        lane = None if makes_shapes or is_adapted else self._smp_lane
        compute = self.compute if lane is None else lane

        def computed(number: int, tensors: dict[str, torch.Tensor]) -> Call:
            lane_call = lanes[number].call
            given = [tensors[each] for each in lane_call.paths]
            own_args, own_kwargs = lane_call.filled(given)
            draws = self._draws(proofs[number], given)
            with seeded(seeds[number]), contextlib.ExitStack() as stack:
                if group.random is not None:
                    stack.enter_context(group.random.computing_for(number, place))
                stack.enter_context(computing(self, self._smp_gate, draws))
                return Call(compute(draws, own_args, own_kwargs))

        results = {} if sums else {group.rank: computed(group.rank, tensors_of.own)}
        if not group.is_prescaled:
            for number, tensors in enumerate(tensors_of.arrived()):
                if number not in results:
                    results[number] = computed(number, tensors)
        numbers = sorted(results)
        if makes_shapes:
            proofs = [self._smp_found.proof_like(results[group.rank], proofs[0])] * group.size
        return self._own([results[each] for each in numbers], [proofs[each] for each in numbers])

    def _draws(self, proof: Proof, given: Sequence[torch.Tensor]) -> SplitDraws | None:
        """Returns what adapts the functions of a call to slices; None if nothing has to."""
        group, adapting = self.tensor_group, None
        if proof.meetings or proof.reductions:
            add_up = functools.partial(self._smp_gate.add_up, group)
            adapting = proof.adapting(group.size, group.rank, examples_of(given), add_up)
        elif not self.training:
            return None
        return SplitDraws(proof.draws, group.size, group.rank, adapting)

    def compute(self, draws: SplitDraws | None, args: Any, kwargs: Any) -> Any:
        """Runs the forward of a call as it is written, on the own slices.

        Args:
            draws: what of it drops; None: nothing does.
            args: of the call, by position.
            kwargs: by name.
        """
        if draws is None:
            return super().forward(*args, **kwargs)
        # Here, since a compiler that found it entered would leave it entered around what it made.
        with draws:
            return super().forward(*args, **kwargs)

    def _is_between_steps(self) -> bool:
        random = self.tensor_group.random
        return random is None or not random.is_active

    def _computed_whole(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module with whole weights, since the cache of a rank is of its own call.

        Collective: TP_GROUP.

        Raises:
            SMPError: the ranks call different modules.
        """
        group, what = self.tensor_group, f"{self.place} with a cache"
        about = zlib.crc32(what.encode())
        if any(each[0] != about for each in group.call(what, [about])):
            group.refuse("must call the same distributed modules in the same way", what)
        gate = self._smp_gate
        gate.is_open = gate.is_whole = True
        try:
            with counted_whole(self, self._smp_found.plan, group.size):
                return super().forward(*args, **kwargs)
        finally:
            gate.is_open = gate.is_whole = False

    def _leave_empty(self, caches: Sequence[Any]) -> None:
        """Takes note of a cache that slices put nothing in: keys and values lie on several ranks.

        Raises:
            UnsupportedError: a later call is given the same one, to go on from what is not in it.
        """
        gate, cache = self._smp_gate, caches[-1]
        if gate.left_empty() is cache and not is_in_backward():
            raise UnsupportedError(
                f"{self.place} is split and keeps nothing in the {type(cache).__qualname__} that "
                f"it was given before: {WITHOUT_CACHE}."
            )
        gate.left_empty = weakref.ref(cache)

    # No part of a pass: in one of shapes alone other things are asked of tensors.
    @no_call
    def _agreed(self, call: Call, *, makes_shapes: bool) -> tuple[list[LaneCall], list[Proof]]:
        """Returns the calls of all ranks, and what is known of each. Collective: TP_GROUP."""
        changed = [] if makes_shapes else self._smp_seen.changed()
        lanes, has_any_changed = agreed(
            *(self.tensor_group, self.place, call),
            training=self.training,
            has_changed=bool(changed),
            makes_shapes=makes_shapes,
        )
        if makes_shapes:
            proof = self._smp_found.proof_for_shapes(
                self.place, self.tensor_group.size, lanes[0], training=self.training
            )
            return lanes, [proof] * len(lanes)
        return lanes, self._proofs(lanes, changed, has_any_changed=has_any_changed)

    def _own(self, results: list[Call], proofs: list[Proof]) -> Any:
        """Returns the result of the own call."""
        group = self.tensor_group
        own = 0 if group.is_prescaled else group.rank
        outputs = proofs[own].outputs
        if any(
            each.outputs != outputs or not _may_be(result.tensors, outputs)
            for each, result in zip(proofs, results, strict=True)
        ):
            raise SMPError(
                f"{self.place} returns other tensors than where its slices were proven, or others "
                "on each rank: exclude it by smp.set_tensor_parallelism(module, enabled=False)."
            )
        made = []
        for number, kind in enumerate(outputs):
            parts = [each.tensors[number] for each in results]
            if kind == SAME:
                made.append(parts[own])
            elif kind == SUM:
                made.append(summed(group, parts))
            elif kind == MEAN:
                made.append(averaged(group, parts))
            elif kind == COMMON:
                made.append(common(group, parts))
            else:
                made.append(joined(group, parts, int(kind)))
        return results[own].filled(made)

    def _proofs(
        self,
        lanes: Sequence[LaneCall],
        changed: Sequence[tuple[str, str]],
        *,
        has_any_changed: bool,
    ) -> list[Proof]:
        """Returns what is known of calls, which is proven if it is new, or if code has changed.

        Collective: TP_GROUP, where any of it is new.
        """
        found, group = self._smp_found, self.tensor_group
        if not has_any_changed and all(self._key_of(lane) in found.proofs for lane in lanes):
            return [found.proofs[self._key_of(lane)] for lane in lanes]
        former = found.proofs
        proofs: list[Proof] = []
        error = None
        try:
            if changed:
                found.follow(self.place, self, changed)
            found.proofs = {} if has_any_changed else found.proofs  # all ranks go on from the same
            for lane in lanes:
                proofs.append(found.proof_of(self.place, group.size, lane, training=self.training))
        except SMPError as failure:
            found.proofs, error = former, failure
        same_verdict(group, self.place, f"{[each.verdict for each in proofs]}", error)
        if changed:
            self._smp_seen.look_again()
        self._smp_seen.read(found.read)
        return proofs

    def _key_of(self, lane: LaneCall) -> Key:
        enabled = torch.is_grad_enabled()
        return key_of(lane.call, lane.forms, training=self.training, grad_enabled=enabled)


#: Attributes that a closed group has besides its own.
TAKEN = ("_slices", "place", "translations")


def close(module: nn.Module, found: Found, gate: Gate) -> None:
    """Makes a module whose linear maps were cut one that the ranks compute together."""
    kind: Any = type(module)
    module.__class__ = _closed(kind)
    vars(module).setdefault("_slices", {})
    vars(module).update(
        place=type(module).__name__,
        translations=None,
        _smp_found=found,
        _smp_gate=gate,
        _smp_lane=None,
    )
    seen = vars(module)["_smp_seen"] = SeenState(module)
    seen.read(found.read)


@functools.cache
def _closed(kind: Any) -> Any:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (ClosedGroup, kind), names)


@functools.cache
def _lane_of(kind: Any) -> type[Lane]:
    """Returns a class for each of modules: what compiles may count by class how often it does."""
    return type(f"{kind.__name__}Lane", (Lane,), {})


def _may_be(tensors: Sequence[torch.Tensor], outputs: Sequence[int | str]) -> bool:
    """Whether a call has given what was proven of it; other code may give other shapes."""
    return len(tensors) == len(outputs) and all(
        isinstance(kind, str) or kind < each.dim()
        for each, kind in zip(tensors, outputs, strict=True)
    )
