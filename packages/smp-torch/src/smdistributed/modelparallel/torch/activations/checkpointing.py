"""Activation checkpointing in the forms of the documented API.

All of them come down to ``torch.utils.checkpoint.checkpoint``, which a script can also call itself,
with functions as well as modules. A checkpointed call that lies on several partitions is
checkpointed part by part.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils import checkpoint as native

from smdistributed.modelparallel.torch.activations.objects import finding_objects_again

#: Gives the partition of a module; None while it is not decided.
PartitionOf = Callable[[nn.Module], int | None]

_GROUP = re.compile(r"group_([1-9][0-9]*)")


def checkpoint(
    function: Callable[..., Any], *args: Any, preserve_rng_state: bool = True, **kwargs: Any
) -> Any:
    """Calls ``function`` without keeping its activations; see ``patches.checkpoint``."""
    if not callable(function):
        raise TypeError(
            f"checkpoint takes a module or a function; received {type(function).__name__}."
        )
    function, args, kwargs = finding_objects_again(function, args, kwargs)
    return native.checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs
    )


def checkpoint_sequential(
    layers: nn.Sequential,
    input: Any,
    strategy: str,
    preserve_rng_state: bool,
    pack_args_as_tuple: bool,
    partition_of: PartitionOf,
) -> Any:
    """Calls groups of layers without keeping their activations; see ``patches.checkpoint``.

    Args:
        partition_of: tells which layers are neighbours on one partition.
    """
    check_strategy(strategy)
    if not isinstance(layers, nn.Sequential):
        raise TypeError(
            "checkpoint_sequential takes a torch.nn.Sequential; received "
            f"{type(layers).__name__}. Use checkpoint for another module."
        )
    takes_tuple = all(getattr(layer, "takes_tuple", False) for layer in layers)
    if isinstance(input, tuple) and not (pack_args_as_tuple or takes_tuple):
        raise ValueError(
            "the layers of a torch.nn.Sequential take one argument; received a tuple of "
            f"{len(input)}: set pack_args_as_tuple=True to hand it over as one."
        )
    in_turn = getattr(layers, "in_turn", _InTurn)
    for group in _groups(list(layers), strategy, partition_of):
        call = in_turn(group)
        if isinstance(input, tuple):
            # One by one, since torch saves as tensors what is no tuple.
            input = checkpoint(_OfParts(call), *input, preserve_rng_state=preserve_rng_state)
        else:
            input = checkpoint(call, input, preserve_rng_state=preserve_rng_state)
    return input


def mark(
    module: nn.Module,
    preserve_rng_state: bool,
    pack_args_as_tuple: bool,
    strategy: str,
    partition_of: PartitionOf,
) -> None:
    """Has a module checkpoint itself in every call; see ``api.set_activation_checkpointing``."""
    check_strategy(strategy)
    if isinstance(module, nn.Sequential):
        module.forward = _SequentialForward(  # type: ignore[method-assign]
            module, strategy, preserve_rng_state, pack_args_as_tuple, partition_of
        )
    elif isinstance(module, nn.ModuleList):
        for child in module:
            mark(child, preserve_rng_state, False, "each", partition_of)
    elif isinstance(module, nn.Module):
        module.forward = _Forward(_plain_forward(module), preserve_rng_state)
    else:
        raise TypeError(
            "set_activation_checkpointing takes a torch.nn.Module; received "
            f"{type(module).__name__}."
        )


def is_marked(module: nn.Module) -> bool:
    """Whether a module checkpoints itself as a whole in every call."""
    return isinstance(vars(module).get("forward"), _Forward)


def check_strategy(strategy: str) -> None:
    """Raises ValueError if there is no such strategy."""
    if strategy not in ("each", "contiguous") and not _GROUP.fullmatch(strategy):
        raise ValueError(
            'strategy must be "each", "contiguous" or "group_<x>" with a number x of at least 1; '
            f"received {strategy!r}."
        )


def _groups(
    layers: Sequence[nn.Module], strategy: str, partition_of: PartitionOf
) -> Iterator[Sequence[nn.Module]]:
    """Yields runs of layers of one partition, of at most the strategy's size."""
    size = 1 if strategy == "each" else len(layers)
    if group := _GROUP.fullmatch(strategy):
        size = int(group[1])
    for _, neighbours in itertools.groupby(layers, key=partition_of):
        run = list(neighbours)
        yield from (run[start : start + size] for start in range(0, len(run), size))


@dataclass(frozen=True)
class _InTurn:
    """Calls layers one after another."""

    layers: Sequence[nn.Module]

    def __call__(self, input: Any) -> Any:
        for layer in self.layers:
            input = layer(input)
        return input


@dataclass(frozen=True)
class _OfParts:
    """Calls what takes a tuple with the parts of one."""

    call: Callable[[Any], Any]

    def __call__(self, *parts: Any) -> Any:
        return self.call(parts)


@dataclass(frozen=True)
class _Forward:
    """Takes the place of a module's forward."""

    forward: Callable[..., Any]
    preserve_rng_state: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.forward, *args, preserve_rng_state=self.preserve_rng_state, **kwargs)


@dataclass(frozen=True)
class _SequentialForward:
    """Takes the place of a sequential module's forward."""

    module: nn.Sequential
    strategy: str
    preserve_rng_state: bool
    pack_args_as_tuple: bool
    partition_of: PartitionOf

    def __call__(self, input: Any) -> Any:
        return checkpoint_sequential(
            self.module,
            input,
            self.strategy,
            self.preserve_rng_state,
            self.pack_args_as_tuple,
            self.partition_of,
        )


def _plain_forward(module: nn.Module) -> Callable[..., Any]:
    """Returns the forward of a module as it was before it was marked."""
    forward = module.forward
    return forward.forward if isinstance(forward, _Forward) else forward
