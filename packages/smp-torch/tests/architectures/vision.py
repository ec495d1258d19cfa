"""Models of images.

A line holds what differs from the released configuration besides ``SIZES``. It keeps what makes
the architecture special: patterns of layers, few key-value heads, experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import batches
from architecture import Architecture


def _vision(
    name: str, model_class: str, batch: Any = batches.images, **changes: Any
) -> Architecture:
    return Architecture(name, "vision", model_class, batch, {"num_labels": 5, **changes})


def vision() -> Iterator[Architecture]:
    """Yields them."""
    stages = {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 16, 32]}
    yield _vision("vit", "ViTForImageClassification")
    yield _vision(
        "vit-masked", "ViTForMaskedImageModeling", batches.masked_patches, encoder_stride=8
    )
    yield _vision(
        "vit-mae",
        "ViTMAEForPreTraining",
        batches.noisy_patches,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
    )
    yield _vision("vit-msn", "ViTMSNForImageClassification")
    yield _vision("deit", "DeiTForImageClassification")
    yield _vision(
        "beit", "BeitForImageClassification", use_relative_position_bias=True, use_mean_pooling=True
    )
    yield _vision(
        "data2vec-vision",
        "Data2VecVisionForImageClassification",
        use_shared_relative_position_bias=True,
    )
    swin = {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 8,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    }
    yield _vision("swin", "SwinForImageClassification", **swin)
    yield _vision("swinv2", "Swinv2ForImageClassification", **swin)
    yield _vision("donut-swin", "DonutSwinForImageClassification", **swin)
    yield _vision(
        "focalnet",
        "FocalNetForImageClassification",
        patch_size=4,
        embed_dim=8,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
    )
    yield _vision("convnext", "ConvNextForImageClassification", patch_size=4, **stages)
    yield _vision("convnextv2", "ConvNextV2ForImageClassification", patch_size=4, **stages)
    yield _vision("resnet", "ResNetForImageClassification", embedding_size=8, **stages)
    yield _vision(
        "regnet", "RegNetForImageClassification", embedding_size=8, groups_width=4, **stages
    )
    yield _vision("bit", "BitForImageClassification", embedding_size=8, num_groups=2, **stages)
    yield _vision("poolformer", "PoolFormerForImageClassification", patch_size=7, **stages)
    yield _vision(
        "segformer",
        "SegformerForImageClassification",
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 16, 32],
        num_attention_heads=[1, 2, 2, 4],
    )
    yield _vision(
        "segformer-pixels",
        "SegformerForSemanticSegmentation",
        batches.segmented,
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 16, 32],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=16,
    )
    yield _vision(
        "cvt",
        "CvtForImageClassification",
        embed_dim=[8, 16, 32],
        num_heads=[1, 2, 4],
        depth=[1, 2, 3],
    )
    yield _vision(
        "levit",
        "LevitForImageClassification",
        image_size=64,
        patch_size=16,
        hidden_sizes=[16, 32, 48],
        num_attention_heads=[2, 4, 4],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    )
    yield _vision(
        "mobilevit",
        "MobileViTForImageClassification",
        patch_size=2,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32],
    )
    yield _vision(
        "mobilevitv2",
        "MobileViTV2ForImageClassification",
        patch_size=2,
        image_size=64,
        width_multiplier=0.25,
    )
    yield _vision("mobilenet-v1", "MobileNetV1ForImageClassification", depth_multiplier=0.25)
    yield _vision("mobilenet-v2", "MobileNetV2ForImageClassification", depth_multiplier=0.25)
    yield _vision(
        "efficientnet",
        "EfficientNetForImageClassification",
        width_coefficient=0.25,
        depth_coefficient=0.5,
        hidden_dim=320,
    )
    yield _vision(
        "swiftformer",
        "SwiftFormerForImageClassification",
        depths=[1, 1, 2, 1],
        embed_dims=[8, 16, 24, 32],
    )
    yield _vision(
        "pvt",
        "PvtForImageClassification",
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 24, 32],
        num_attention_heads=[1, 2, 2, 4],
        image_size=64,
    )
    yield _vision(
        "pvt-v2",
        "PvtV2ForImageClassification",
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 24, 32],
        num_attention_heads=[1, 2, 2, 4],
        mlp_ratios=[2, 2, 2, 2],
        image_size=64,
    )
    yield _vision("dinov2", "Dinov2ForImageClassification")
    yield _vision("dinov2-registers", "Dinov2WithRegistersForImageClassification")
    yield _vision(
        "hiera",
        "HieraForImageClassification",
        embed_dim=8,
        image_size=[64, 64],
        patch_size=[7, 7],
        depths=[1, 1, 2, 1],
        num_heads=[1, 1, 2, 4],
    )
    yield _vision("imagegpt", "ImageGPTForImageClassification", batches.image_tokens, num_labels=5)
    yield _vision(
        "dpt",
        "DPTForSemanticSegmentation",
        batches.segmented,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
    )
