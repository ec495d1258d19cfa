"""An architecture of Transformers at reduced size: its model, and batches to train it on."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Batch = dict[str, Any]

#: Sizes that a configuration gets if it has a field of the name; all else is as released.
SIZES: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 6,
    "moe_intermediate_size": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "image_size": 32,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Standard deviation of what is added to every parameter: freshly initialized ones are so close to
#: zero that attention is uniform, and a wrong mask would not show.
_LIVELINESS = 0.1


@dataclass(frozen=True)
class Shape:
    """What is asked of a batch.

    Attributes:
        rows: its size.
        length: of its sequences, where they are text.
        padded: the rows that end in padding, where they are sequences.
    """

    rows: int
    length: int
    padded: tuple[int, ...]


class AbsentError(Exception):
    """The installed version of Transformers does not have this architecture."""


@dataclass(frozen=True)
class Architecture:
    """One entry of the survey.

    Attributes:
        name: what it is called here.
        family: what it is grouped under.
        model_class: name of the class in ``transformers``.
        batch: makes the keyword arguments of one call, from the configuration and a shape.
        changes: fields of the configuration besides ``SIZES``; a mapping reduces a nested one.
        loss: takes the loss from the model's output.
    """

    name: str
    family: str
    model_class: str
    batch: Callable[[Any, Shape], Batch]
    changes: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], torch.Tensor] = lambda output: output.loss

    def build(self, *, dropout: bool, cache: bool) -> nn.Module:
        """Returns the reduced model, in training mode; the same for the same random state.

        Raises:
            AbsentError: the installed Transformers does not have the class.
        """
        transformers: Any = importlib.import_module("transformers")
        model_class = getattr(transformers, self.model_class, None)
        if model_class is None:
            raise AbsentError(f"transformers {transformers.__version__} has no {self.model_class}.")
        config = reduced(model_class.config_class, self.changes)
        if not cache:
            _without_cache(config)
        if not dropout:
            for part in _parts(config):
                _without_dropout(part)
        model: nn.Module = model_class(config)
        if not dropout:
            for module in model.modules():
                _without_dropout(module)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(_LIVELINESS * torch.randn_like(parameter))
        return model.train()


def reduced(config_class: Any, changes: Mapping[str, Any]) -> Any:
    """Returns the released configuration with ``SIZES`` and ``changes`` in it."""
    released = config_class()
    aliases = dict(released.attribute_map)
    known = released.to_dict().keys() | aliases.keys()
    values = {
        name: size
        for name, size in SIZES.items()
        if name in known
        and aliases.get(name) not in changes.keys() | SIZES.keys()
        and getattr(released, name, None) is not None
    }
    nested_names = set()
    for name in getattr(released, "sub_configs", {}):
        nested = getattr(released, name, None)
        if nested is not None:
            values[name] = reduced(type(nested), changes.get(name, {})).to_diff_dict()
            nested_names.add(name)
    plain = {name: value for name, value in changes.items() if name not in nested_names}
    return config_class(**{**values, **plain})


def _parts(config: Any) -> list[Any]:
    """Returns a configuration and those nested in it."""
    nested = [each for each in vars(config).values() if type(each).__name__.endswith("Config")]
    return [config, *(part for each in nested for part in _parts(each))]


def uses_cache(config: Any) -> bool:
    """Whether the model is asked to return a cache of keys and values."""
    return any(getattr(part, "use_cache", False) for part in _parts(config))


def _without_cache(config: Any) -> None:
    for part in _parts(config):
        if getattr(part, "use_cache", False):
            part.use_cache = False


_MASKED = ("mask_time_prob", "mask_feature_prob")


def _without_dropout(holder: Any) -> None:
    """Switches off what is random: every kind of dropout, noise of routers, masked spectra."""
    for name, value in list(vars(holder).items()):
        random = (
            "drop" in name or "jitter" in name or name in ("mask_time_prob", "mask_feature_prob")
        )
        if random and isinstance(value, float):
            setattr(holder, name, 0.0)
        elif name == "apply_spec_augment":
            holder.apply_spec_augment = False
    if isinstance(holder, nn.Dropout):
        holder.p = 0.0
