"""Models of Transformers that are split by ``auto=True`` must give Transformers' own numbers."""

from __future__ import annotations

import importlib
from typing import Any

import auto_cases
import tensor_cases
import torch
from world import generator

import smdistributed.modelparallel.torch as smp

VOCAB, LENGTH = 48, 7
MICROBATCHES = tensor_cases.MICROBATCHES


def _hf() -> Any:
    hf: Any = importlib.import_module("transformers")
    hf.logging.set_verbosity_error()
    return hf


def _sizes(**more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
        "intermediate_size": 40,
        "max_position_embeddings": 20,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **more,
    }


def llama() -> Any:
    return _hf().LlamaForCausalLM(_hf().LlamaConfig(**_sizes(num_key_value_heads=2)))


def mistral() -> Any:
    given = _sizes(num_key_value_heads=2, sliding_window=4)
    return _hf().MistralForCausalLM(_hf().MistralConfig(**given))


def qwen3() -> Any:
    given = _sizes(num_key_value_heads=2, head_dim=8)
    return _hf().Qwen3ForCausalLM(_hf().Qwen3Config(**given))


def opt() -> Any:
    given = _sizes(ffn_dim=24, word_embed_proj_dim=32, dropout=0.0, pad_token_id=1)
    return _hf().OPTForCausalLM(_hf().OPTConfig(**given))


def openai() -> Any:
    """Has ``Conv1D`` for its maps."""
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    given = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 20, "vocab_size": VOCAB}
    return _hf().OpenAIGPTLMHeadModel(_hf().OpenAIGPTConfig(**given, **dropout))


def phi3() -> Any:
    """Has fused maps, and reads the number of its heads from its configuration."""
    given = _sizes(num_key_value_heads=2, pad_token_id=0)
    return _hf().Phi3ForCausalLM(_hf().Phi3Config(**given))


#: How many groups each has with two layers.
TRANSFORMERS = {llama: 4, mistral: 4, qwen3: 4, opt: 2, openai: 4, phi3: 4}


@smp.step
def train(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    out = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    model.backward(out.loss)
    return out.loss


def case(name: str) -> None:
    """Loss and gradients are those of Transformers, also where only one rank has padding."""
    make = next(each for each in TRANSFORMERS if each.__name__ == name)
    module = auto_cases.split(make, 1)
    model, reference = smp.DistributedModel(module), auto_cases.whole(make, 1)
    assert len(auto_cases.groups_in(module)) == TRANSFORMERS[make]
    size = smp.dp_size()
    ids = torch.randint(2, VOCAB, (2 * MICROBATCHES * size, LENGTH), generator=generator(5))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    losses = []
    for share, seen in zip(ids.chunk(size), mask.chunk(size), strict=True):
        losses.append([])
        for part, part_seen in zip(
            share.chunk(MICROBATCHES), seen.chunk(MICROBATCHES), strict=True
        ):
            labels = part.masked_fill(part_seen == 0, -100)
            loss = reference(input_ids=part, attention_mask=part_seen, labels=labels).loss
            (loss / size / MICROBATCHES).backward()
            losses[-1].append(loss.item())
    own = smp.dp_rank()
    found = train(model, ids.chunk(size)[own], mask.chunk(size)[own])
    for got, want in zip(found.outputs, losses[own], strict=True):
        assert abs(got.item() - want) <= 2e-6 * want, (got, want)
    tensor_cases.compare_gradients(model, reference)
