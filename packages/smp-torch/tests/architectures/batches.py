"""Batches: what each kind of model is called with, labels included."""

from __future__ import annotations

from typing import Any

import torch
from architecture import SIZES, Batch, Shape

#: Ids below are special tokens: padding, start, end.
_FIRST_WORD = 3
_IGNORED = -100


def _text_config(config: Any) -> Any:
    """Returns the configuration of the text part of a model with several."""
    return getattr(config, "text_config", None) or config


def _words(config: Any, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random tokens, padded at the end of the rows that shall be, and their mask."""
    size = getattr(_text_config(config), "vocab_size", SIZES["vocab_size"])
    tokens = torch.randint(_FIRST_WORD, size, (shape.rows, shape.length))
    mask = torch.ones_like(tokens)
    mask[list(shape.padded), -shape.length // 4 :] = 0
    return tokens.masked_fill(mask == 0, 0), mask


def causal(config: Any, shape: Shape) -> Batch:
    """Predict the next token."""
    tokens, mask = _words(config, shape)
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, _IGNORED),
    }


def causal_without_mask(config: Any, shape: Shape) -> Batch:
    """Predict the next token; the model has no masks."""
    tokens = _words(config, shape)[0]
    return {"input_ids": tokens, "labels": tokens}


def masked(config: Any, shape: Shape) -> Batch:
    """Predict one token in three."""
    tokens, mask = _words(config, shape)
    hidden = (torch.rand(tokens.shape) > 1 / 3) | (mask == 0)
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(hidden, _IGNORED),
    }


def masked_without_mask(config: Any, shape: Shape) -> Batch:
    """Predict one token in three; the model has no masks."""
    batch = masked(config, shape)
    del batch["attention_mask"]
    return batch


def pairs(config: Any, shape: Shape) -> Batch:
    """Predict one token in three of two sentences that are told apart by their type."""
    batch = masked(config, shape)
    types = torch.zeros_like(batch["input_ids"])
    types[:, shape.length // 2 :] = 1
    return {**batch, "token_type_ids": types}


def classified(config: Any, shape: Shape) -> Batch:
    """Classify a sentence."""
    tokens, mask = _words(config, shape)
    labels = torch.randint(config.num_labels, (shape.rows,))
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def questions(config: Any, shape: Shape) -> Batch:
    """Find the span of an answer."""
    tokens, mask = _words(config, shape)
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "start_positions": torch.randint(0, 4, (shape.rows,)),
        "end_positions": torch.randint(4, 8, (shape.rows,)),
    }


def discriminated(config: Any, shape: Shape) -> Batch:
    """Tell for each token whether it was replaced."""
    tokens, mask = _words(config, shape)
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": torch.randint(2, tokens.shape),
    }


def sequence_to_sequence(config: Any, shape: Shape) -> Batch:
    """Predict a text from another; the model makes the decoder's inputs from the labels."""
    tokens, mask = _words(config, shape)
    answer, answer_mask = _words(config, Shape(shape.rows, shape.length - 4, shape.padded))
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": answer.masked_fill(answer_mask == 0, _IGNORED),
    }


def same_length(config: Any, shape: Shape) -> Batch:
    """Predict a text from another that is as long."""
    tokens, mask = _words(config, shape)
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": _words(config, shape)[0].masked_fill(mask == 0, _IGNORED),
    }


def _images(config: Any, shape: Shape) -> torch.Tensor:
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", 32)
    channels = getattr(vision, "num_channels", 3)
    size = tuple(size) if isinstance(size, list | tuple) else (size, size)
    return torch.randn(shape.rows, channels, *size)


def images(config: Any, shape: Shape) -> Batch:
    """Classify an image."""
    labels = torch.randint(config.num_labels, (shape.rows,))
    return {"pixel_values": _images(config, shape), "labels": labels}


def noisy_patches(config: Any, shape: Shape) -> Batch:
    """Restore the patches that have the most noise."""
    patches = (config.image_size // config.patch_size) ** 2
    return {
        "pixel_values": _images(config, shape),
        "noise": torch.rand(shape.rows, patches),
    }


def segmented(config: Any, shape: Shape) -> Batch:
    """Classify every pixel."""
    pixels = _images(config, shape)
    labels = torch.randint(config.num_labels, (shape.rows, *pixels.shape[-2:]))
    return {"pixel_values": pixels, "labels": labels}


def masked_patches(config: Any, shape: Shape) -> Batch:
    """Predict the pixels of one patch in three."""
    patches = (config.image_size // config.patch_size) ** 2
    return {
        "pixel_values": _images(config, shape),
        "bool_masked_pos": torch.arange(patches).expand(shape.rows, -1) % 3 == 0,
    }


def captions(config: Any, shape: Shape) -> Batch:
    """Tell which text belongs to which image of the microbatch."""
    tokens, mask = _words(config, shape)
    tokens[:, -1] = SIZES["eos_token_id"]
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "pixel_values": _images(config, shape),
        "return_loss": True,
    }


def described(config: Any, shape: Shape) -> Batch:
    """Predict the text that describes an image."""
    return {**causal(config, shape), "pixel_values": _images(config, shape)}


def answered(config: Any, shape: Shape) -> Batch:
    """Classify a pair of an image and a question; the labels are scores."""
    tokens, mask = _words(config, shape)
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "pixel_values": _images(config, shape),
        "labels": torch.rand(shape.rows, config.num_labels),
    }


