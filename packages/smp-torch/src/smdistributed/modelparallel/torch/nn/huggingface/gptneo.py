"""GPT-Neo: hooks, and translations between its two states.

Source: model-parallel-extended-features-pytorch-hugging-face.md.
"""

from __future__ import annotations

from typing import Any

from smdistributed.modelparallel.torch.nn.huggingface.family import Family, activation
from smdistributed.modelparallel.torch.nn.huggingface.family_map import FamilyMap, row
from smdistributed.modelparallel.torch.nn.huggingface.translation import Translations

MAP = FamilyMap(
    name="GPT-Neo",
    their_layer="transformer.h.{}.",
    our_layer="transformer.seq_layers.{}.",
    layer=(
        row("ln_1", "attention.pre_layernorm"),
        row("attn.attention.q_proj", "attention.query"),
        row("attn.attention.k_proj", "attention.key"),
        row("attn.attention.v_proj", "attention.value"),
        row("attn.attention.out_proj", "attention.dense"),
        row("ln_2", "output.pre_layernorm"),
        row("mlp.c_fc", "output.dense1"),
        row("mlp.c_proj", "output.dense2"),
    ),
    outside=(
        row("transformer.wte", "word_embedding"),
        row("transformer.wpe", "position_embedding"),
        row("transformer.ln_f", "layernorm"),
        row("lm_head", "lm_head"),
    ),
    dropped=r"transformer\.h\.\d+\.attn\.attention\.(bias|masked_bias)",
    tied=("lm_head.weight", "transformer.wte.weight"),
)


def arguments(config: Any) -> dict[str, Any]:
    """Returns the arguments of ``DistributedTransformerLMHead`` for a configuration."""
    windows = [config.window_size if kind == "local" else None for kind in config.attention_layers]
    return {
        "num_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "attention_head_size": config.hidden_size // config.num_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size or 4 * config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_positions": config.max_position_embeddings,
        "attention_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": config.resid_dropout,
        "embedding_dropout_prob": config.embed_dropout,
        "activation": activation(config.activation_function),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "causal_mask_size": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "pre_layernorm": True,
        "post_layernorm": False,
        "tie_lm_head": getattr(config, "tie_word_embeddings", True),
        "scale_attention_scores": False,
        "qkv_bias": False,
        "attention_window": windows,
    }


FAMILY = Family(MAP, arguments)

_TRANSLATIONS = Translations(MAP, masks="transformer.h.{}.attn.attention")
translate_state_dict_to_hf_gptneo = _TRANSLATIONS.to_hf
translate_hf_state_dict_to_smdistributed_gptneo = _TRANSLATIONS.from_hf
__getattr__ = _TRANSLATIONS.names(__name__)
