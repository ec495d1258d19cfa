"""Looks for the groups among the modules of a model: plans are tried until one is proven."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from smdistributed.modelparallel.torch.state.seen import HOOKS_OF_CALLS, hooks_of_others
from smdistributed.modelparallel.torch.tensor_parallel.auto.attempts import (
    OtherKindError,
    plans_of,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.calls import Call
from smdistributed.modelparallel.torch.tensor_parallel.auto.capture import (
    guesses,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.group import TAKEN, Found, Key, key_of
from smdistributed.modelparallel.torch.tensor_parallel.auto.maps import (
    is_attention,
    is_map,
    sizes_of,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.outputs import SAME, RefutedError
from smdistributed.modelparallel.torch.tensor_parallel.auto.plan import Plan
from smdistributed.modelparallel.torch.tensor_parallel.auto.proof import prove
from smdistributed.modelparallel.torch.tensor_parallel.auto.proven import Proof
from smdistributed.modelparallel.torch.tensor_parallel.auto.template import Template
from smdistributed.modelparallel.torch.tensor_parallel.group import TensorGroup

#: Of what torch's attention is tried with.
_EXAMPLES, _LENGTH = 2, 6
#: A module becomes a group with those in it if these lack as much of what may be split.
_LEAST_MORE = 1 / 4


@dataclass
class AutoPlan:
    """How the modules of a model are split.

    Attributes:
        groups: the modules that are closed groups.
        kept_whole: modules that are not split alone either: the reason.
        reasons: why others are not: name of the module, reason.
    """

    groups: dict[nn.Module, Found] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    kept_whole: dict[nn.Module, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Proven:
    """A plan, and what was seen when it was proven, for one form of calls and for all."""

    plan: Plan
    proof: Proof
    proofs: dict[Key, Proof]

    @property
    def cost(self) -> tuple[int, int]:
        """How often ranks sum in the middle of a call, and how many sizes are cut there."""
        sizes = sum(cut.place < 0 for each in self.proof.meetings for cut in each.cuts)
        return len(self.plan.sums) + self.spans, sizes

    @property
    def spans(self) -> int:
        """How many reductions span the ranks."""
        return sum(each.spans for each in self.proof.reductions)

    def may_be_bettered_by(self, plan: Plan) -> bool:
        """Whether a plan may cost less: it sums less, or divides what counts the sizes."""
        sums, sizes = self.cost
        is_like = plan.columns == self.plan.columns
        fewest = len(plan.sums) + is_like * self.spans
        divides = is_like and sizes > 0 and plan.divided != self.plan.divided
        return fewest < sums or (fewest == sums and divides)


class Search:
    """One search; see ``plan_groups``.

    Args:
        group: the ranks.
        value_of: gives a buffer its values where they are delayed.
        names: of the modules that may be split.
        calls: the first call of each, as far as known.
        shared: modules that several others have.
        recorded: modules whose results others look at.
        others: calls of another form that are known.

    Attributes:
        plan: what was found.
    """

    def __init__(
        self,
        group: TensorGroup,
        value_of: Callable[[torch.Tensor], torch.Tensor],
        names: Mapping[nn.Module, str],
        calls: Mapping[nn.Module, Call],
        shared: Container[nn.Module] = (),
        recorded: Container[nn.Module] = (),
        others: Mapping[nn.Module, Call] | None = None,
    ) -> None:
        self._group = group
        self._value_of = value_of
        self._names = names
        self._calls = calls
        self._shared = shared
        self._recorded = recorded
        self._others = others or {}
        self._refused: dict[object, RefutedError] = {}
        self._told: dict[str, RefutedError] = {}
        self.plan = AutoPlan()

    def try_one(self, module: nn.Module, *, closes: bool) -> None:
        """Adds a module to the plan if it is a group.

        Args:
            module: that is in no group. Groups in it become a part of it, if it has more.
            closes: look for sums alone; else for results that leave split.
        """
        inner = set(module.modules())
        if any(module in set(each.modules()) for each in self.plan.groups):
            return
        within = [each for each in self.plan.groups if each in inner]
        if within and not (closes and _has_more_than_groups(module, within)):
            return
        if is_attention(module) and not closes:
            return
        try:
            found = self._found(module, closes=closes)
            split = {inner for each in within for inner in each.modules()}
            if not split.isdisjoint(_left_whole(module, found.plan)):
                raise RefutedError("it would leave maps whole that groups in it have split")
            self.plan.groups[module] = found
            for each in within:
                del self.plan.groups[each]
        except RefutedError as error:
            self._refused.setdefault((closes, _signature(module)), error)
            name = self._names[module]
            # What the attempt says that looked for its kind, and of several the first.
            known = self._told.get(name)
            if known is None or isinstance(known, OtherKindError):
                self._told[name] = error
                self.plan.reasons[name] = str(error)
        else:
            for each in inner:
                self.plan.reasons.pop(self._names.get(each, ""), None)

    def _kin_of(self, module: nn.Module) -> list[Found]:
        """Returns what was found of modules that may be alike."""
        return [
            found
            for other, found in self.plan.groups.items()
            if type(other) is type(module) and self._key(other) == self._key(module)
        ]

    def _key(self, module: nn.Module) -> object:
        """Returns what is known of how a module is called."""
        call = self._calls.get(module)
        return call and key_of(call, call.forms, training=module.training, grad_enabled=True)

    def _found(self, module: nn.Module, *, closes: bool) -> Found:
        kin = self._kin_of(module)
        refused = self._refused.get((closes, _signature(module)))
        if refused is not None and not kin:
            raise refused
        if "forward" in vars(module):
            raise RefutedError("its forward was replaced")
        if any(hasattr(module, name) for name in TAKEN):
            raise RefutedError(f"it has an attribute named {', '.join(TAKEN[:-1])} or {TAKEN[-1]}")
        if self._group.is_prescaled and _has_more_than_linears(module):
            raise RefutedError("prescaled_batch is on, and it has parameters of its own")
        try:
            template = Template(module, self._value_of)
        except Exception as error:  # copying runs the code of any class
            raise RefutedError(f"it cannot be copied: {error}") from error
        template.module.train(module.training)
        for known in kin:
            if shared := known.shared_with(template):
                return shared
        if refused is not None:
            raise refused
        inner = module.named_modules()
        template.shared = {name for name, each in inner if name and each in self._shared}
        reason: RefutedError | None = None
        found: Found | None = None
        for call in self._calls_of(module):
            try:
                proven = self._proven(
                    *(template, call),
                    closes=closes,
                    other=self._others.get(module),
                    is_model=self._names[module] == "",
                    is_watched=self._is_watched(module),
                )
            except RefutedError as error:
                reason = reason or error
                continue
            if not is_attention(module):
                return proven
            found = found or proven
            found.proofs.update(proven.proofs)
        if found is None:
            raise reason or RefutedError("nothing is known of how it is called")
        return found

    def _is_watched(self, module: nn.Module) -> bool:
        """Whether others look at what modules in a module give, or change that."""
        return any(
            each in self._recorded
            or any(map(hooks_of_others, (vars(each).get(name, {}) for name in HOOKS_OF_CALLS)))
            for each in module.modules()
            if each is not module
        )

    def _calls_of(self, module: nn.Module) -> Iterable[Call]:
        if module in self._calls:
            return [self._calls[module]]
        if isinstance(module, nn.MultiheadAttention):
            widths = module.embed_dim, module.kdim, module.vdim
            given = tuple(torch.empty(_EXAMPLES, _LENGTH, width) for width in widths)
            return [Call((given, {"need_weights": each})) for each in (False, True)]
        return guesses(module, next(filter(None, map(_width_of, module.modules()))))

    def _proven(
        self,
        template: Template,
        call: Call,
        *,
        other: Call | None,
        closes: bool,
        is_model: bool,
        is_watched: bool,
    ) -> Found:
        size, training = self._group.size, template.module.training

        def key(call: Call) -> Key:
            return key_of(call, call.forms, training=training, grad_enabled=True)

        if other is not None and key(other) == key(call):
            other = None
        reason = ""
        known: _Proven | None = None
        goes_on = not (is_model or _is_mostly_whole(template) or is_watched)
        for plan in plans_of(template, call, self._group.size, closes=closes, goes_on=goes_on):
            if known is not None and not known.may_be_bettered_by(plan):
                continue
            try:
                # As in training; calls without gradients are proven when they come.
                proofs = {
                    key(each): prove(template, plan, size, each, each.forms, grad_enabled=True)
                    for each in (call, other)
                    if each is not None
                }
            except RefutedError as error:
                reason = reason or str(error)
                continue
            proof = proofs[key(call)]
            if self._group.is_prescaled and SAME in proof.outputs:
                raise RefutedError("prescaled_batch is on, and it returns what it does not split")
            if self._group.is_prescaled and (plan.sums or proof.reductions):
                raise RefutedError("prescaled_batch is on, and it goes on with sums")
            found = _Proven(plan, proof, proofs)
            known = found if known is None else min(known, found, key=lambda each: each.cost)
            if known.cost == (0, 0):
                break
        if known is None:
            raise RefutedError(reason)
        chosen = Found(known.plan, template, known.proofs)
        chosen.kin.append(chosen)
        return chosen


def _left_whole(module: nn.Module, plan: Plan) -> set[nn.Module]:
    """Returns the linear maps in a module that a plan does not split."""
    split = {*plan.columns, *plan.rows}
    return {each for name, each in module.named_modules() if is_map(each) and name not in split}


def _width_of(module: nn.Module) -> int | None:
    """Returns the width that a linear map or an attention takes; None for any other module."""
    if isinstance(module, nn.MultiheadAttention):
        return int(module.embed_dim)
    return sizes_of(module)[0] if is_map(module) else None


def _has_more_than_groups(module: nn.Module, groups: Iterable[nn.Module]) -> bool:
    """Whether much of what may be split in a module is in none of some groups in it."""
    inside = {inner for each in groups for inner in each.modules()}
    every = {each for each in module.modules() if is_map(each) or is_attention(each)}
    return _LEAST_MORE * _size_of(every) <= _size_of(every - inside)


def _is_mostly_whole(template: Template) -> bool:
    """Whether a module has larger tables and kernels than linear maps.

    What is not split is computed by every rank, for the calls of all.
    """
    split = _size_of({*template.linears.values(), *template.attentions.values()})
    every = sum(each.numel() for each in template.module.parameters() if each.dim() > 1)
    return every > 2 * split


def _size_of(modules: Iterable[nn.Module]) -> int:
    """Returns how many numbers the parameters of modules have that are no vectors."""
    parameters = {each for module in modules for each in module.parameters() if each.dim() > 1}
    return sum(each.numel() for each in parameters)


def _has_more_than_linears(module: nn.Module) -> bool:
    if is_attention(module):
        return False
    return any(
        next(each.parameters(recurse=False), None) is not None and not is_map(each)
        for each in module.modules()
    )


def _signature(module: nn.Module) -> object:
    shapes = tuple((name, tuple(each.shape)) for name, each in module.named_parameters())
    return type(module), shapes, module.training
