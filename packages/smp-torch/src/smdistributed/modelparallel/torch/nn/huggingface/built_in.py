"""Which classes of Transformers are known; the package itself is not imported for that."""

from __future__ import annotations

from torch import nn

from smdistributed.modelparallel.torch.nn.huggingface import (
    bert,
    gpt2,
    gptj,
    gptneo,
    gptneox,
    roberta,
)
from smdistributed.modelparallel.torch.nn.huggingface.family import Family

_FAMILIES: dict[tuple[str, str], Family] = {
    ("gpt2", "GPT2LMHeadModel"): gpt2.FAMILY,
    ("gpt_neo", "GPTNeoForCausalLM"): gptneo.FAMILY,
    ("gptj", "GPTJForCausalLM"): gptj.FAMILY,
    ("gpt_neox", "GPTNeoXForCausalLM"): gptneox.FAMILY,
    ("bert", "BertEncoder"): bert.FAMILY,
    ("roberta", "RobertaEncoder"): roberta.FAMILY,
}


def family_of(module: nn.Module) -> Family | None:
    """Returns how a module of Transformers is distributed; None if it is not known."""
    kind = type(module)
    package, _, rest = kind.__module__.partition(".models.")
    if package != "transformers":
        return None
    family = _FAMILIES.get((rest.partition(".")[0], kind.__name__))
    if family is gptneox.FAMILY and hasattr(module, "embed_out"):
        return gptneox.FAMILY_BEFORE_5
    return family
