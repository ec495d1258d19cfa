"""Small Hugging Face models, as they come: unchanged classes, random weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from reference import compare
from torch import nn

import smdistributed.modelparallel.torch as smp

VOCABULARY = 37
LAYERS = 4
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_DROPOUT = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def _builders() -> dict[str, Callable[[], nn.Module]]:
    hf: Any = importlib.import_module("transformers")
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    gpt2 = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=LAYERS,
        n_head=2,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **ends,
    )
    llama = hf.LlamaConfig(**_SIZES, num_key_value_heads=1)
    bert = hf.BertConfig(**_SIZES, **_NO_DROPOUT)
    t5 = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=LAYERS,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=2,
    )
    bart = hf.BartConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=32,
        dropout=0.0,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        **ends,
    )
    opt = hf.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        ffn_dim=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        max_position_embeddings=32,
        word_embed_proj_dim=16,
        dropout=0.0,
        **ends,
    )
    bloom = hf.BloomConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        n_layer=LAYERS,
        n_head=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **ends,
    )
    neox = hf.GPTNeoXConfig(**_SIZES, **_NO_DROPOUT)
    return {
        "gpt2": lambda: hf.GPT2LMHeadModel(gpt2),
        "llama": lambda: hf.LlamaForCausalLM(llama),
        "bert": lambda: hf.BertForMaskedLM(bert),
        "t5": lambda: hf.T5ForConditionalGeneration(t5),
        "bart": lambda: hf.BartForConditionalGeneration(bart),
        "opt": lambda: hf.OPTForCausalLM(opt),
        "bloom": lambda: hf.BloomForCausalLM(bloom),
        "neox": lambda: hf.GPTNeoXForCausalLM(neox),
    }


NAMES = ("gpt2", "llama", "bert", "t5", "bart", "opt", "bloom", "neox")


def _train(name: str, padded_rows: slice) -> None:
    extra = {} if name == "bert" else {"use_cache": False}

    def body(
        model: Any, tokens: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        loss: torch.Tensor = model(
            input_ids=tokens, attention_mask=mask, labels=labels, **extra
        ).loss
        model.backward(loss)
        return loss

    def batch() -> list[torch.Tensor]:
        tokens = torch.randint(3, VOCABULARY, (8 * smp.dp_size(), 10))
        mask = torch.ones_like(tokens)
        mask[padded_rows, 8:] = 0
        return [tokens, mask, tokens.masked_fill(mask == 0, -100)]

    def build() -> nn.Module:
        model = _builders()[name]()
        for parameter_name, parameter in model.named_parameters():
            # A softmax does not see what all keys have in common: the gradient of this bias is
            # zero but for rounding, and rounding depends on the order in which readers of the
            # encoder's result add up.
            if name == "bart" and parameter_name.endswith("k_proj.bias"):
                parameter.requires_grad_(False)
        return model

    compare(build, body, [batch(), batch()])


def cases() -> dict[str, Callable[[], Any]]:
    """Returns one case a model, and one in which the microbatches are of two kinds."""

    def case(name: str, padded_rows: slice) -> Callable[[], None]:
        return lambda: _train(name, padded_rows)

    in_every_microbatch, in_some = slice(None, None, 2), slice(0, 3)
    found = {name: case(name, in_every_microbatch) for name in NAMES}
    return {**found, "padding_in_some_microbatches": case("gpt2", in_some)}
