"""Models of Transformers that are split must give Transformers' own numbers."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import tensor_cases
import torch
from torch import nn
from world import generator

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError

VOCAB, LENGTH = 48, 10
_IDS = {"bos_token_id": 0, "eos_token_id": 0}


def _hf() -> Any:
    hf: Any = importlib.import_module("transformers")
    hf.logging.set_verbosity_error()
    return hf


def gpt2(**changes: Any) -> nn.Module:
    hf = _hf()
    rates = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    config = hf.GPT2Config(
        n_layer=2, n_embd=16, n_head=4, vocab_size=VOCAB, n_positions=16, **rates, **_IDS
    )
    config.update(changes)
    model: nn.Module = hf.GPT2LMHeadModel(config)
    return model


def gptneo() -> Any:
    hf = _hf()
    rates = dict.fromkeys(("attention_dropout", "resid_dropout", "embed_dropout"), 0.0)
    return hf.GPTNeoForCausalLM(
        hf.GPTNeoConfig(
            num_layers=2,
            attention_types=[[["global", "local"], 1]],
            window_size=3,
            hidden_size=16,
            num_heads=4,
            vocab_size=VOCAB,
            max_position_embeddings=16,
            **rates,
            **_IDS,
        )
    )


def gptj() -> Any:
    hf = _hf()
    rates = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 4, "vocab_size": VOCAB, "n_positions": 16}
    return hf.GPTJForCausalLM(hf.GPTJConfig(**sizes, rotary_dim=2, **rates, **_IDS))


def _sizes(**more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
        "intermediate_size": 40,
        "max_position_embeddings": 20,
        **more,
    }


def gptneox() -> Any:
    hf = _hf()
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_sizes(), **_IDS))


_RATES = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}


def bert() -> Any:
    hf = _hf()
    return hf.BertForMaskedLM(hf.BertConfig(**_sizes(**_RATES, pad_token_id=0)))


def roberta() -> Any:
    hf = _hf()
    return hf.RobertaForMaskedLM(hf.RobertaConfig(**_sizes(**_RATES, pad_token_id=1)))


def scaled() -> Any:
    """GPT-2 with the fields that change its scores."""
    # Other kinds of attention of Transformers 4 pass over them.
    return gpt2(
        scale_attn_by_inverse_layer_idx=True,
        reorder_and_upcast_attn=True,
        _attn_implementation="eager",
    )


@functools.cache
def registered_block() -> Any:
    """A class of blocks like GPT-2's, which itself stays unregistered in this process."""
    blocks = importlib.import_module("transformers.models.gpt2.modeling_gpt2")
    hooks = importlib.import_module("smdistributed.modelparallel.torch.nn.huggingface.gpt2")
    kind = type("OwnBlock", (blocks.GPT2Block,), {})
    layer = smp.nn.DistributedTransformerLayer
    smp.tp_register_with_module(kind, layer, *hooks.get_hf_gpt2_transformer_layer_hooks())
    return kind


def gpt2_blocks(**changes: Any) -> Any:
    """GPT-2 as it is, but for its blocks."""
    with smp.tensor_parallelism(False):
        model: Any = gpt2(**changes)
    layers = model.transformer.h
    with smp.tensor_parallelism():
        for index, former in enumerate(layers):
            layers[index] = registered_block()(model.config, layer_idx=index)
            layers[index].load_state_dict(former.state_dict())
    return model


FAMILIES: dict[str, Callable[[], Any]] = {
    each.__name__: each
    for each in (gpt2, scaled, gptneo, gptj, gptneox, bert, roberta, gpt2_blocks)
}


