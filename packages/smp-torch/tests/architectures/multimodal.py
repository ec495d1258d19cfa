"""Models of text and images.

A line holds what differs from the released configuration besides ``SIZES``. It keeps what makes
the architecture special: patterns of layers, few key-value heads, experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import batches
from architecture import Architecture


def _several(name: str, model_class: str, batch: Any, **changes: Any) -> Architecture:
    return Architecture(name, "multimodal", model_class, batch, changes)


def multimodal() -> Iterator[Architecture]:
    """Yields them."""
    towers = {"projection_dim": 16}
    yield _several("clip", "CLIPModel", batches.captions, **towers)
    yield _several("siglip", "SiglipModel", batches.captions_without_mask)
    yield _several(
        "blip",
        "BlipForConditionalGeneration",
        batches.described,
        text_config={"encoder_hidden_size": 32},
        **towers,
    )
    yield _several(
        "altclip", "AltCLIPModel", batches.captions, **towers, text_config={"project_dim": 16}
    )
    yield _several("chinese-clip", "ChineseCLIPModel", batches.captions, **towers)
    yield _several("clipseg", "CLIPSegModel", batches.captions, **towers)
    yield _several("owlvit", "OwlViTModel", batches.captions, **towers)
    yield _several("git", "GitForCausalLM", batches.described)
    yield _several(
        "vilt", "ViltForQuestionAnswering", batches.answered, num_labels=5, max_image_length=-1
    )
    yield _several("layoutlm", "LayoutLMForMaskedLM", batches.pages, max_2d_position_embeddings=64)
    yield _several(
        "layoutlmv3",
        "LayoutLMv3ForTokenClassification",
        batches.labelled_pages,
        input_size=32,
        max_2d_position_embeddings=64,
        coordinate_size=5,
        shape_size=6,
        visual_embed=True,
        num_labels=5,
    )
    yield _several(
        "lilt",
        "LiltForTokenClassification",
        batches.labelled_boxes,
        hidden_size=48,
        max_2d_position_embeddings=64,
        channel_shrink_ratio=2,
        num_labels=5,
    )
    yield _several(
        "lxmert",
        "LxmertForQuestionAnswering",
        batches.regions,
        l_layers=2,
        x_layers=2,
        r_layers=2,
        visual_feat_dim=16,
        num_qa_labels=5,
    )
    yield _several(
        "visual-bert",
        "VisualBertForVisualReasoning",
        batches.visual_embeddings,
        visual_embedding_dim=16,
        num_labels=5,
    )
    yield _several("llava", "LlavaForConditionalGeneration", batches.prompted, image_token_id=95)
    yield _several(
        "blip-2",
        "Blip2ForConditionalGeneration",
        batches.prompted,
        image_token_id=95,
        image_token_index=95,
        num_query_tokens=16,
    )
