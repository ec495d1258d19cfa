"""RoBERTa: its encoder is that of BERT.

Source: model-parallel-extended-features-pytorch-hugging-face.md.
"""

from __future__ import annotations

import dataclasses

from smdistributed.modelparallel.torch.nn.huggingface import bert
from smdistributed.modelparallel.torch.nn.huggingface.family import Family
from smdistributed.modelparallel.torch.nn.huggingface.translation import Translations

MAP = dataclasses.replace(bert.MAP, name="RoBERTa")
ENCODER = dataclasses.replace(bert.ENCODER, name="RoBERTa")

FAMILY = Family(ENCODER, bert.arguments, is_encoder=True)

_TRANSLATIONS = Translations(MAP)
translate_state_dict_to_hf_roberta = _TRANSLATIONS.to_hf
translate_hf_state_dict_to_smdistributed_roberta = _TRANSLATIONS.from_hf
__getattr__ = _TRANSLATIONS.names(__name__)
