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
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.compat.transformers_records import recorded_in
from smdistributed.modelparallel.torch.tensor_parallel.auto.capture import (
    Trial,
    calls_within,
    chosen_by_data,
    inputs_of_transformers,
    with_padding,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.maps import (
    is_attention,
    is_map,
    is_transposed,
    number_of_maps,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.search import AutoPlan, Search
from smdistributed.modelparallel.torch.tensor_parallel.auto.weight_readers import (
    read_of_others,
)
from smdistributed.modelparallel.torch.tensor_parallel.group import TensorGroup

logger = logging.getLogger(__name__)

#: Blocks of more linear maps than this are not one group.
_MOST_LINEARS = 12


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
    search = Search(group, value_of, candidates, calls, _shared_modules(model), recorded, others)
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
