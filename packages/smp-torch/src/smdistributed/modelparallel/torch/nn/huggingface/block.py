"""Hooks that have a block of a Transformers model distributed, for models that stay as they are.

Source: published example scripts.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.backward import is_in_backward
from smdistributed.modelparallel.torch.nn.huggingface.family import (
    StaysWholeError,
    additive_mask,
    refuse_given,
)
from smdistributed.modelparallel.torch.nn.huggingface.family_map import FamilyMap
from smdistributed.modelparallel.torch.tensor_parallel.registry import Hook, Registration


@dataclasses.dataclass(frozen=True)
class Block:
    """A kind of block, made with a configuration and called with hidden states and a mask.

    Attributes:
        module, name: where Transformers has its class.
        map: of names and shapes.
        arguments: of ``DistributedTransformerLayer``, from a configuration.
        cache: what its forward calls the cache, in all versions.
    """

    module: str
    name: str
    map: FamilyMap
    arguments: Callable[[Any], dict[str, Any]]
    cache: tuple[str, ...] = ("cache", "past_key_values", "layer_past")

    def hooks(self) -> tuple[Hook, Hook, Hook]:
        """Returns ``init_hook``, ``forward_hook`` and ``return_hook``.

        They are for ``smp.tp_register_with_module`` with ``smp.nn.DistributedTransformerLayer``;
        the layers take over the weights of the blocks.
        """
        kind = getattr(importlib.import_module(self.module), self.name)
        forward = inspect.signature(kind.forward)
        returns_tensor = forward.return_annotation in (torch.Tensor, "torch.Tensor")
        return (
            InitHook(self, _without_self(inspect.signature(kind.__init__))),
            ForwardHook(self, _without_self(forward)),
            _first if returns_tensor else _first_alone,
        )

    def inputs(self, signature: inspect.Signature, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns the inputs of the layer, and the cache that the block was called with."""
        bound = signature.bind(*args, **kwargs).arguments
        given = {**bound, **bound.pop("kwargs", {})}
        for name in ("encoder_hidden_states", "head_mask", "output_attentions"):
            refuse_given("a distributed block", name, given.get(name) or None)
        hidden, mask = given["hidden_states"], given.get("attention_mask")
        caches = (given[name] for name in self.cache if given.get(name) is not None)
        return (hidden, additive_mask(mask, hidden.dtype)), next(caches, None)


@dataclasses.dataclass(frozen=True)
class InitHook:
    """From the arguments of a block's constructor to those of the layer."""

    block: Block
    __signature__: inspect.Signature

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[tuple[()], dict[str, Any]]:
        """Returns the arguments."""
        given = self.__signature__.bind(*args, **kwargs).arguments
        return (), {**self.block.arguments(given["config"]), "layer_idx": given.get("layer_idx")}

    def completed(self, registration: Registration) -> Registration:
        """Returns a registration by these hooks that keeps weights, and knows what to refuse."""

        def refusal(module: nn.Module) -> str | None:
            try:
                registration.arguments(module)
            except StaysWholeError as reason:
                return str(reason)
            return None

        return dataclasses.replace(
            registration,
            refusal=refusal,
            translate=lambda module: self.block.map.to_ours,
            translate_back=lambda module: self.block.map.to_theirs,
            wrap=lambda made, module: functools.partial(_call, made, registration, Met()),
        )


@dataclasses.dataclass(frozen=True)
class ForwardHook:
    """From the arguments of a block's forward to those of the layer."""

    block: Block
    __signature__: inspect.Signature

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any], dict[str, Any]]:
        """Returns the arguments."""
        inputs, _ = self.block.inputs(self.__signature__, args, kwargs)
        return (inputs,), {}


class Met:
    """The caches that a layer was called with, into which it puts nothing."""

    def __init__(self) -> None:
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()

    def check(self, cache: Any) -> None:
        """Raises where a cache would be read.

        Raises:
            UnsupportedError: it comes again, or has something in it.
        """
        if is_in_backward():
            return  # a checkpointed call is made once more
        if cache in self._caches or cache.get_seq_length():
            raise UnsupportedError(
                "a distributed block keeps no keys and values in a cache, and was called with one "
                "that should have some, as generate() does: pass use_cache=False."
            )
        self._caches.add(cache)


def _call(made: Any, registration: Registration, met: Met, *args: Any, **kwargs: Any) -> Any:
    forward, returned = registration.forward_hook, registration.return_hook
    assert isinstance(forward, ForwardHook)
    inputs, cache = forward.block.inputs(forward.__signature__, args, kwargs)
    if cache is not None:
        met.check(cache)
    result = type(made).forward(made, inputs)
    return result if returned is None else returned(result)


def _first(result: tuple[Any, ...]) -> Any:
    return result[0]


def _first_alone(result: tuple[Any, ...]) -> tuple[Any]:
    return (result[0],)


def _without_self(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(parameters=list(signature.parameters.values())[1:])
