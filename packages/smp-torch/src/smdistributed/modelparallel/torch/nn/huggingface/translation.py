"""The functions that scripts import from the modules of the families, and their many names.

Source: model-parallel-extended-features-pytorch-hugging-face.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.later import later_function
from smdistributed.modelparallel.torch.nn.huggingface.family_map import FamilyMap, State


class Translations:
    """The two translations of a family.

    Args:
        family: its map.
        masks: the names of attention modules that hold their causal mask in Transformers 4; None
            where they do not.
        older: the map of Transformers before 5, where that is another one.
    """

    def __init__(
        self, family: FamilyMap, masks: str | None = None, older: FamilyMap | None = None
    ) -> None:
        self._map = family
        self._masks = masks
        self._older = older

    def to_hf(
        self,
        state_dict: State,
        max_seq_len: int | None = None,
        *,
        num_attention_heads: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """Returns a whole state of the distributed model in the form of Transformers.

        Args:
            state_dict: from ``DistributedModel.state_dict()``.
            max_seq_len: adds the causal masks of this length that models of Transformers 4 hold;
                None leaves them out, as they are no weights.
            num_attention_heads: needed where queries, keys and values are packed by heads.

        Raises:
            CheckpointError: a name does not belong to the family.
        """
        state = _weights(state_dict)
        uses_older = self._older is not None and _version_before_5()
        chosen = self._older if uses_older and self._older is not None else self._map
        found = chosen.to_theirs(state, num_heads=num_attention_heads)
        if max_seq_len is not None and self._masks is not None:
            layers = {
                int(name.split(".")[2]) for name in state if name.startswith("transformer.seq")
            }
            size = (1, 1, max_seq_len, max_seq_len)
            for layer in sorted(layers):
                mask = torch.ones(size, dtype=torch.bool).tril()
                found[f"{self._masks.format(layer)}.bias"] = mask
                found[f"{self._masks.format(layer)}.masked_bias"] = torch.tensor(-1e9)
        return found

    def from_hf(
        self,
        state_dict: State,
        max_seq_len: int | None = None,
        *,
        num_attention_heads: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """Returns the state of a Transformers model in the form of the distributed model.

        ``DistributedModel.load_state_dict`` takes it.

        Args:
            state_dict: of the Transformers model.
            max_seq_len: without effect.
            num_attention_heads: needed where queries, keys and values are packed by heads.

        Raises:
            CheckpointError: a name does not belong to the family.
        """
        state = _weights(state_dict)
        is_older = self._older is not None and any(name.startswith("embed_out") for name in state)
        chosen = self._older if is_older and self._older is not None else self._map
        return chosen.to_ours(state, num_heads=num_attention_heads)

    def names(self, module: str) -> Callable[[str], Callable[..., Any]]:
        """Returns a ``__getattr__`` that knows all generations of the functions' names."""

        def find(name: str) -> Callable[..., Any]:
            if name.startswith("translate_") and "to_hf" in name:
                return self.to_hf
            if name.startswith("translate_") and "to_smdistributed" in name:
                return self.from_hf
            if name.startswith("get_hf_"):
                return later_function(f"{module}.{name}")
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        return find


def _weights(state: State) -> State:
    return {name: each for name, each in state.items() if not name.startswith("_smp_")}


def _version_before_5() -> bool:
    try:
        import transformers
    except ImportError:
        return False
    return int(transformers.__version__.partition(".")[0]) < 5
