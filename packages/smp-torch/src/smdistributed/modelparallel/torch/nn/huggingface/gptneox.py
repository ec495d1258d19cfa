"""GPT-NeoX: hooks, and translations between its two states, which the library adds.

Source: smd_model_parallel_change_log.rst, 1.13.0.
"""

from __future__ import annotations

from typing import Any

from smdistributed.modelparallel.torch.nn.huggingface.family import (
    Family,
    StaysWholeError,
    activation,
    refuse,
)
from smdistributed.modelparallel.torch.nn.huggingface.family_map import FamilyMap, row
from smdistributed.modelparallel.torch.nn.huggingface.translation import Translations


def _map(head: str) -> FamilyMap:
    return FamilyMap(
        name="GPT-NeoX",
        their_layer="gpt_neox.layers.{}.",
        our_layer="transformer.seq_layers.{}.",
        layer=(
            row("input_layernorm", "attention.pre_layernorm"),
            row("post_attention_layernorm", "output.pre_layernorm"),
            row(
                "attention.query_key_value",
                *("attention.query", "attention.key", "attention.value"),
                packing="heads",
            ),
            row("attention.dense", "attention.dense"),
            row("mlp.dense_h_to_4h", "output.dense1"),
            row("mlp.dense_4h_to_h", "output.dense2"),
        ),
        outside=(
            row("gpt_neox.embed_in", "word_embedding"),
            row("gpt_neox.final_layer_norm", "layernorm"),
            row(head, "lm_head"),
        ),
        dropped=(
            r"gpt_neox\.(layers\.\d+\.attention\.)?"
            r"(bias|masked_bias|rotary_emb\.\w+)"
        ),
    )


#: Transformers 4 calls the head embed_out.
MAP = _map("lm_head")
MAP_BEFORE_5 = _map("embed_out")


def arguments(config: Any) -> dict[str, Any]:
    """Returns the arguments of ``DistributedTransformerLMHead`` for a configuration."""
    refuse(config, tie_word_embeddings=False)
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        refuse(config, rope_scaling=None)
    rope = rope or {
        "rope_theta": getattr(config, "rotary_emb_base", 10000),
        "partial_rotary_factor": getattr(config, "rotary_pct", 0.25),
    }
    if rope.get("rope_type", "default") != "default":
        raise StaysWholeError(f"its configuration has rope_type={rope['rope_type']!r}")
    head_size = config.hidden_size // config.num_attention_heads
    has_bias = getattr(config, "attention_bias", True)
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": head_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "num_positions": config.max_position_embeddings,
        "attention_dropout_prob": getattr(config, "attention_dropout", 0.0),
        "hidden_dropout_prob": getattr(config, "hidden_dropout", 0.0),
        "activation": activation(config.hidden_act),
        "layernorm_epsilon": config.layer_norm_eps,
        "causal_mask_size": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "use_position_embedding": False,
        "tie_lm_head": False,
        "parallel_residual": "two_norms" if config.use_parallel_residual else None,
        "rotary_dim": int(head_size * rope["partial_rotary_factor"]),
        "rotary_emb_base": rope["rope_theta"],
        "qkv_bias": has_bias,
        "attention_output_bias": has_bias,
    }


FAMILY = Family(MAP, arguments)
FAMILY_BEFORE_5 = Family(MAP_BEFORE_5, arguments)

_TRANSLATIONS = Translations(MAP, older=MAP_BEFORE_5)
translate_state_dict_to_hf_gptneox = _TRANSLATIONS.to_hf
translate_hf_state_dict_to_smdistributed_gptneox = _TRANSLATIONS.from_hf
__getattr__ = _TRANSLATIONS.names(__name__)
