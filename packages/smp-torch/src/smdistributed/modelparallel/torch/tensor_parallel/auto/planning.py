"""Which modules of a model are split as they are, and how: ``tensor_parallelism(auto=True)``.

A *closed group* is a module whose linear maps that read its arguments can be split along their
outputs, over channels or heads, and those that read what they made along their inputs. It is found
by following tensors through one call, its attributes that count heads are tried divided, outputs
in which query, key and value are fused are tried in a share of each, and every plan is proven
before it is used.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.compat.transformers_records import recorded_in
from smdistributed.modelparallel.torch.state.seen import HOOKS_OF_CALLS, hooks_of_others
from smdistributed.modelparallel.torch.tensor_parallel.auto.attempts import (
    OtherKindError,
    plans_of,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.calls import Call
from smdistributed.modelparallel.torch.tensor_parallel.auto.capture import (
    Trial,
    calls_within,
    chosen_by_data,
    guesses,
    inputs_of_transformers,
    with_padding,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.group import TAKEN, Found, Key, key_of
from smdistributed.modelparallel.torch.tensor_parallel.auto.maps import (
    is_attention,
    is_map,
    is_transposed,
    number_of_maps,
    sizes_of,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.outputs import SAME, RefutedError
from smdistributed.modelparallel.torch.tensor_parallel.auto.plan import Plan
from smdistributed.modelparallel.torch.tensor_parallel.auto.proof import Proof, prove
from smdistributed.modelparallel.torch.tensor_parallel.auto.template import Template
from smdistributed.modelparallel.torch.tensor_parallel.auto.weight_readers import (
    read_of_others,
)
from smdistributed.modelparallel.torch.tensor_parallel.group import TensorGroup

logger = logging.getLogger(__name__)

#: Of what torch's attention is tried with.
_EXAMPLES, _LENGTH = 2, 6
#: A module becomes a group with those in it if these lack as much of what may be split.
_LEAST_MORE = 1 / 4
#: Blocks of more linear maps than this are not one group.
_MOST_LINEARS = 12


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


def plan_groups(
    model: nn.Module,
    candidates: dict[nn.Module, str],
    inputs: Any,
    group: TensorGroup,
    value_of: Callable[[torch.Tensor], torch.Tensor],
    is_free: Callable[[nn.Module], bool],
    *,
    has_values: bool,
) -> AutoPlan:
    """Finds the closed groups of a model.

    Args:
        model: the user's.
        candidates: the modules of it that may be split, and their names.
        inputs: what the model can be called with; None if that is not known.
        group: the ranks.
        value_of: gives a buffer its values where they are delayed.
        is_free: tells whether a module may be part of a group.
        has_values: whether its parameters have values.
    """
    # Of modules around the same linear maps the innermost.
    ordered = list(reversed(candidates))
    ordered.sort(key=number_of_maps)
    ordered = [each for each in ordered if 2 <= number_of_maps(each) <= _MOST_LINEARS]
    ordered = [each for each in ordered if all(map(is_free, each.modules()))]
    given = inputs_of_transformers(model) if inputs is None else inputs
    trial = None
    # By name, as a run may not come, and sees linear maps alone.
    kept_whole = _read_by_name(model)
    if given is not None:
        trial = calls_within(model, ordered, given, has_values=has_values)
    failure = None if trial is None else trial.failure
    if failure is not None and inputs is not None:
        logger.warning(
            "the model cannot be called with sample_inputs, so how its modules are called is "
            "guessed: %s: %s",
            type(failure).__name__,
            failure,
        )
    elif trial is not None and failure is None:
        ordered = [each for each in ordered if each in trial.calls]
        kept_whole = {each: why for each, why in kept_whole.items() if not is_map(each)}
        kept_whole |= _kept_whole(model, trial)
    ordered = [each for each in ordered if kept_whole.keys().isdisjoint(each.modules())]
    calls = {} if trial is None else trial.calls
    recorded = set(recorded_in(model))
    # Without inputs of the script a model may be called in either form.
    padded = {} if inputs is not None or not calls else with_padding(model, given or {})
    others = {}
    if padded:
        others = calls_within(model, ordered, padded, has_values=has_values).calls
    search = _Search(group, value_of, candidates, calls, _shared_modules(model), recorded, others)
    # First what leaves as a sum; then what leaves split, if nothing around it or in it is.
    for closes in (True, False):
        for module in ordered:
            search.try_one(module, closes=closes)
    plan = search.plan
    plan.kept_whole = kept_whole
    inside = {inner for each in plan.groups for inner in each.modules()}
    for module, name in candidates.items():
        if module not in inside and (is_attention(module) or is_transposed(module)):
            alone_reason = f"a {type(module).__name__} is split as a group or within one"
            plan.reasons.setdefault(name, kept_whole.get(module, alone_reason))
    for name, reason in plan.reasons.items():
        logger.info("%s is no group for tensor parallelism: %s", name or "the model", reason)
    return plan


def check_agreed(
    plan: AutoPlan, names: Mapping[nn.Module, str], everyones: Callable[[Any], list[Any]]
) -> None:
    """Checks that all ranks of the job have found the same. Collective: WORLD.

    Args:
        plan: of this rank.
        names: of the modules in it.
        everyones: gives what each rank has found.

    Raises:
        SMPError: they have not.
    """
    mine = {
        names[module]: repr((found.plan, [each.verdict for each in found.proofs.values()]))
        for module, found in plan.groups.items()
    }
    first, *others = everyones((mine, plan.reasons))
    for rank, each in enumerate(others, 1):
        for name in sorted({*first[0], *each[0]}):
            if first[0].get(name) != each[0].get(name):
                said = [
                    one[0].get(name) or f"no group: {one[1].get(name, 'it has no such module')}"
                    for one in (first, each)
                ]
                raise SMPError(
                    f"the ranks of a job must split {name or 'the model'} in the same way, as "
                    f"auto=True finds it: build the same model on each. Rank 0 has found "
                    f"{said[0]}; rank {rank}: {said[1]}."
                )


def _shared_modules(model: nn.Module) -> set[nn.Module]:
    """Returns the modules that several others have."""
    parents = collections.Counter(each for module in model.modules() for each in module.children())
    return {module for module, number in parents.items() if number > 1}


def _read_by_name(model: nn.Module) -> dict[nn.Module, str]:
    """Returns the modules whose parameters code of others names, and why they stay whole."""
    return {
        read: f"code of {type(module).__name__} reads its {name}"
        for module in model.modules()
        for read, name in read_of_others(module)
    }


def _kept_whole(model: nn.Module, trial: Trial) -> dict[nn.Module, str]:
    """Returns the linear maps that no rank may have a slice of, and why."""
    chosen = chosen_by_data(model, trial.called)
    found: dict[nn.Module, str] = {}
    for each in model.modules():
        if not is_map(each) and not is_attention(each):
            continue
        if each in chosen:
            found[each] = "of modules like it a trial run has called some only, as data may say"
        elif each not in trial.called:
            found[each] = "a trial run has not called it, so that code may read its weight"
        elif each in trial.transformed:
            found[each] = "a transform of torch.func calls it, where ranks cannot meet"
        elif each in trial.read:
            found[each] = "code reads its weight by itself"
    return found


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


class _Search:
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
            self.plan.groups[module] = self._found(module, closes=closes)
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