@smp.step
def train(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    labels = ids.masked_fill(mask == 0, -100)  # what a query without any key gives is no matter
    out = model(input_ids=ids, attention_mask=mask, labels=labels)
    model.backward(out.loss)
    return out.loss


def family_case(name: str) -> None:
    """Loss, gradients and translated state are those of Transformers; loaded weights stay."""
    make = FAMILIES[name]
    torch.manual_seed(3 + smp.tp_rank())
    with smp.tensor_parallelism():
        module = make()
    torch.manual_seed(3)
    reference = make()
    model = smp.DistributedModel(module)
    draws = generator(5)
    size = smp.dp_size()
    ids = torch.randint(2, VOCAB, (4 * size, LENGTH), generator=draws)
    mask = torch.ones_like(ids)
    mask[0, 7:] = mask[2, 5:] = 0  # only the first rank has padding
    losses = []
    for share, seen in zip(ids.chunk(size), mask.chunk(size), strict=True):
        losses.append([])
        for one, part in zip(
            share.chunk(tensor_cases.MICROBATCHES),
            seen.chunk(tensor_cases.MICROBATCHES),
            strict=True,
        ):
            labels = one.masked_fill(part == 0, -100)
            out = reference(input_ids=one, attention_mask=part, labels=labels)
            (out.loss / size / tensor_cases.MICROBATCHES).backward()
            losses[-1].append(out.loss.item())
    own = smp.dp_rank()
    found = train(model, ids.chunk(size)[own], mask.chunk(size)[own])
    for got, want in zip(found.outputs, losses[own], strict=True):
        assert abs(got.item() - want) <= 2e-6 * want, (got, want)
    to_theirs, to_ours = smp.state.module_manager.translate_functions[-1]
    ours = model.state_dict()
    theirs, wanted = to_theirs(ours), reference.state_dict()
    assert theirs.keys() == wanted.keys()
    assert all(tensor_cases.same(theirs[key], value) for key, value in wanted.items())
    twice = to_theirs(theirs)
    assert twice.keys() == theirs.keys()
    assert all(twice[key] is value for key, value in theirs.items()), "it has their form already"
    again = to_ours(theirs)
    assert again.keys() == ours.keys()
    assert all(tensor_cases.same(again[key], value) for key, value in ours.items())
    # Gradients go the same way as weights do.
    expected = to_ours({key: _gradient(reference, key) for key in wanted})
    gradients = {key: each.grad for key, each in model.local_named_parameters()}
    of = max(each.norm().item() for each in expected.values() if each.is_floating_point())
    for key in gradients:
        part = tensor_cases.local_part(model, key, expected[key])
        tensor_cases.assert_near(gradients[key], part, key, of)


def _gradient(model: Any, name: str) -> torch.Tensor:
    owner, _, attribute = name.rpartition(".")
    tensor = getattr(model.get_submodule(owner), attribute)
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def refused() -> None:
    """What is not supported stays whole, or is named when it is asked for."""
    with smp.tensor_parallelism():
        other = gpt2(add_cross_attention=True)
        module = gpt2()
    assert type(smp.DistributedModel(other).get_module()).__name__ == "GPT2LMHeadModel"
    model = smp.DistributedModel(module)
    assert type(model.get_module()).__name__ == "DistributedTransformerLMHead"
    assert model.get_module().config.n_layer == 2
    assert "labels" in inspect.signature(model.get_module().forward).parameters
    with pytest.raises(AttributeError, match="stands for GPT2LMHeadModel, which has one"):
        _ = model.get_module().resize_token_embeddings
    assert not hasattr(model.get_module(), "generated")
    norms = [each for each in model.modules() if isinstance(each, smp.nn.FusedLayerNorm)]
    assert len(norms) == 5
    assert len(model.get_module().transformer.seq_layers) == 2
    ids = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(UnsupportedError, match="has no output_attentions"):
        model(ids, output_attentions=True)
    out = model(input_ids=ids, use_cache=True)
    assert out.logits.shape == (1, 3, VOCAB)
    assert out.past_key_values is None
    model = smp.DistributedModel(gpt2_blocks()).eval()
    kinds = [type(each).__name__ for each in model.get_module().transformer.h]
    assert kinds == ["DistributedTransformerLayer"] * 2
    out = model(input_ids=ids, use_cache=True)
    assert out.logits.shape == (1, 3, VOCAB)
    with pytest.raises(UnsupportedError, match="pass use_cache=False"):
        model.get_module().generate(ids, max_new_tokens=2, do_sample=False)
    other = smp.DistributedModel(gpt2_blocks(activation_function="silu")).get_module()
    assert type(other.transformer.h[0]).__name__ == "OwnBlock"


def generated(family: str) -> None:
    """Tokens are those of the plain model, with a cache or without, whatever was split."""
    hf, ids = _hf(), torch.randint(2, VOCAB, (2, 5), generator=generator(7))
    torch.manual_seed(0)
    net = globals()[family]()
    plain = copy.deepcopy(net).eval()
    smp.set_tensor_parallelism(net, auto=family != "gpt2")
    model = smp.DistributedModel(net).eval()
    assert any(True for _ in model.split_parameters())
    settings: tuple[dict[str, Any], ...] = ({}, {"num_beams": 3}, {"use_cache": False})
    for each in settings:
        want = plain.generate(ids, max_new_tokens=4, do_sample=False, **each)
        now = model.get_module().generate(ids, max_new_tokens=4, do_sample=False, **each)
        assert torch.equal(now, want), (each, now, want)
    if family == "gpt2":  # the script's own has what stands for it generate
        assert torch.equal(net.generate(ids, max_new_tokens=4, do_sample=False, **each), want)
        return
    cache = hf.DynamicCache()
    model(ids, past_key_values=cache)  # with gradients, of whole calls there are none
    with pytest.raises(UnsupportedError, match=r"keeps nothing in the DynamicCache.*no_grad"):
        model(ids[:, :1], past_key_values=cache)


def initialised_by_nobody() -> None:
    """What stands for a model whose class was kept from initialising it draws its own values."""
    hf, ids = _hf(), torch.zeros(1, 3, dtype=torch.int64)
    untied = gpt2()
    untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.detach() + 1)
    smp.set_tensor_parallelism(untied)
    with pytest.raises(SMPError, match=r"lm_head\.weight.* tie what the configuration"):
        smp.DistributedModel(untied)
    with mock.patch.object(hf.PreTrainedModel, "init_weights", return_value=None):
        with smp.model_creation(tensor_parallelism=True):
            module = gpt2()
        model = smp.DistributedModel(module)
    state = model.state_dict()
    assert "lm_head.weight" not in state
    weights = [each for name, each in state.items() if name.endswith(("query.weight", "1.weight"))]
    assert len(weights) == 4
    assert all(0.01 < each.std().item() < 0.03 for each in weights)  # initializer_range
    plain = gpt2()
    plain.load_state_dict(model.translation.to_theirs(state))
    found, want = (each.eval()(ids, output_hidden_states=True) for each in (model, plain))
    torch.testing.assert_close(found.logits, want.logits)
    assert len(found.hidden_states) == 3
    torch.testing.assert_close(found.hidden_states, want.hidden_states)
    model.load_state_dict(model.translation.to_ours(plain.state_dict()))


