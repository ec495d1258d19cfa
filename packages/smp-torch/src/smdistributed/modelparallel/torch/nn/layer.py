"""``smp.nn.DistributedTransformerLayer``.

Source: smd_model_parallel_pytorch_tensor_parallel.rst, Tensor Parallelism Module APIs and Appendix.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from smdistributed.modelparallel.torch.nn.attention import DistributedAttentionLayer
from smdistributed.modelparallel.torch.nn.options import LayerOptions
from smdistributed.modelparallel.torch.nn.output import DistributedTransformerOutputLayer
from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule


class DistributedTransformerLayer(DistributedModule):
    """Attention, cross-attention if asked for, and the feed-forward block.

    Forward and backward are collective: TP_GROUP.

    Shape: takes and returns ``(hidden_states, attention_mask)``, with ``add_cross_attention``
    ``(hidden_states, cross_states, attention_mask, cross_mask)``; states are ``(N, S,
    hidden_size)``, additive masks ``(N, 1, 1, S)`` or None. All but ``hidden_states`` are returned
    as they are.

    It takes the arguments of ``DistributedAttentionLayer`` and of
    ``DistributedTransformerOutputLayer``, with the same meaning, and those below.

    Args:
        add_cross_attention: attend to other states too.
        use_alibi: a bias that grows with the distance of a key.
        alibi_bias_max: the base of its slopes.
        options: see ``LayerOptions``.

    Raises:
        ValueError: as its two parts; or ``parallel_residual`` with other norms than one at the
            input, or with cross-attention.

    Source: smd_model_parallel_pytorch_tensor_parallel.rst, Tensor Parallelism Module APIs.
    """

    takes_tuple: ClassVar[bool] = True
    option_names = LayerOptions.names()

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        use_alibi: bool = False,
        alibi_bias_max: float = 8,
        **options: Any,
    ) -> None:
        super().__init__()
        self.options = LayerOptions(**options, use_alibi=use_alibi, alibi_bias_max=alibi_bias_max)
        self.add_cross_attention = add_cross_attention
        form = self.options.parallel_residual
        if form is not None and (add_cross_attention or post_layernorm or not pre_layernorm):
            raise ValueError(
                f"parallel_residual={form!r} needs pre_layernorm without post_layernorm, and no "
                f"cross-attention; received pre_layernorm={pre_layernorm}, "
                f"post_layernorm={post_layernorm}, add_cross_attention={add_cross_attention}."
            )
        more = {
            field.name: getattr(self.options, field.name)
            for field in dataclasses.fields(self.options)
        }
        common: dict[str, Any] = {
            "hidden_size": hidden_size,
            "hidden_dropout_prob": hidden_dropout_prob,
            "layernorm_epsilon": layernorm_epsilon,
            "initializer_range": initializer_range,
            "use_normal_initialization": use_normal_initialization,
            "post_layernorm": post_layernorm,
            **more,
        }
        attention = {
            **common,
            "num_attention_heads": num_attention_heads,
            "attention_head_size": attention_head_size,
            "attention_dropout_prob": attention_dropout_prob,
            "pre_layernorm": pre_layernorm,
        }
        self.attention = DistributedAttentionLayer(**attention, causal_mask_size=causal_mask_size)
        if add_cross_attention:
            attention["attention_window"] = None
            self.cross_attention = DistributedAttentionLayer(**attention, cross_attention=True)
        self.output = DistributedTransformerOutputLayer(
            **common,
            intermediate_size=intermediate_size,
            activation=activation,
            pre_layernorm=pre_layernorm and form != "one_norm",
        )

    def forward(self, inputs: Any) -> tuple[Any, ...]:
        """Applies the layer to the own examples. Collective: TP_GROUP.

        Raises:
            ValueError: a tuple of another length.
        """
        expected = "(hidden_states, attention_mask)"
        if self.add_cross_attention:
            expected = "(hidden_states, cross_states, attention_mask, cross_mask)"
        number = 4 if self.add_cross_attention else 2
        if not isinstance(inputs, tuple | list) or len(inputs) != number:
            received = f"{len(inputs)} items" if isinstance(inputs, tuple | list) else type(inputs)
            raise ValueError(f"{type(self).__name__} takes {expected}; received {received}.")
        hidden, *rest = inputs
        group = self.tensor_group
        given = rest[-2:] if self.add_cross_attention else rest
        with group.examples(self.place, hidden, [*map(four_dims, given)]) as (_, masks):
            if self.options.parallel_residual is not None:
                return self._summed(hidden, masks[0]), *rest
            attended = self.attention((hidden, masks[0]))
            if self.add_cross_attention:
                attended = self.cross_attention((attended, rest[0], masks[1]))
            return self.output(attended), *rest

    def _summed(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Returns the layer whose two blocks read the same input."""
        attended: torch.Tensor
        attended, normed = self.attention((hidden, mask))
        one_norm = self.options.parallel_residual == "one_norm"
        output: torch.Tensor = self.output(normed if one_norm else hidden)
        if self.options.fp32_residual_addition:
            return (hidden.float() + attended.float() + output.float()).to(hidden.dtype)
        return attended + output + hidden


def four_dims(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a mask with all dims of scores."""
    return None if mask is None else mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
