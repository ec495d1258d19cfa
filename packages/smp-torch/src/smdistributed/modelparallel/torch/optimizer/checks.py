"""Which optimizers may update parameters of which a rank has a part, or the gradients of some.

It matters not whether a ``DistributedOptimizer`` wraps one: each of torch is checked before its
first step, where it holds parameters of a model.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.torch.absence.tensors import hide_gradients, is_vacant
from smdistributed.modelparallel.torch.optimizer.early_state import cut_early_state
from smdistributed.modelparallel.torch.optimizer.number_by_number import (
    check_number_by_number,
    is_number_by_number,
)
from smdistributed.modelparallel.torch.optimizer.tensor_by_tensor import (
    check_tensor_by_tensor,
    depends_on_others,
)
from smdistributed.modelparallel.torch.optimizer.whole_update import bound_gradients
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime

logger = logging.getLogger(__name__)


def has_masters(runtime: TorchRuntime) -> bool:
    """Whether optimizers update something in place of the parameters of models."""
    return _keeps_more(runtime) or runtime.sharding_groups is not None


def updates_masters(runtime: TorchRuntime, optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer updates something in place of parameters.

    Of parameters in shards that is the blocks, unless it looks at whole ones.
    """
    return has_masters(runtime) and (
        not _shards_may_be_whole(runtime) or is_number_by_number(optimizer)
    )


def _keeps_more(runtime: TorchRuntime) -> bool:
    """Whether there is more to an update than what is here of parameters."""
    config = runtime.config
    return config.fp16 or config.bf16 or config.shard_optimizer_state


def _shards_may_be_whole(runtime: TorchRuntime) -> bool:
    """Whether parameters are in shards that stand for whole ones between steps."""
    is_alone = runtime.topology.mp_size == 1 and not _keeps_more(runtime)
    return runtime.sharding_groups is not None and is_alone


def check_update(runtime: TorchRuntime, optimizer: torch.optim.Optimizer) -> None:
    """Raises if an update needs more than a rank has.

    Args:
        runtime: the state of the library in this process.
        optimizer: of the script.

    Raises:
        UnsupportedError: it needs the gradients of others than the parameter, or all of it.
    """
    if has_masters(runtime) and not updates_masters(runtime, optimizer):
        return
    if isinstance(optimizer, torch.optim.LBFGS) and has_masters(runtime):
        raise UnsupportedError(
            "LBFGS searches along the gradient of the whole model, of which a rank has a part; use "
            "it without fp16, bf16, shard_optimizer_state, and sharded data parallelism beside "
            "pipelines or tensor parallelism."
        )
    if runtime.sharding_groups is not None:
        why = "with sharded_data_parallel_degree above 1 ranks update a block of each parameter"
        check_number_by_number(optimizer, why)
    elif has_masters(runtime) and (
        runtime.config.shard_optimizer_state or runtime.topology.pp_size > 1
    ):
        cause = "shard_optimizer_state" if runtime.config.shard_optimizer_state else "a pipeline"
        why = f"with {cause} a rank has the gradients of some parameters only"
        check_tensor_by_tensor(optimizer, why, has_whole_norms=False)


def needs_wholes(
    runtime: TorchRuntime, optimizer: torch.optim.Optimizer, *, has_slices: bool
) -> bool:
    """Whether an update looks at more than a rank has: at whole tensors, or at other gradients.

    See ``whole_update`` for how it is made.

    Args:
        runtime: the state of the library in this process.
        optimizer: of the script.
        has_slices: whether it holds slices of tensor parallelism.
    """
    if _shards_may_be_whole(runtime):
        found = not is_number_by_number(optimizer)
    elif has_masters(runtime) or getattr(optimizer, "takes_norms_of_tensors", False):
        return False
    else:
        why = "with a pipeline a rank has the gradients of some parameters only"
        found = has_slices and not is_number_by_number(optimizer)
        if not found and runtime.topology.pp_size > 1:
            found = depends_on_others(optimizer, why, has_whole_norms=True)
    if found and runtime.rank == 0:
        logger.warning(
            "%s looks at whole parameters, or at the gradients of others: for its updates ranks "
            "bring together what they have of parameters and gradients, which takes time, and "
            "memory for all of them where there is no pipeline; what it keeps of a parameter each "
            "rank keeps whole. Those that work number by number (AdamW, SGD) need nothing of it; "
            "updates_number_by_number = True of a class says that it does.",
            type(optimizer).__name__,
        )
    return found


