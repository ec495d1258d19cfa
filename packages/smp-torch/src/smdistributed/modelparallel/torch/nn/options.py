"""What transformer layers can do beyond their documented arguments; all by keyword."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

#: Where the names of the two forms of a parallel residual sum come from: GPT-J, GPT-NeoX.
ParallelResidual = Literal["one_norm", "two_norms"] | None


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Options of attention, output and transformer layers.

    Attributes:
        scale_attention_scores: divide scores by the square root of the head size.
        scale_attn_by_layer_idx: divide them by the number of the layer, counted from 1, too.
        layer_idx: the number of the layer, counted from 0; a transformer sets it.
        attention_in_fp32: scores and probabilities in single precision.
        query_key_layer_scaling: scores are small while they are in half precision; same results.
        rotary_dim: how many channels of a head are rotated by their position; None for none.
        rotary_emb_base: of the angles of rotation.
        rotary_interleaved: pairs of neighbouring channels are rotated, not halves of the head.
        parallel_residual: attention and output layer read the same input, and are summed.
        attention_window: how many positions back a query sees; a transformer takes a list.
        qkv_bias: the projections to queries, keys and values have biases.
        attention_output_bias: the projection behind the attention has one.
        use_alibi: a bias that grows with the distance of a key, in place of positions.
        alibi_bias_max: the base of its slopes.
        fp32_residual_addition: residual sums in single precision.
        flash_attention: also with dropout compute attention by torch's fused kernels, whose masks
            are not those of one rank alone.
        fused_bias_gelu: bias and GELU of the output layer in one kernel, on GPUs where PyTorch's
            compiler works; the same results, to rounding.
        fused_softmax, fused_dropout: without effect: torch has such kernels, and chooses them
            itself, or has none.
    """

    scale_attention_scores: bool = True
    scale_attn_by_layer_idx: bool = False
    layer_idx: int | None = None
    attention_in_fp32: bool = False
    query_key_layer_scaling: bool = False
    rotary_dim: int | None = None
    rotary_emb_base: float = 10000
    rotary_interleaved: bool = False
    parallel_residual: ParallelResidual = None
    attention_window: Any = None
    qkv_bias: bool = True
    attention_output_bias: bool = True
    use_alibi: bool = False
    alibi_bias_max: float = 8
    fp32_residual_addition: bool = False
    flash_attention: bool = False
    fused_softmax: bool = True
    fused_bias_gelu: bool = False
    fused_dropout: bool = False

    def __post_init__(self) -> None:
        if (self.rotary_dim or 0) % 2:
            raise ValueError(
                "rotary_dim must be even, as channels are rotated in pairs; received "
                f"{self.rotary_dim}."
            )
        if self.parallel_residual not in (None, "one_norm", "two_norms"):
            raise ValueError(
                'parallel_residual must be None, "one_norm" or "two_norms"; received '
                f"{self.parallel_residual!r}."
            )
        needs_index = self.scale_attn_by_layer_idx or self.query_key_layer_scaling
        if needs_index and self.layer_idx is None:
            object.__setattr__(self, "layer_idx", 0)

    @classmethod
    def names(cls) -> frozenset[str]:
        """Returns the names of all options."""
        return frozenset(field.name for field in dataclasses.fields(cls))

    def as_layer(self, index: int) -> dict[str, Any]:
        """Returns the options of one layer of a transformer, as keywords."""
        mine = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        window = mine["attention_window"]
        if isinstance(window, list | tuple):
            mine["attention_window"] = window[index]
        return {**mine, "layer_idx": index}
