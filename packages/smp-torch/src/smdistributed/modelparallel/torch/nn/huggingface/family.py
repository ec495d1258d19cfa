"""How a class of Transformers becomes a distributed module, and how that is called like it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.nn.huggingface.family_map import FamilyMap, State
from smdistributed.modelparallel.torch.nn.lm_head import DistributedTransformerLMHead
from smdistributed.modelparallel.torch.nn.transformer import DistributedTransformer
from smdistributed.modelparallel.torch.tensor_parallel.registry import Registration

#: Words of Transformers' configurations for functions that the library has.
ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
}
#: What may be passed, and has no effect where nothing is cached or returned as a tuple.
_WITHOUT_EFFECT = ("use_cache", "cache_position", "inputs_embeds", "logits_to_keep", "return_dict")
_KNOWN = (
    *("input_ids", "attention_mask", "position_ids", "labels", "num_items_in_batch"),
    "output_hidden_states",
)


class StaysWholeError(Exception):
    """Says why a module has to stay whole."""


@dataclass(frozen=True)
class Family:
    """One class of Transformers.

    Attributes:
        map: of names and shapes.
        arguments: from a configuration to those of the distributed module; may raise
            ``StaysWholeError``.
        is_encoder: the class is an encoder in a model, not the whole model.
    """

    map: FamilyMap
    arguments: Callable[[Any], dict[str, Any]]
    is_encoder: bool = False

    def registration(self) -> Registration:
        """Returns how the class is distributed."""
        return Registration(
            DistributedTransformer if self.is_encoder else DistributedTransformerLMHead,
            arguments_of=lambda module: ((), self.arguments(module.config)),
            is_raw=_is_raw,
            refusal=self._refusal,
            translate=lambda module: functools.partial(
                self.map.to_ours, num_heads=heads_of(module.config)
            ),
            translate_back=lambda module: functools.partial(
                self._to_theirs, heads_of(module.config), self.map.constants_of(module)
            ),
            wrap=wrapped_encoder if self.is_encoder else wrapped_language_model,
        )

    def _to_theirs(self, num_heads: int, constants: State, state: State) -> dict[str, torch.Tensor]:
        return {**self.map.to_theirs(state, num_heads=num_heads), **constants}

    def _refusal(self, module: Any) -> str | None:
        try:
            self.arguments(module.config)
        except StaysWholeError as reason:
            return str(reason)
        return None


def _is_raw(module: nn.Module) -> bool:
    """Whether the script has replaced what initialises models of Transformers, and ties weights."""
    initialise = getattr(type(module), "init_weights", None)
    return not getattr(initialise, "__module__", "").startswith("transformers.")


def heads_of(config: Any) -> int:
    """Returns the number of attention heads of a configuration."""
    for name in ("num_attention_heads", "n_head", "num_heads"):
        if hasattr(config, name):
            return int(getattr(config, name))
    raise AssertionError("a configuration of a transformer has heads")


def activation(word: object) -> str:
    """Returns the library's word for an activation.

    Raises:
        StaysWholeError: it has none.
    """
    if word not in ACTIVATIONS:
        raise StaysWholeError(
            f"its activation is {word!r}, of which there is no distributed version"
        )
    return ACTIVATIONS[str(word)]


def refuse(config: Any, **supported: object) -> None:
    """Raises for fields of a configuration that change numbers in a way that is not supported.

    Args:
        config: of the model.
        supported: the one supported value of each field.

    Raises:
        StaysWholeError: names the first one.
    """
    for name, value in supported.items():
        given = getattr(config, name, value)
        if given != value:
            raise StaysWholeError(f"its configuration has {name}={given!r}")


def wrapped_language_model(made: Any, original: nn.Module) -> Callable[..., Any]:
    """Returns a forward that is called as a causal language model of Transformers is."""
    signature = inspect.signature(type(original).forward)
    return functools.partial(_call_language_model, made, signature, original.config)


def _call_language_model(
    made: DistributedTransformerLMHead, signature: Any, config: Any, *args: Any, **kwargs: Any
) -> Any:
    given = _bound(type(made).__name__, signature, args, kwargs)
    ids, mask, labels = (given.get(key) for key in ("input_ids", "attention_mask", "labels"))
    if ids is None:
        raise ValueError(f"a distributed {config.model_type} model needs input_ids.")
    positions = given.get("position_ids")
    if positions is not None and made.position_embedding is None:
        raise UnsupportedError(
            f"a distributed {config.model_type} model rotates by positions 0 and up; leave "
            "position_ids out."
        )
    if mask is not None:
        if mask.shape != ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids, {tuple(ids.shape)}; received "
                f"{tuple(mask.shape)}."
            )
        mask = mask == 0
    inputs = (ids, mask, None, positions, None)
    shows = given.get("output_hidden_states")
    states = None
    if getattr(config, "output_hidden_states", False) if shows is None else shows:
        logits, found = made.with_states(inputs)
        states = tuple(found)
    else:
        logits = type(made).forward(made, inputs)
    loss = None
    if labels is not None:
        number = given.get("num_items_in_batch")
        flat = logits[:, :-1].flatten(0, 1).float()
        targets = labels[:, 1:].flatten().to(flat.device)
        loss = F.cross_entropy(flat, targets, reduction="mean" if number is None else "sum")
        if number is not None:
            loss = loss / number
    if given.get("return_dict") is False:
        return tuple(each for each in (loss, logits, states) if each is not None)
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=states)


def wrapped_encoder(made: Any, original: nn.Module) -> Callable[..., Any]:
    """Returns a forward that is called as an encoder of Transformers is."""
    signature = inspect.signature(type(original).forward)
    return functools.partial(_call_encoder, made, signature)


def _call_encoder(made: DistributedTransformer, signature: Any, *args: Any, **kwargs: Any) -> Any:
    bound = signature.bind(made, *args, **kwargs).arguments
    given = {**bound, **bound.get("kwargs", {})}
    masks = given.get("head_mask")
    if isinstance(masks, list | tuple) and all(each is None for each in masks):
        given["head_mask"] = None  # models of Transformers 4 pass one for each layer
    for name in ("encoder_hidden_states", "past_key_values", "head_mask"):
        refuse_given(type(made).__name__, name, given.get(name))
    for name in ("output_attentions", "output_hidden_states"):
        refuse_given(type(made).__name__, name, given.get(name) or None)
    hidden = given["hidden_states"]
    mask = additive_mask(given.get("attention_mask"), hidden.dtype)
    result = type(made).forward(made, (hidden, mask))[0]
    if given.get("return_dict") is False:
        return (result,)
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=result)


def _bound(who: str, signature: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = signature.bind(None, *args, **kwargs).arguments
    given = {**bound, **bound.get("kwargs", {})}
    given.pop("kwargs", None)
    given.pop("self", None)
    for name, value in given.items():
        if name in _KNOWN or value is None or value is False:
            continue
        if name in _WITHOUT_EFFECT and name not in ("inputs_embeds", "logits_to_keep"):
            continue
        if name == "logits_to_keep" and isinstance(value, int) and value == 0:
            continue
        refuse_given(who, name, value)
    return given


def additive_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns a mask that is added to scores, of one that says what to keep or is added already."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def refuse_given(who: str, name: str, value: object) -> None:
    """Raises where an argument is given that a distributed module has no use for.

    Raises:
        UnsupportedError: it is not None.
    """
    if value is not None:
        raise UnsupportedError(
            f"{who} has no {name}: leave it out, or the model whole "
            "(smp.tensor_parallelism(enabled=False))."
        )
