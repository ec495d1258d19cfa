"""BERT: hooks of its encoder, and translations between its two states.

Source: model-parallel-extended-features-pytorch-hugging-face.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from smdistributed.modelparallel.torch.nn.huggingface.family import Family, activation, refuse
from smdistributed.modelparallel.torch.nn.huggingface.family_map import FamilyMap, row
from smdistributed.modelparallel.torch.nn.huggingface.translation import Translations

MAP = FamilyMap(
    name="BERT",
    their_layer="encoder.layer.{}.",
    our_layer="encoder.seq_layers.{}.",
    layer=(
        row("attention.self.query", "attention.query"),
        row("attention.self.key", "attention.key"),
        row("attention.self.value", "attention.value"),
        row("attention.output.dense", "attention.dense"),
        row("attention.output.LayerNorm", "attention.layernorm"),
        row("intermediate.dense", "output.dense1"),
        row("output.dense", "output.dense2"),
        row("output.LayerNorm", "output.layernorm"),
    ),
    keeps_others=True,
)
#: Of the encoder alone, which is what is replaced.
ENCODER = dataclasses.replace(
    MAP, their_layer="layer.{}.", our_layer="seq_layers.{}.", keeps_others=False
)


def arguments(config: Any) -> dict[str, Any]:
    """Returns the arguments of ``DistributedTransformer`` for a configuration."""
    refuse(config, is_decoder=False, add_cross_attention=False, position_embedding_type="absolute")
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_probs_dropout_prob,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "activation": activation(config.hidden_act),
        "layernorm_epsilon": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
    }


FAMILY = Family(ENCODER, arguments, is_encoder=True)

_TRANSLATIONS = Translations(MAP)
translate_state_dict_to_hf_bert = _TRANSLATIONS.to_hf
translate_hf_state_dict_to_smdistributed_bert = _TRANSLATIONS.from_hf
__getattr__ = _TRANSLATIONS.names(__name__)
