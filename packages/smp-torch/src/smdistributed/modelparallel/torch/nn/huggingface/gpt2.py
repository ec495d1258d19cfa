"""GPT-2: hooks, and translations between its two states.

Source: model-parallel-extended-features-pytorch-hugging-face.md.
"""

from __future__ import annotations

from typing import Any

from smdistributed.modelparallel.torch.nn.huggingface.block import Block
from smdistributed.modelparallel.torch.nn.huggingface.family import Family, activation, refuse
from smdistributed.modelparallel.torch.nn.huggingface.family_map import FamilyMap, row
from smdistributed.modelparallel.torch.nn.huggingface.translation import Translations

MAP = FamilyMap(
    name="GPT-2",
    their_layer="transformer.h.{}.",
    our_layer="transformer.seq_layers.{}.",
    layer=(
        row("ln_1", "attention.pre_layernorm"),
        row(
            "attn.c_attn",
            *("attention.query", "attention.key", "attention.value"),
            transposed=True,
            packing="outputs",
        ),
        row("attn.c_proj", "attention.dense", transposed=True),
        row("ln_2", "output.pre_layernorm"),
        row("mlp.c_fc", "output.dense1", transposed=True),
        row("mlp.c_proj", "output.dense2", transposed=True),
    ),
    outside=(
        row("transformer.wte", "word_embedding"),
        row("transformer.wpe", "position_embedding"),
        row("transformer.ln_f", "layernorm"),
        row("lm_head", "lm_head"),
    ),
    dropped=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
    tied=("lm_head.weight", "transformer.wte.weight"),
)


def arguments(config: Any) -> dict[str, Any]:
    """Returns the arguments of ``DistributedTransformerLMHead`` for a configuration."""
    refuse(config, add_cross_attention=False)
    return {
        "num_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "attention_head_size": config.n_embd // config.n_head,
        "hidden_size": config.n_embd,
        "intermediate_size": config.n_inner or 4 * config.n_embd,
        "vocab_size": config.vocab_size,
        "num_positions": config.n_positions,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "embedding_dropout_prob": config.embd_pdrop,
        "activation": activation(config.activation_function),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "causal_mask_size": config.n_positions,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "tie_lm_head": getattr(config, "tie_word_embeddings", True),
        "scale_attention_scores": getattr(config, "scale_attn_weights", True),
        "scale_attn_by_layer_idx": getattr(config, "scale_attn_by_inverse_layer_idx", False),
        "attention_in_fp32": getattr(config, "reorder_and_upcast_attn", False),
    }


def arguments_of_layer(config: Any) -> dict[str, Any]:
    """Returns the arguments of ``DistributedTransformerLayer`` for a configuration."""
    outside = (
        *("num_layers", "vocab_size", "num_positions"),
        *("embedding_dropout_prob", "tie_lm_head"),
    )
    return {name: each for name, each in arguments(config).items() if name not in outside}


FAMILY = Family(MAP, arguments)
BLOCK = Block(
    "transformers.models.gpt2.modeling_gpt2",
    "GPT2Block",
    FamilyMap(
        name="GPT-2 block",
        their_layer="{}.",
        our_layer="{}.",
        layer=(),
        outside=MAP.layer,
        dropped=r"attn\.(bias|masked_bias)",
    ),
    arguments_of_layer,
)
get_hf_gpt2_transformer_layer_hooks = BLOCK.hooks

_TRANSLATIONS = Translations(MAP, masks="transformer.h.{}.attn")
translate_state_dict_to_hf_gpt2 = _TRANSLATIONS.to_hf
translate_hf_state_dict_to_smdistributed_gpt2 = _TRANSLATIONS.from_hf
__getattr__ = _TRANSLATIONS.names(__name__)
