"""Language models that predict the next token.

A line holds what differs from the released configuration besides ``SIZES``. It keeps what makes
the architecture special: patterns of layers, few key-value heads, experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import batches
from architecture import Architecture

_FEW_KEYS = {"num_key_value_heads": 2}
_ONE_KEY = {"num_key_value_heads": 1}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"output_router_logits": True}


def _decoder(name: str, model_class: str, **changes: Any) -> Architecture:
    return Architecture(name, "decoder", model_class, batches.causal, changes)


def decoders() -> Iterator[Architecture]:
    """Yields them."""
    yield _decoder("gpt2", "GPT2LMHeadModel")
    yield _decoder(
        "gpt2-untied",
        "GPT2LMHeadModel",
        tie_word_embeddings=False,
        scale_attn_by_inverse_layer_idx=True,
    )
    yield Architecture(
        "gpt2-classifier",
        "decoder",
        "GPT2ForSequenceClassification",
        batches.classified,
        {"pad_token_id": 0},
    )
    yield _decoder(
        "gpt-neo",
        "GPTNeoForCausalLM",
        num_layers=4,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=6,
    )
    yield _decoder("gpt-neox", "GPTNeoXForCausalLM")
    yield _decoder("gpt-neox-japanese", "GPTNeoXJapaneseForCausalLM")
    yield _decoder("gptj", "GPTJForCausalLM", rotary_dim=4)
    yield _decoder("gpt-bigcode", "GPTBigCodeForCausalLM")
    yield _decoder("openai-gpt", "OpenAIGPTLMHeadModel")
    yield _decoder("ctrl", "CTRLLMHeadModel", dff=64)
    yield _decoder("opt", "OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32)
    yield _decoder(
        "opt-350m", "OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=16, do_layer_norm_before=False
    )
    yield _decoder("bloom", "BloomForCausalLM")
    yield _decoder("llama", "LlamaForCausalLM", **_FEW_KEYS)
    yield _decoder("mistral", "MistralForCausalLM", sliding_window=6, **_FEW_KEYS)
    yield _decoder("mixtral", "MixtralForCausalLM", **_FEW_KEYS, **_LOCAL_EXPERTS, **_ROUTED)
    yield _decoder(
        "qwen2",
        "Qwen2ForCausalLM",
        use_sliding_window=True,
        max_window_layers=2,
        sliding_window=6,
        **_FEW_KEYS,
    )
    yield _decoder(
        "qwen2-moe",
        "Qwen2MoeForCausalLM",
        shared_expert_intermediate_size=32,
        **_FEW_KEYS,
        **_EXPERTS,
        **_ROUTED,
    )
    yield _decoder("qwen3", "Qwen3ForCausalLM", **_FEW_KEYS)
    yield _decoder("qwen3-moe", "Qwen3MoeForCausalLM", **_FEW_KEYS, **_EXPERTS, **_ROUTED)
    yield _decoder(
        "qwen3-next",
        "Qwen3NextForCausalLM",
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        shared_expert_intermediate_size=32,
        **_FEW_KEYS,
        **_EXPERTS,
    )
    yield _decoder("gemma", "GemmaForCausalLM", **_ONE_KEY)
    yield _decoder("gemma2", "Gemma2ForCausalLM", query_pre_attn_scalar=8, **_FEW_KEYS)
    yield _decoder(
        "gemma3", "Gemma3ForCausalLM", num_hidden_layers=6, query_pre_attn_scalar=8, **_FEW_KEYS
    )
    yield _decoder("phi", "PhiForCausalLM")
    yield _decoder("phi3", "Phi3ForCausalLM", sliding_window=6)
    yield _decoder("phimoe", "PhimoeForCausalLM", **_FEW_KEYS, **_LOCAL_EXPERTS, **_ROUTED)
    yield _decoder("falcon", "FalconForCausalLM")
    yield _decoder("falcon-40b", "FalconForCausalLM", new_decoder_architecture=True, num_kv_heads=2)
    yield _decoder(
        "falcon-rw",
        "FalconForCausalLM",
        alibi=True,
        multi_query=False,
        bias=True,
        parallel_attn=False,
    )
    yield _decoder("mpt", "MptForCausalLM", d_model=32, n_heads=4, n_layers=4, max_seq_len=64)
    yield _decoder("stablelm", "StableLmForCausalLM", num_key_value_heads=4)
    yield _decoder("olmo", "OlmoForCausalLM")
    yield _decoder("olmo2", "Olmo2ForCausalLM")
    yield _decoder("olmo3", "Olmo3ForCausalLM")
    yield _decoder("olmoe", "OlmoeForCausalLM", **_EXPERTS, **_ROUTED)
    yield _decoder("cohere", "CohereForCausalLM", **_FEW_KEYS)
    yield _decoder("cohere2", "Cohere2ForCausalLM", **_FEW_KEYS)
    yield _decoder("starcoder2", "Starcoder2ForCausalLM", sliding_window=6, **_FEW_KEYS)
    yield _decoder("codegen", "CodeGenForCausalLM", rotary_dim=4)
    yield _decoder("xglm", "XGLMForCausalLM", ffn_dim=64)
    yield _decoder("biogpt", "BioGptForCausalLM")
    yield _decoder("persimmon", "PersimmonForCausalLM")
    yield _decoder(
        "dbrx",
        "DbrxForCausalLM",
        d_model=32,
        n_heads=4,
        n_layers=4,
        max_seq_len=64,
        attn_config={"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        **_ROUTED,
    )
    yield _decoder("granite", "GraniteForCausalLM", **_FEW_KEYS)
    yield _decoder("granitemoe", "GraniteMoeForCausalLM", **_FEW_KEYS, **_LOCAL_EXPERTS, **_ROUTED)
    latent = {
        "kv_lora_rank": 8,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    yield _decoder("deepseek-v2", "DeepseekV2ForCausalLM", num_key_value_heads=4, **latent)
    yield _decoder(
        "deepseek-v3", "DeepseekV3ForCausalLM", num_key_value_heads=4, **{**latent, "head_dim": 4}
    )
    yield _decoder("glm", "GlmForCausalLM", **_FEW_KEYS)
    yield _decoder("glm4", "Glm4ForCausalLM", **_FEW_KEYS)
    yield _decoder(
        "glm4-moe", "Glm4MoeForCausalLM", **_FEW_KEYS, n_routed_experts=4, num_experts_per_tok=2
    )
    yield _decoder("nemotron", "NemotronForCausalLM", **_FEW_KEYS)
    yield _decoder("helium", "HeliumForCausalLM", **_FEW_KEYS)
    yield _decoder("smollm3", "SmolLM3ForCausalLM", **_FEW_KEYS)
    yield _decoder("ernie4.5", "Ernie4_5ForCausalLM", **_FEW_KEYS)
    yield _decoder(
        "ernie4.5-moe",
        "Ernie4_5_MoeForCausalLM",
        **_FEW_KEYS,
        moe_num_experts=4,
        moe_k=2,
        **_ROUTED,
    )
    yield _decoder("exaone4", "Exaone4ForCausalLM", **_FEW_KEYS)
    yield _decoder("arcee", "ArceeForCausalLM", **_FEW_KEYS)
    yield _decoder("apertus", "ApertusForCausalLM", **_FEW_KEYS)
    yield _decoder("diffllama", "DiffLlamaForCausalLM", **_FEW_KEYS)
    yield _decoder("hunyuan", "HunYuanDenseV1ForCausalLM", head_dim=8, **_FEW_KEYS)
    yield _decoder("bitnet", "BitNetForCausalLM", **_FEW_KEYS)
    yield _decoder("gpt-oss", "GptOssForCausalLM", **_FEW_KEYS, **_LOCAL_EXPERTS, **_ROUTED)
    yield _decoder(
        "llama4",
        "Llama4ForCausalLM",
        intermediate_size_mlp=64,
        attention_chunk_size=6,
        **_FEW_KEYS,
        num_local_experts=4,
    )
    yield _decoder("minimax", "MiniMaxForCausalLM", **_FEW_KEYS, **_LOCAL_EXPERTS, block_size=8)
    yield _decoder(
        "modernbert-decoder",
        "ModernBertDecoderForCausalLM",
        local_attention=6,
        cls_token_id=1,
        sep_token_id=2,
    )
    yield _decoder("lfm2", "Lfm2ForCausalLM", full_attn_idxs=[1, 3], **_FEW_KEYS)
    state = {"state_size": 8, "time_step_rank": 4}
    yield _decoder("mamba", "MambaForCausalLM", **state)
    yield _decoder("falcon-mamba", "FalconMambaForCausalLM", **state)
    yield _decoder(
        "mamba2",
        "Mamba2ForCausalLM",
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=2,
        chunk_size=8,
    )
    yield Architecture("rwkv", "decoder", "RwkvForCausalLM", batches.causal_without_mask)
    yield _decoder(
        "jamba",
        "JambaForCausalLM",
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
        **_FEW_KEYS,
        **_ROUTED,
    )
    yield _decoder(
        "bamba",
        "BambaForCausalLM",
        attn_layer_indices=[1, 3],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_chunk_size=8,
        **_FEW_KEYS,
    )
    yield _decoder(
        "recurrent-gemma",
        "RecurrentGemmaForCausalLM",
        attention_window_size=6,
        lru_width=32,
        **_ONE_KEY,
    )
