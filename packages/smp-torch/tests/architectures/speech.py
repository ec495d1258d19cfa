"""Models of sound.

A line holds what differs from the released configuration besides ``SIZES``. It keeps what makes
the architecture special: patterns of layers, few key-value heads, experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import batches
from architecture import Architecture


def _speech(
    name: str, model_class: str, batch: Any = batches.waveforms, **changes: Any
) -> Architecture:
    return Architecture(name, "speech", model_class, batch, changes)


def speech() -> Iterator[Architecture]:
    """Yields them."""
    conv = {
        "conv_dim": [16] * 7,
        "num_feat_extract_layers": 7,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
        "mask_time_length": 3,
    }
    yield _speech("wav2vec2", "Wav2Vec2ForCTC", **conv)
    yield _speech(
        "wav2vec2-large",
        "Wav2Vec2ForCTC",
        **conv,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        conv_bias=True,
    )
    yield _speech(
        "wav2vec2-classifier",
        "Wav2Vec2ForSequenceClassification",
        batches.waveform_classes,
        **conv,
        num_labels=5,
        classifier_proj_size=16,
    )
    yield _speech(
        "wav2vec2-conformer",
        "Wav2Vec2ConformerForCTC",
        vocab_size=96,
        **conv,
        conv_depthwise_kernel_size=5,
    )
    yield _speech(
        "wav2vec2-bert",
        "Wav2Vec2BertForCTC",
        batches.feature_frames,
        vocab_size=96,
        feature_projection_input_dim=16,
        mask_time_length=3,
        conv_depthwise_kernel_size=5,
    )
    yield _speech("hubert", "HubertForCTC", **conv)
    yield _speech(
        "sew",
        "SEWForCTC",
        conv_dim=[16] * 13,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        mask_time_length=3,
        squeeze_factor=2,
    )
    yield _speech(
        "sew-d",
        "SEWDForCTC",
        conv_dim=[16] * 13,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        mask_time_length=3,
        squeeze_factor=2,
        position_buckets=8,
        max_position_embeddings=16,
    )
    yield _speech("unispeech", "UniSpeechForCTC", **conv, num_ctc_classes=96)
    yield _speech("unispeech-sat", "UniSpeechSatForCTC", **conv)
    yield _speech("wavlm", "WavLMForCTC", **conv, num_buckets=16, max_bucket_distance=32)
    yield _speech(
        "data2vec-audio",
        "Data2VecAudioForCTC",
        **{**conv, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 3},
    )
    yield _speech(
        "whisper",
        "WhisperForConditionalGeneration",
        batches.spectrograms,
        d_model=32,
        max_source_positions=20,
        max_target_positions=64,
        num_mel_bins=16,
        decoder_start_token_id=1,
    )
    yield _speech(
        "speech-to-text",
        "Speech2TextForConditionalGeneration",
        batches.frames,
        d_model=32,
        max_source_positions=100,
        max_target_positions=64,
        input_feat_per_channel=16,
        conv_channels=32,
    )
    yield _speech(
        "ast",
        "ASTForAudioClassification",
        batches.spectrogram_classes,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
        max_length=32,
        num_mel_bins=16,
        num_labels=5,
    )
    yield _speech(
        "moonshine",
        "MoonshineForConditionalGeneration",
        batches.moonshine,
        pad_token_id=0,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        encoder_num_key_value_heads=4,
        decoder_num_key_value_heads=4,
        decoder_start_token_id=1,
    )
