"""Models that see the whole text.

A line holds what differs from the released configuration besides ``SIZES``. It keeps what makes
the architecture special: patterns of layers, few key-value heads, experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import batches
from architecture import Architecture


def _encoder(
    name: str, model_class: str, batch: Any = batches.masked, **changes: Any
) -> Architecture:
    return Architecture(name, "encoder", model_class, batch, changes)


def encoders() -> Iterator[Architecture]:
    """Yields them."""
    yield _encoder("bert", "BertForMaskedLM", batches.pairs)
    yield _encoder("bert-classifier", "BertForSequenceClassification", batches.classified)
    yield _encoder("bert-questions", "BertForQuestionAnswering", batches.questions)
    yield _encoder("roberta", "RobertaForMaskedLM")
    yield _encoder("roberta-prelayernorm", "RobertaPreLayerNormForMaskedLM")
    yield _encoder("xlm-roberta", "XLMRobertaForMaskedLM")
    yield _encoder("xlm-roberta-xl", "XLMRobertaXLForMaskedLM")
    yield _encoder("camembert", "CamembertForMaskedLM")
    yield _encoder("distilbert", "DistilBertForMaskedLM", hidden_dim=64)
    yield _encoder("albert", "AlbertForMaskedLM", batches.pairs, embedding_size=16)
    yield _encoder("electra", "ElectraForMaskedLM", embedding_size=16)
    yield _encoder(
        "electra-discriminator", "ElectraForPreTraining", batches.discriminated, embedding_size=16
    )
    yield _encoder(
        "deberta",
        "DebertaForMaskedLM",
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        max_relative_positions=8,
        position_biased_input=False,
    )
    yield _encoder(
        "deberta-v2",
        "DebertaV2ForMaskedLM",
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=8,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        conv_kernel_size=3,
        position_biased_input=False,
    )
    yield _encoder("mpnet", "MPNetForMaskedLM")
    yield _encoder("xlm", "XLMWithLMHeadModel", max_position_embeddings=64)
    yield _encoder("flaubert", "FlaubertWithLMHeadModel", layerdrop=0.1)
    yield _encoder("xlnet", "XLNetLMHeadModel", d_inner=64, d_model=32, n_head=4, n_layer=4)
    yield _encoder("longformer", "LongformerForMaskedLM", attention_window=4)
    yield _encoder("big-bird", "BigBirdForMaskedLM", block_size=2, num_random_blocks=1)
    yield _encoder(
        "funnel",
        "FunnelForMaskedLM",
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
        block_sizes=[1, 1, 1],
    )
    yield _encoder("fnet", "FNetForMaskedLM", batches.masked_without_mask)
    yield _encoder(
        "modernbert", "ModernBertForMaskedLM", local_attention=6, cls_token_id=1, sep_token_id=2
    )
    yield _encoder("convbert", "ConvBertForMaskedLM", embedding_size=16)
    yield _encoder("squeezebert", "SqueezeBertForMaskedLM", embedding_size=32)
    yield _encoder(
        "mobilebert", "MobileBertForMaskedLM", embedding_size=16, intra_bottleneck_size=16
    )
    yield _encoder(
        "rembert", "RemBertForMaskedLM", input_embedding_size=16, output_embedding_size=24
    )
    yield _encoder(
        "canine",
        "CanineForSequenceClassification",
        batches.classified,
        num_hash_buckets=32,
        local_transformer_stride=8,
    )
    yield _encoder(
        "nystromformer", "NystromformerForMaskedLM", num_landmarks=4, segment_means_seq_len=4
    )
    yield _encoder("yoso", "YosoForMaskedLM", use_expectation=True)
    yield _encoder("ibert", "IBertForMaskedLM")
    yield _encoder("megatron-bert", "MegatronBertForMaskedLM")
    yield _encoder("roformer", "RoFormerForMaskedLM", embedding_size=32)
    yield _encoder("ernie", "ErnieForMaskedLM")
    yield _encoder(
        "esm",
        "EsmForMaskedLM",
        vocab_size=96,
        pad_token_id=0,
        mask_token_id=4,
        position_embedding_type="rotary",
        token_dropout=True,
    )
    yield _encoder("luke", "LukeForMaskedLM", entity_vocab_size=8, entity_emb_size=16)
    yield _encoder("data2vec-text", "Data2VecTextForMaskedLM")
    yield _encoder(
        "perceiver",
        "PerceiverForSequenceClassification",
        batches.classified,
        d_model=32,
        d_latents=32,
        num_latents=8,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        qk_channels=32,
        v_channels=32,
    )
    yield _encoder("eurobert", "EuroBertForMaskedLM", mask_token_id=4)
    yield _encoder("nomic-bert", "NomicBertForMaskedLM")
