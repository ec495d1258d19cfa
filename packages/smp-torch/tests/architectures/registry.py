"""Every architecture of the survey, by name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import decoders
import encoder_decoders
import encoders
import multimodal
import speech
import vision
from architecture import Architecture

ARCHITECTURES: Mapping[str, Architecture] = {
    each.name: each
    for each in itertools.chain(
        decoders.decoders(),
        encoders.encoders(),
        encoder_decoders.encoder_decoders(),
        vision.vision(),
        speech.speech(),
        multimodal.multimodal(),
    )
}
FAMILIES = tuple(dict.fromkeys(each.family for each in ARCHITECTURES.values()))
#: One of each kind, for a run of less than a minute.
REPRESENTATIVE = ("gpt2", "gemma2", "mixtral", "bert", "t5", "bart", "vit", "wav2vec2")