def prompted(config: Any, shape: Shape) -> Batch:
    """Predict a text that begins with the place of an image."""
    batch = described(config, shape)
    # Renamed in Transformers 5.
    place = getattr(config, "image_token_id", None) or config.image_token_index
    for name in ("input_ids", "labels"):
        batch[name] = batch[name].clamp(max=place - 1)
    vision = config.vision_config
    places = (vision.image_size // vision.patch_size) ** 2
    prefix = torch.full((shape.rows, places), place)
    ones = torch.ones_like(prefix)
    return {
        "input_ids": torch.cat([prefix, batch["input_ids"]], 1),
        "attention_mask": torch.cat([ones, batch["attention_mask"]], 1),
        "labels": torch.cat([ones * _IGNORED, batch["labels"]], 1),
        "pixel_values": batch["pixel_values"],
    }


def pages(config: Any, shape: Shape) -> Batch:
    """Predict one token in three on a page, from the words' boxes too."""
    corners = torch.randint(0, 30, (shape.rows, shape.length, 2))
    return {**masked(config, shape), "bbox": torch.cat([corners, corners + 5], -1)}


def labelled_pages(config: Any, shape: Shape) -> Batch:
    """Classify every word on a page, from its box and the picture too."""
    batch = pages(config, shape)
    labels = torch.randint(config.num_labels, batch["input_ids"].shape)
    return {**batch, "labels": labels, "pixel_values": _images(config, shape)}


def regions(config: Any, shape: Shape) -> Batch:
    """Answer a question about regions of an image."""
    tokens, mask = _words(config, shape)
    features = torch.randn(shape.rows, 5, config.visual_feat_dim)
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": torch.randint(config.num_qa_labels, (shape.rows,)),
        "visual_feats": features,
        "visual_pos": torch.rand(shape.rows, 5, 4),
    }


def visual_embeddings(config: Any, shape: Shape) -> Batch:
    """Classify a text with embedded regions of an image."""
    tokens, mask = _words(config, shape)
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "visual_embeds": torch.randn(shape.rows, 5, config.visual_embedding_dim),
        "visual_attention_mask": torch.ones(shape.rows, 5),
        "labels": torch.randint(config.num_labels, (shape.rows,)),
    }


def waveforms(config: Any, shape: Shape) -> Batch:
    """Transcribe a waveform."""
    samples = 400 * shape.length
    mask = torch.ones(shape.rows, samples, dtype=torch.long)
    mask[list(shape.padded), -samples // 4 :] = 0
    return {
        "input_values": torch.randn(shape.rows, samples) * mask,
        "attention_mask": mask,
        "labels": torch.randint(_FIRST_WORD, config.vocab_size, (shape.rows, 4)),
    }


def waveform_classes(config: Any, shape: Shape) -> Batch:
    """Classify a waveform."""
    batch = waveforms(config, shape)
    return {**batch, "labels": torch.randint(config.num_labels, (shape.rows,))}


def spectrograms(config: Any, shape: Shape) -> Batch:
    """Transcribe a spectrogram, time last."""
    frames = 2 * config.max_source_positions
    return {
        "input_features": torch.randn(shape.rows, config.num_mel_bins, frames),
        "labels": torch.randint(_FIRST_WORD, config.vocab_size, (shape.rows, shape.length)),
    }


def frames(config: Any, shape: Shape) -> Batch:
    """Transcribe a spectrogram, time second."""
    mask = torch.ones(shape.rows, 4 * shape.length, dtype=torch.long)
    mask[list(shape.padded), -shape.length :] = 0
    size = config.input_feat_per_channel * config.input_channels
    labels = torch.randint(_FIRST_WORD, config.vocab_size, (shape.rows, shape.length))
    return {
        "input_features": torch.randn(shape.rows, 4 * shape.length, size) * mask[..., None],
        "attention_mask": mask,
        "labels": labels,
    }


def feature_frames(config: Any, shape: Shape) -> Batch:
    """Transcribe precomputed features."""
    mask = torch.ones(shape.rows, 2 * shape.length, dtype=torch.long)
    mask[list(shape.padded), -shape.length :] = 0
    size = config.feature_projection_input_dim
    return {
        "input_features": torch.randn(shape.rows, 2 * shape.length, size),
        "attention_mask": mask,
        "labels": torch.randint(_FIRST_WORD, config.vocab_size, (shape.rows, 4)),
    }


def spectrogram_classes(config: Any, shape: Shape) -> Batch:
    """Classify a spectrogram."""
    return {
        "input_values": torch.randn(shape.rows, config.max_length, config.num_mel_bins),
        "labels": torch.randint(config.num_labels, (shape.rows,)),
    }


def image_tokens(config: Any, shape: Shape) -> Batch:
    """Classify an image that is given as a sequence of colours."""
    return {
        "input_ids": torch.randint(config.vocab_size - 1, (shape.rows, shape.length)),
        "labels": torch.randint(config.num_labels, (shape.rows,)),
    }


def captions_without_mask(config: Any, shape: Shape) -> Batch:
    """As ``captions``, for a text tower that sees its padding."""
    batch = captions(config, shape)
    del batch["attention_mask"]
    return batch


def moonshine(config: Any, shape: Shape) -> Batch:
    """Transcribe a waveform by a decoder."""
    return {
        "input_values": torch.randn(shape.rows, 4000),
        "labels": torch.randint(_FIRST_WORD, config.vocab_size, (shape.rows, shape.length)),
    }


def labelled_boxes(config: Any, shape: Shape) -> Batch:
    """Classify every word on a page, from its box too."""
    batch = pages(config, shape)
    return {**batch, "labels": torch.randint(config.num_labels, batch["input_ids"].shape)}
