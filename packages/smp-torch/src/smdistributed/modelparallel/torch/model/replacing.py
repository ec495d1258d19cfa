"""What ``DistributedModel`` makes of the modules that the user marked for tensor parallelism."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.nn.built_in import built_in
from smdistributed.modelparallel.torch.nn.original import READING
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.tensor_parallel.module import name_places
from smdistributed.modelparallel.torch.tensor_parallel.registry import registration_of
from smdistributed.modelparallel.torch.tensor_parallel.replacement import (
    replace_marked,
    unify_drawn,
)

logger = logging.getLogger(__name__)


def sliced_modules(runtime: TorchRuntime, module: nn.Module) -> list[nn.Module]:
    """Returns the outermost modules that several tensor-parallel ranks would share, about.

    Which modules ``auto=True`` can split a proof says, with the ranks; here all marked ones count.
    """
    mark = runtime.tensor_marks.noted(module)
    config = mark.config if mark is not None and mark.enabled else None
    is_shared = registration_of(module) is not None or built_in(module) is not None
    if config is not None and (is_shared or config.get("auto")):
        return [module]
    return [each for child in module.children() for each in sliced_modules(runtime, child)]


def with_distributed_modules(runtime: TorchRuntime, module: nn.Module) -> nn.Module:
    """Returns a model with distributed modules in the places of marked ones.

    One with lazy modules stays as it is: where it can be split goes by sizes, which it has when
    training has begun.
    """
    if any(map(is_lazy, module.parameters())):
        if runtime.tensor_group.size > 1:
            logger.warning(
                "lazy modules have no sizes before they are called: each tensor-parallel rank has "
                "all of the model. Run it once on an example before smp.DistributedModel to split "
                "it."
            )
        return module
    group, delayed = runtime.tensor_group, runtime.delayed
    spreads_experts = runtime.config.expert_parallel_degree > 1
    if group.size == 1 and not runtime.tensor_marks.has_any(module):
        return module
    before = dict(module.named_parameters())

    def everyones(mine: Any) -> list[Any]:
        return runtime.communicator.allgather(mine, CommGroup.WORLD)

    replaced = replace_marked(
        module,
        runtime.tensor_marks,
        built_in,
        group,
        delayed,
        everyones,
        spreads_experts=spreads_experts,
    )
    kept = set(replaced.parameters())
    for name, parameter in before.items():
        if parameter not in kept:
            runtime.replaced_parameters[parameter] = name
    unify_drawn(replaced, group, delayed)
    name_places(replaced)
    _tell_names(set(before), {name for name, _ in replaced.named_parameters()})
    if replaced is not module:
        refuse_uses(module, replaced)
    return replaced


def _tell_names(before: set[str], now: set[str]) -> None:
    """Warns if scripts that choose parameters by names would choose others than before."""
    gone, new = sorted(before - now), sorted(now - before)
    if gone and new:
        logger.warning(
            "parameters of distributed modules have names of their own: %s and %s others are gone, "
            "and there are %s and %s others. A script that chooses parameters by parts of names, "
            'for weight decay ("LayerNorm.weight") or to freeze them, is to look for these.',
            *(gone[0], len(gone) - 1, new[0], len(new) - 1),
        )


def refuse_uses(module: nn.Module, replaced: nn.Module) -> None:
    """Has calls and the state of a model raise whose place a distributed module has taken.

    It keeps the values of then. Code outside may still have it, and would go by these. What makes
    a model of the current values to run on, as ``generate``, is as well called there.

    Args:
        module: the model.
        replaced: what has taken its place.
    """

    def refuse(*_: Any) -> None:
        raise UnsupportedError(
            f"this {type(module).__name__} is not what trains: smp.DistributedModel has put a "
            "distributed module in its place, which tensor parallelism splits. Use the "
            "DistributedModel, which has its methods, or what its get_module() returns."
        )

    if getattr(replaced, "stands_for", None) is not None:
        for name in filter(functools.partial(hasattr, module), READING):
            vars(module)[name] = functools.partial(_call, weakref.ref(replaced), name, refuse)
    module.register_forward_pre_hook(refuse)
    module.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]


def _call(
    of: weakref.ref[nn.Module], name: str, refuse: Callable[[], None], *args: Any, **kwargs: Any
) -> Any:
    """Calls a method of what has taken the place of a model, if that is still there."""
    replaced = of()
    if replaced is None:
        refuse()
    return getattr(replaced, name)(*args, **kwargs)