def full_checkpoints(path: str) -> None:
    """A full checkpoint has the form of Transformers, which can load it and whose it can load."""
    torch.manual_seed(2)
    with smp.tensor_parallelism():
        module = gpt2()
    model = smp.DistributedModel(module)
    smp.save_checkpoint(path, "full.pt", partial=False, model=model)
    want = model.state_dict()
    smp.barrier()
    plain = gpt2()
    plain.load_state_dict(torch.load(f"{path}/full.pt", weights_only=True))
    smp.barrier()
    if smp.rank() == 0:
        torch.save(plain.state_dict(), f"{path}/theirs.pt")
        (open(f"{path}/user_content.pt", "w")).close()
    smp.barrier()
    with smp.tensor_parallelism():
        other = gpt2()
    model = smp.DistributedModel(other)
    smp.resume_from_checkpoint(path, "theirs.pt", partial=False, model=model)
    got = model.state_dict()
    assert all(tensor_cases.same(got[key], value) for key, value in want.items())


def t5() -> Any:
    hf = _hf()
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    config = hf.T5Config(
        vocab_size=VOCAB, dropout_rate=0.0, decoder_start_token_id=0, **sizes, **_IDS
    )
    return hf.T5ForConditionalGeneration(config)


def llama() -> Any:
    hf = _hf()
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_sizes(num_key_value_heads=2), **_IDS))


def opt() -> Any:
    hf = _hf()
    config = hf.OPTConfig(
        **_sizes(ffn_dim=24, word_embed_proj_dim=32, dropout=0.0, pad_token_id=1), **_IDS
    )
    return hf.OPTForCausalLM(config)


#: Models that are split by their linears alone.
OTHERS: dict[str, Callable[[], Any]] = {each.__name__: each for each in (t5, llama, opt)}


def other_case(name: str) -> None:
    """Loss and gradients of a model whose linears are split are its own."""
    torch.manual_seed(1)
    with smp.tensor_parallelism():
        module = OTHERS[name]()
    torch.manual_seed(1)
    reference = OTHERS[name]()
    model = smp.DistributedModel(module)
    assert any(type(each).__name__ == "DistributedLinear" for each in module.modules())
    draws = generator(5)
    ids = torch.randint(
        2, VOCAB, (2 * tensor_cases.MICROBATCHES * smp.dp_size(), 7), generator=draws
    )
    shares = ids.chunk(smp.dp_size())
    for share in shares:
        for part in share.chunk(tensor_cases.MICROBATCHES):
            loss = reference(input_ids=part, labels=part).loss
            (loss / len(shares) / tensor_cases.MICROBATCHES).backward()
    own = shares[smp.dp_rank()]
    train(model, own, torch.ones_like(own))
    tensor_cases.compare_gradients(model, reference)
