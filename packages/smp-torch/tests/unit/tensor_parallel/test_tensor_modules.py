"""The modules of tensor parallelism in one process, beside plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.pieces import Rectangle
from smdistributed.modelparallel.torch.tensor_parallel.group import TensorGroup
from smdistributed.modelparallel.torch.tensor_parallel.module import (
    Slice,
    distributed_modules_in,
    distributed_modules_on_trial,
    taken,
)
from smdistributed.modelparallel.torch.tensor_parallel.words import Moment

SIZES: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_size": 4,
    "hidden_size": 10,
    "attention_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}


def plain_attention(layer: Any, hidden: torch.Tensor, source: torch.Tensor, mask: Any) -> Any:
    """The reference in words of plain torch: scores, masks, softmax, sum."""
    normed = hidden if layer.pre_layernorm is None else layer.pre_layernorm(hidden)
    source = normed if source is hidden else source

    def heads(states: torch.Tensor, projection: Any) -> torch.Tensor:
        made = F.linear(states, projection.weight, projection.bias)
        return made.view(*states.shape[:2], 2, 4).transpose(1, 2)

    queries, keys, values = (
        heads(states, projection)
        for states, projection in (
            (normed, layer.query),
            (source, layer.key),
            (source, layer.value),
        )
    )
    scores = queries @ keys.transpose(-1, -2) / 2
    lowest = torch.finfo(scores.dtype).min
    if layer.causal_mask_size is not None:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, lowest)
    scores = (scores + mask).clamp(min=lowest)
    context = (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)
    total = F.linear(context, layer.dense.weight, layer.dense.bias) + hidden
    return total if layer.layernorm is None else layer.layernorm(total)


@pytest.mark.parametrize("causal", [None, 8])
@pytest.mark.parametrize(("pre", "post"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("is_cross", [False, True])
def test_attention_is_what_the_documents_say(
    causal: int | None, pre: bool, post: bool, is_cross: bool
) -> None:
    torch.manual_seed(0)
    layer = smp.nn.DistributedAttentionLayer(
        **SIZES,
        causal_mask_size=None if is_cross else causal,
        pre_layernorm=pre,
        post_layernorm=post,
        cross_attention=is_cross,
    )
    hidden, cross = torch.randn(3, 5, 10), torch.randn(3, 7, 10)
    source = cross if is_cross else hidden
    mask = torch.zeros(3, 1, 1, source.shape[1])
    mask[0, ..., :2] = mask[1] = torch.finfo(torch.float32).min
    got = layer((hidden, cross, mask) if is_cross else (hidden, mask))
    torch.testing.assert_close(got, plain_attention(layer, hidden, source, mask))


@pytest.mark.parametrize(("word", "function"), [("gelu", F.gelu), ("relu", F.relu)])
def test_output_layer_is_what_the_documents_say(word: str, function: Any) -> None:
    layer = smp.nn.DistributedTransformerOutputLayer(
        10, 12, 0.0, word, pre_layernorm=True, post_layernorm=True
    )
    states = torch.randn(2, 3, 10)
    inner = function(F.linear(layer.pre_layernorm(states), layer.dense1.weight, layer.dense1.bias))
    total = states + F.linear(inner, layer.dense2.weight, layer.dense2.bias)
    torch.testing.assert_close(layer(states), layer.layernorm(total))


def test_everything_but_hidden_states_is_returned_unchanged() -> None:
    layer = smp.nn.DistributedTransformerLayer(
        **SIZES, intermediate_size=12, add_cross_attention=True
    )
    given = (torch.randn(2, 3, 10), torch.randn(2, 4, 10), None, torch.zeros(2, 1, 1, 4))
    result = layer(given)
    assert len(result) == 4
    assert all(got is want for got, want in zip(result[1:], given[1:], strict=True))


def test_initial_values_are_those_of_torch() -> None:
    torch.manual_seed(1)
    ours = smp.nn.DistributedLinear(6, 5)
    torch.manual_seed(1)
    torchs = nn.Linear(6, 5)
    assert torch.equal(ours.weight, torchs.weight)
    assert torch.equal(ours.bias, torchs.bias)


def lm(**options: Any) -> smp.nn.DistributedTransformerLMHead:
    given = {**SIZES, "num_layers": 1, "intermediate_size": 8, "vocab_size": 11, **options}
    return smp.nn.DistributedTransformerLMHead(**given, num_positions=6)


def test_language_model_checks_its_inputs() -> None:
    model = lm()
    ids = torch.zeros(2, 5, dtype=torch.int64)
    assert model((ids, None, None, None, None)).shape == (2, 5, 11)
    assert lm(add_lm_head=False)((ids, None, None, None, None)).shape == (2, 5, 10)
    loss, logits = model((ids, None, None, None, ids))
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), ids.flatten()))
    for inputs, message in (
        ((ids, None), r"takes \(input_ids, .*, labels\); received 2 items"),
        ((ids, ids[:, 1:], None, None, None), r"shape of input_ids, \(2, 5\).*\(2, 4\)"),
        ((ids, None, ids, None, None), "num_token_types is 0"),
        ((torch.zeros(1, 7, dtype=torch.int64), None, None, None, None), r"num_positions \(6\)"),
    ):
        with pytest.raises(ValueError, match=message):
            model(inputs)
    with pytest.raises(TypeError, match="no_such_option"):
        lm(no_such_option=1)
    with pytest.raises(ValueError, match="num_layers must be at least 1"):
        smp.nn.DistributedTransformer(num_layers=0)
    with pytest.raises(ValueError, match="longer than causal_mask_size"):
        lm(causal_mask_size=4)((ids, None, None, None, None))


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_takes_packed_heads(causal: bool) -> None:
    layer = smp.nn.FlashAttentionLayer(0.0, attention_head_size=4)
    packed = torch.randn(2, 5, 3, 3, 4)
    queries, keys, values = (packed[:, :, place].transpose(1, 2) for place in range(3))
    scores = queries @ keys.transpose(-1, -2) / 2
    if causal:
        scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(layer(packed, causal=causal), scores.softmax(-1) @ values)


def test_flash_attention_with_a_mask() -> None:
    layer = smp.nn.FlashAttentionLayer(
        0.0, scale_attention_scores=False, triton_flash_attention=True, use_alibi=True
    )
    packed, mask = torch.randn(2, 5, 3, 3, 4), torch.randn(1, 3, 1, 5)
    queries, keys, values = (packed[:, :, place].transpose(1, 2) for place in range(3))
    scores = queries @ keys.transpose(-1, -2) + mask
    scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(layer(packed, mask, causal=True), scores.softmax(-1) @ values)


def test_flash_attention_names_what_is_missing() -> None:
    with pytest.raises(ValueError, match="needs attention_head_size"):
        smp.nn.FlashAttentionLayer()
    with pytest.raises(ValueError, match="needs layer_idx"):
        smp.nn.FlashAttentionLayer(attention_head_size=4, scale_attn_by_layer_idx=True)
    with pytest.raises(ValueError, match="needs triton_flash_attention"):
        smp.nn.FlashAttentionLayer(attention_head_size=4, use_alibi=True)
    layer = smp.nn.FlashAttentionLayer(scale=1.0)
    with pytest.raises(ValueError, match="attn_mask needs"):
        layer(torch.randn(1, 2, 3, 1, 4), torch.zeros(1))
    with pytest.raises(ValueError, match="must have the shape"):
        layer(torch.randn(1, 2, 4))


def test_slices_cover_the_whole() -> None:
    kept = Slice((4, 6), 1, nn.init.zeros_, None, 0)
    assert [kept.part(3, rank) for rank in range(3)] == [
        Rectangle((0, 2 * rank), (4, 2)) for rank in range(3)
    ]


def test_fused_slices_have_a_share_of_each_section() -> None:
    kept = Slice((2, 8), 1, nn.init.zeros_, None, 0, (4, 2, 2))
    whole = torch.arange(16).view(2, 8)
    parts = [taken(whole, kept.part(2, rank)) for rank in range(2)]
    assert parts[0].tolist() == [[0, 1, 4, 6], [8, 9, 12, 14]]
    assert parts[1].tolist() == [[2, 3, 5, 7], [10, 11, 13, 15]]
    module = smp.nn.DistributedModule()
    module.add_slice("fused", (6, 2), 0, nn.init.ones_, sections=(4, 2))
    assert module.fused.shape == (6, 2)
    with pytest.raises(ValueError, match=r"must add up to 6; received \[4, 4\]"):
        module.add_slice("other", (6, 2), 0, nn.init.ones_, sections=(4, 4))


def test_unregistered_arguments_are_refused() -> None:
    class Plain(nn.Module):
        pass

    with pytest.raises(TypeError, match=r"smp\.nn\.DistributedModule; received"):
        smp.tp_register(nn.Linear)(Plain)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.nn\.Module class is registered"):
        smp.tp_register_with_module(int, smp.nn.DistributedLinear)  # type: ignore[arg-type]


class OneOther:
    """The other of two ranks says the same, but for some numbers of each word."""

    size, rank = 2, 0

    def __init__(self, *more: int) -> None:
        self._more = more

    def compare(self, word: list[int]) -> list[list[int]]:
        more = [0, *self._more, *[0] * len(word)]
        return [word, [mine | theirs for mine, theirs in zip(word, more, strict=False)]]


def test_flags_of_many_models_are_told_in_one_word() -> None:
    group: Any = TensorGroup(OneOther(0b101, 0, 1 << 31))
    flags = [place == 50 for place in range(200)]
    told = group.end_step(flags)
    assert len(told) == 200
    assert [place for place, flag in enumerate(told) if flag] == [0, 2, 50, 95]


class Other(OneOther):
    """The other of two ranks says another word, which it would tell of by a text."""

    def __init__(self, word: Sequence[int], text: str) -> None:
        super().__init__()
        self._word, self._text = list(word), text

    def compare(self, word: list[int]) -> list[list[int]]:
        return [word, [*self._word, *[0] * (len(word) - len(self._word))]]

    def compare_texts(self, text: str) -> list[str]:
        return [text, self._text]


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ([Moment.AHEAD, 7], "must compute the same modules for what Python asks of activations"),
        ([Moment.RECORDED], "must do the same, since they compute modules together"),
        ([Moment.CALL, 7], "must do the same, since they compute modules together"),
    ],
)
def test_ranks_that_ask_otherwise_of_activations_are_told_so(word: list[int], rule: str) -> None:
    """Else one would wait in a module for another, which has gone on."""
    other: Any = Other(word, "what it does")
    with pytest.raises(SMPError, match=rf"{rule}.*; received tp_rank 0: .*0\.linear.*what it does"):
        TensorGroup(other).ahead(["0.linear"])
    alike: Any = OneOther()
    TensorGroup(alike).ahead(["0.linear"])
    assert TensorGroup(alike).recorded([5, 6])[1][:2] == [5, 6]


class NobodyElse:
    """A group of two whose other rank is elsewhere: it takes part in nothing."""

    size, rank = 2, 1


MODULES = {
    "linear": lambda: (smp.nn.DistributedLinear(6, 4), torch.randn(3, 5, 6)),
    "embedding": lambda: (smp.nn.DistributedEmbedding(8, 6), torch.randint(8, (3, 5))),
    "attention": lambda: (
        smp.nn.DistributedAttentionLayer(**SIZES),
        (torch.randn(3, 5, 10), torch.zeros(3, 1, 1, 5)),
    ),
    "layers": lambda: (
        smp.nn.DistributedTransformer(num_layers=2, intermediate_size=8, **SIZES),
        (torch.randn(3, 5, 10), torch.zeros(3, 1, 1, 5)),
    ),
}


@pytest.mark.parametrize("is_prescaled", [False, True])
@pytest.mark.parametrize("keeps_gathered", [False, True])
@pytest.mark.parametrize("kind", MODULES)
def test_a_rank_tries_modules_out_by_itself(
    kind: str, keeps_gathered: bool, is_prescaled: bool
) -> None:
    nobody: Any = NobodyElse()
    group = TensorGroup(nobody, is_prescaled=is_prescaled, keeps_gathered=keeps_gathered)
    with distributed_modules_in(group):
        module, given = MODULES[kind]()
        with distributed_modules_on_trial():
            found = module(given)
            tensor = found[0] if isinstance(found, tuple) else found
            tensor.square().sum().backward()
        with pytest.raises(AttributeError, match="compare"):
            module(given)
    assert tensor.shape[0] == 3
    assert tensor.isfinite().all()
    assert all(each.grad is not None for each in module.parameters())


def test_checkpointed_layers_take_their_tuple_as_they_do_otherwise() -> None:
    torch.manual_seed(0)
    layers = [smp.nn.DistributedTransformerLayer(intermediate_size=8, **SIZES) for _ in range(3)]
    inputs = torch.randn(2, 3, 10), torch.zeros(2, 1, 1, 3)
    checkpoint = smp.patches.checkpoint.checkpoint_sequential
    for strategy in ("each", "contiguous", "group_2"):
        sequential = nn.Sequential(*layers)
        assert torch.equal(checkpoint(sequential, inputs, strategy)[0], sequential(inputs)[0])
    with pytest.raises(ValueError, match="received a tuple of 2: set pack_args_as_tuple=True"):
        checkpoint(nn.Sequential(*layers, nn.Identity()), inputs)