def check_replaced(runtime: TorchRuntime, parameters: Iterable[torch.Tensor]) -> None:
    """Raises if an optimizer was made of a model before tensor parallelism split that.

    Args:
        runtime: the state of the library in this process.
        parameters: that it holds.

    Raises:
        SMPError: it was.
    """
    replaced = runtime.replaced_parameters
    names = [replaced[each] for each in parameters if each in replaced] if replaced else []
    if names:
        raise SMPError(
            f"the optimizer holds {len(names)} parameters that tensor parallelism has replaced "
            f"({names[0]} the first), and would not train what stands in their places: make it "
            "after smp.DistributedModel, from model.parameters()."
        )


def check_slices(optimizer: torch.optim.Optimizer) -> None:
    """Raises if an optimizer, which holds slices, may look at whole parameters.

    Raises:
        UnsupportedError: it may.
    """
    check_number_by_number(
        optimizer,
        "with tensor_parallel_degree above 1 ranks update a slice of each parameter that is split",
    )


def count_update(optimizer: torch.optim.Optimizer) -> None:
    """Has versions say that parameters have changed: kernels of many tensors leave them alone."""
    held = (each for group in optimizer.param_groups for each in group["params"])
    torch.autograd.graph.increment_version(
        [each for each in held if not is_vacant(each) and not each.is_inference()]
    )


@contextlib.contextmanager
def optimizers_checked(runtime: TorchRuntime) -> Iterator[None]:
    """Inside, optimizers that nothing wraps are checked before their first step, on every rank.

    The steps of those that train a model are counted, and have slices as they are.
    """
    #: How many groups each had when it was checked, whether it trains a model, and on wholes.
    known: weakref.WeakKeyDictionary[Any, tuple[int, bool, bool]] = weakref.WeakKeyDictionary()

    #: The models whose slices rest again after the step in progress.
    awake: list[Any] = []

    def is_wrapped(optimizer: Any) -> bool:
        return any(each.optimizer is optimizer for each in runtime.live_optimizers())

    def check(optimizer: Any, args: Any, kwargs: Any) -> None:
        groups = len(optimizer.param_groups)
        if known.get(optimizer, (-1,))[0] != groups:
            wrapped = runtime.live_optimizers()
            # What an optimizer steps inside of another one's step is part of that.
            if not is_wrapped(optimizer) and any(each.is_updating for each in wrapped):
                return
            wholes = any(each.optimizer is optimizer and each.needs_wholes for each in wrapped)
            if not is_wrapped(optimizer):
                wholes = _check_unwrapped(runtime, optimizer)
            trains = is_wrapped(optimizer) or bool(runtime.models_trained_by(optimizer))
            known[optimizer] = groups, trains, wholes
        runtime.num_updates += known[optimizer][1]
        if known[optimizer][2]:
            hide_gradients(False)
        if known[optimizer][1] and not is_wrapped(optimizer):
            bound_gradients(runtime, optimizer)
        if known[optimizer][2]:
            return
        # The Python of a closure is the script's, which sees whole tensors.
        has_closure = any(map(callable, (*args[1:], *kwargs.values())))
        if known[optimizer][1] and runtime.topology.mp_size > 1 and not has_closure:
            cut_early_state(optimizer)
            trained = runtime.models_trained_by(optimizer)
            awake.extend(model for model in trained if model.wake())

    def rest(optimizer: Any, *_: object) -> None:
        while awake:
            awake.pop().rest()
        if runtime.topology.pp_size > 1 and known.get(optimizer, (0, False, False))[1]:
            count_update(optimizer)

    handles = [
        register_optimizer_step_pre_hook(check),
        register_optimizer_step_post_hook(rest),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_unwrapped(runtime: TorchRuntime, optimizer: torch.optim.Optimizer) -> bool:
    """Checks one; returns whether it updates on wholes."""
    held = [each for group in optimizer.param_groups for each in group["params"]]
    check_replaced(runtime, held)
    models = runtime.models_trained_by(optimizer)
    if not models:
        return False
    config = runtime.config
    is_alone = runtime.topology.dp_cp_size == 1 and not (config.fp16 or config.bf16)
    if has_masters(runtime) and not is_alone and not _shards_may_be_whole(runtime):
        raise SMPError(
            f"{type(optimizer).__name__} holds parameters of a DistributedModel, and with fp16, "
            "bf16, shard_optimizer_state and sharded data parallelism the ranks update them "
            "together, by way of masters, which it knows nothing of: give it to "
            "smp.DistributedOptimizer, and call the step of what that returns."
        )
    check_update(runtime, optimizer)
    slices = {id(each) for model in models for each in model.split_parameters()}
    has_slices = not slices.isdisjoint(map(id, held))
    if has_slices and has_masters(runtime):
        check_slices(optimizer)
    return needs_wholes(runtime, optimizer, has_slices=has_slices)
