"""Activation checkpointing inside forward methods.

``torch.utils.checkpoint`` works as well; these are the documented forms.

Source: smd_model_parallel_pytorch_tensor_parallel.rst, Activation Checkpointing APIs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.activations import checkpointing
from smdistributed.modelparallel.torch.api.building import partition_of


def checkpoint(
    module: Callable[..., Any], *args: Any, preserve_rng_state: bool = True, **kwargs: Any
) -> Any:
    """Calls a module without keeping its inner activations; they are computed again in backward.

    A module that lies on several partitions is checkpointed part by part.

    Args:
        module: the module; a function works too.
        args: its arguments, in any structure.
        preserve_rng_state: repeat random numbers in the second computation. Those that modules
            draw inside a step are repeated always.
        kwargs: its keyword arguments.

    Returns:
        ``module(*args, **kwargs)``.

    Raises:
        TypeError: ``module`` cannot be called.

    Source: smd_model_parallel_pytorch_tensor_parallel.rst, Activation Checkpointing APIs.
    """
    return checkpointing.checkpoint(module, *args, preserve_rng_state=preserve_rng_state, **kwargs)


def checkpoint_sequential(
    sequential_module: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Calls the layers of an ``nn.Sequential``, which may lie on different partitions, so.

    Args:
        sequential_module: the layers.
        input: what the first layer gets.
        strategy: ``"each"``: every layer alone; ``"contiguous"``: neighbours on one partition
            together; ``"group_<x>"``: up to x neighbours on one partition together.
        preserve_rng_state: as for ``checkpoint``.
        pack_args_as_tuple: the layers take a tuple as their one argument; transformer layers of
            ``smp.nn`` do in any case.

    Returns:
        ``sequential_module(input)``.

    Raises:
        ValueError: no such strategy, or a tuple without ``pack_args_as_tuple``.
        TypeError: ``sequential_module`` is no ``nn.Sequential``.

    Source: smd_model_parallel_pytorch_tensor_parallel.rst, Activation Checkpointing APIs.
    """
    return checkpointing.checkpoint_sequential(
        sequential_module,
        input,
        strategy,
        preserve_rng_state,
        pack_args_as_tuple,
        partition_of,
    )
