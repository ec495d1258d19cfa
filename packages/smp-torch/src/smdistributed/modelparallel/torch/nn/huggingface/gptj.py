"""GPT-J: hooks, and translations between its two states.

Source: model-parallel-extended-features-pytorch-hugging-face.md.
"""

from __future__ import annotations

from typing import Any

from smdistributed.modelparallel.torch.nn.huggingface.family import (
    Family,
    StaysWholeError,
    activation,
)
from smdistributed.modelparallel.torch.nn.huggingface.family_map import FamilyMap, row
from smdistributed.modelparallel.torch.nn.huggingface.translation import Translations

MAP = FamilyMap(
    name="GPT-J",
    their_layer="transformer.h.{}.",
    our_layer="transformer.seq_layers.{}.",
    layer=(
        row("ln_1", "attention.pre_layernorm"),
        row("attn.q_proj", "attention.query"),
        row("attn.k_proj", "attention.key"),
        row("attn.v_proj", "attention.value"),
        row("attn.out_proj", "attention.dense"),
        row("mlp.fc_in", "output.dense1"),
        row("mlp.fc_out", "output.dense2"),
    ),
    outside=(
        row("transformer.wte", "word_embedding"),
        row("transformer.ln_f", "layernorm"),
        row("lm_head", "lm_head"),
    ),
    dropped=r"transformer\.h\.\d+\.attn\.(bias|masked_bias|embed_positions)",
)


def arguments(config: Any) -> dict[str, Any]:
    """Returns the arguments of ``DistributedTransformerLMHead`` for a configuration."""
    if not config.rotary_dim:
        raise StaysWholeError(f"its configuration has rotary_dim={config.rotary_dim!r}")
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
        "use_position_embedding": False,
        "tie_lm_head": False,
        "lm_head_bias": True,
        "parallel_residual": "one_norm",
        "rotary_dim": config.rotary_dim,
        "rotary_interleaved": True,
        "qkv_bias": False,
        "attention_output_bias": False,
    }


FAMILY = Family(MAP, arguments)

_TRANSLATIONS = Translations(MAP, masks="transformer.h.{}.attn")
translate_state_dict_to_hf_gptj = _TRANSLATIONS.to_hf
translate_hf_state_dict_to_smdistributed_gptj = _TRANSLATIONS.from_hf
translate_hf_gptj_state_dict_to_smdistributed_gptj = _TRANSLATIONS.from_hf
__getattr__ = _TRANSLATIONS.names(__name__)
