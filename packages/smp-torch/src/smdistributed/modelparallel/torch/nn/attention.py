"""``smp.nn.DistributedAttentionLayer``.

Source: smd_model_parallel_pytorch_tensor_parallel.rst, Tensor Parallelism Module APIs and Appendix.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.collectives.interface import Sizes
from smdistributed.modelparallel.torch.nn.blocks import Block, Maps
from smdistributed.modelparallel.torch.nn.dropout import AttentionDropout
from smdistributed.modelparallel.torch.nn.options import LayerOptions
from smdistributed.modelparallel.torch.nn.parts import (
    Projection,
    check_norms,
    norm,
)
from smdistributed.modelparallel.torch.nn.scores import (
    Visible,
    alibi_bias,
    attend,
    rotated,
    scale_of,
)
from smdistributed.modelparallel.torch.tensor_parallel.exchange import enter, gathered, leave
from smdistributed.modelparallel.torch.tensor_parallel.gathered_linear import (
    Entered,
    Map,
    entered,
    entered_linear,
    fused,
    sliced_linear,
)
from smdistributed.modelparallel.torch.tensor_parallel.module import (
    require_divisible,
)

logger = logging.getLogger(__name__)


class DistributedAttentionLayer(Block):
    """Self- or cross-attention with its norms and residual sum; heads are split over the ranks.

    Forward and backward are collective: TP_GROUP.

    Shape: takes ``(hidden_states, attention_mask)``, with ``cross_attention`` ``(hidden_states,
    cross_states, attention_mask)``; states are ``(N, S, hidden_size)``, the additive mask
    broadcasts to ``(N, heads, S, K)``, and None hides nothing. Returns ``(N, S, hidden_size)``.
    ``N`` may differ between ranks.

    Args:
        num_attention_heads: in total.
        attention_head_size: channels of a head.
        hidden_size: channels of the states.
        attention_dropout_prob: of probabilities.
        hidden_dropout_prob: of the output.
        layernorm_epsilon: of the norms.
        initializer_range: standard deviation with ``use_normal_initialization``.
        use_normal_initialization: normal initial values; else those of ``nn.Linear``.
        cross_attention: keys and values are of other states, which are not normed.
        causal_mask_size: the longest sequence; a query sees no later key. None: all keys.
        pre_layernorm: norm the input.
        post_layernorm: norm the sum.
        options: see ``LayerOptions``.

    Raises:
        ValueError: no norm at all, or heads that ``tp_size`` does not divide.

    Source: smd_model_parallel_pytorch_tensor_parallel.rst, Tensor Parallelism Module APIs.
    """

    option_names = LayerOptions.names()

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_norms(name, pre_layernorm, post_layernorm)
        size = self.tensor_group.size
        require_divisible(name, "num_attention_heads", num_attention_heads, size)
        self.options = more = LayerOptions(**options)
        self.num_attention_heads = num_attention_heads
        self.attention_head_size = attention_head_size
        self.cross_attention = cross_attention
        self.causal_mask_size = causal_mask_size
        if more.attention_window is not None and causal_mask_size is None:
            raise ValueError(
                f"{name}: attention_window ({more.attention_window}) needs causal_mask_size."
            )
        deviation = initializer_range if use_normal_initialization else None
        inner = num_attention_heads * attention_head_size

        def project(bias: bool, split: str, *sizes: int) -> Projection:
            return Projection(*sizes, split=split, bias=bias, deviation=deviation)

        self.query = project(more.qkv_bias, "outputs", hidden_size, inner)
        self.key = project(more.qkv_bias, "outputs", hidden_size, inner)
        self.value = project(more.qkv_bias, "outputs", hidden_size, inner)
        self.dense = project(more.attention_output_bias, "inputs", inner, hidden_size)
        if more.use_alibi and attention_dropout_prob:
            logger.warning(
                "%s: attention_dropout_prob %s has no effect with use_alibi.",
                name,
                attention_dropout_prob,
            )
            attention_dropout_prob = 0.0
        self.attention_dropout = AttentionDropout(attention_dropout_prob)
        self.dropout = nn.Dropout(hidden_dropout_prob)
        self.pre_layernorm = norm(hidden_size, layernorm_epsilon) if pre_layernorm else None
        self.layernorm = norm(hidden_size, layernorm_epsilon) if post_layernorm else None

    def forward(self, inputs: Any) -> Any:
        """Attends, of the own examples. Collective: TP_GROUP.

        Raises:
            ValueError: a tuple of another length, or a sequence longer than ``causal_mask_size``.
        """
        hidden, cross, mask = self._unpack(inputs)
        if mask is not None:
            mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
        group = self.tensor_group
        with group.examples(self.place, hidden, [mask]) as (sizes, (mask,)):
            normed = self.entering(hidden)
            maps = self.maps() if cross is None else self._maps_of_two()
            given = [entered(group, each, sizes) for each in (normed, cross) if each is not None]
            mask = self.mask_of_all(mask, sizes)
            share = self._share(given, maps, mask, sizes)
            branch = self._branch(leave(group, share, sizes))
        if self.options.parallel_residual is not None:
            # The layer sums; with one norm for both blocks it hands that on.
            return branch, normed
        return self._with_residual(branch, hidden)

    # ------------------------------------------------- the parts of a block (see ``nn.blocks``)

    @property
    def last(self) -> Projection:
        """See ``Block.last``.

        :meta private:
        """
        return self.dense

    def maps(self) -> Maps:
        """See ``Block.maps``; states are multiplied by one for queries, keys and values.

        :meta private:
        """
        return self._fused(self.query, self.key, self.value), Map(self.dense.weight)

    def share(self, given: Entered, maps: Maps, mask: torch.Tensor | None = None) -> torch.Tensor:
        """See ``Block.share``.

        :meta private:
        """
        return self._share([given], maps, mask, given.sizes)

    def mask_of_all(self, mask: torch.Tensor | None, sizes: Sizes) -> torch.Tensor | None:
        """Returns the masks of the examples of all ranks, for the own heads.

        :meta private:
        """
        group = self.tensor_group
        if mask is None or group.size == 1:
            return mask
        own = sizes[group.rank]
        if mask.shape[0] != own:
            mask = mask.expand(own, *mask.shape[1:])
        # A mask may be learned.
        mask = (enter if mask.requires_grad else gathered)(group, mask, sizes)
        if mask.shape[1] == self.num_attention_heads and mask.shape[1] > 1:
            mask = mask.chunk(group.size, dim=1)[group.rank]
        return mask

    def _maps_of_two(self) -> Maps:
        """Returns the maps of states, of the other states, and the last one."""
        together = self._fused(self.key, self.value)
        return self._fused(self.query), together, Map(self.dense.weight)

    def _fused(self, *parts: Projection) -> Map:
        return fused([each.weight for each in parts], [each.bias for each in parts])

    def _unpack(self, inputs: Any) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        expected = "(hidden_states, cross_states, attention_mask)"
        if not self.cross_attention:
            expected = "(hidden_states, attention_mask)"
        number = 3 if self.cross_attention else 2
        if not isinstance(inputs, tuple | list) or len(inputs) != number:
            received = f"{len(inputs)} items" if isinstance(inputs, tuple | list) else type(inputs)
            raise ValueError(f"{type(self).__name__} takes {expected}; received {received}.")
        hidden, mask = inputs[0], inputs[-1]
        limit = self.causal_mask_size
        if limit is not None and hidden.shape[1] > limit and not self.cross_attention:
            raise ValueError(
                f"{type(self).__name__}: a sequence of {hidden.shape[1]} is longer than "
                f"causal_mask_size ({limit}): make that larger, or the sequence shorter."
            )
        cross = inputs[1] if self.cross_attention else None
        if cross is not None and cross.shape[0] != hidden.shape[0]:
            raise ValueError(
                f"{type(self).__name__}: hidden_states and cross_states must be of the same "
                f"examples; received {hidden.shape[0]} and {cross.shape[0]}."
            )
        return hidden, cross, mask

    def _share(
        self,
        given: Sequence[Entered],
        maps: Maps,
        mask: torch.Tensor | None,
        sizes: Sizes,
    ) -> torch.Tensor:
        """Returns the share of the own heads in the outputs of all examples."""
        group = self.tensor_group
        *first, last = maps
        products = [
            entered_linear(group, each, map_) for each, map_ in zip(given, first, strict=True)
        ]
        if len(products) == 1:
            parts = products[0].chunk(3, dim=-1)
        else:
            parts = products[0], *products[1].chunk(2, dim=-1)
        return sliced_linear(group, self._context(parts, mask, sizes), *last)

    def _context(
        self, parts: Sequence[torch.Tensor], mask: torch.Tensor | None, sizes: Sizes
    ) -> torch.Tensor:
        """Returns what the own heads see, for the examples of all ranks: ``(N, S, channels)``."""
        more = self.options
        queries, keys, values = (
            torch.unflatten(part, -1, (-1, self.attention_head_size)).transpose(1, 2)
            for part in parts
        )
        if more.rotary_dim:
            queries, keys = (
                rotated(
                    each,
                    more.rotary_dim,
                    more.rotary_emb_base,
                    interleaved=more.rotary_interleaved,
                )
                for each in (queries, keys)
            )
        visible = self._visible(queries, keys, mask)
        drops = self.attention_dropout.is_active
        is_fused = more.flash_attention and queries.is_cuda
        context = attend(
            queries,
            keys,
            values,
            visible,
            scale=scale_of(
                self.attention_head_size,
                more.scale_attention_scores,
                more.layer_idx,
                more.scale_attn_by_layer_idx,
            ),
            drop=(lambda each: self.attention_dropout(each, sizes))
            if drops and not is_fused
            else None,
            fused_dropout=self.attention_dropout.p if drops and is_fused else 0.0,
            in_fp32=more.attention_in_fp32,
            late_scale=(more.layer_idx or 0) + 1.0 if more.query_key_layer_scaling else 1.0,
        )
        return context.transpose(1, 2).flatten(2)

    def _visible(
        self, queries: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None
    ) -> Visible:
        more, group = self.options, self.tensor_group
        is_causal = self.causal_mask_size is not None and not self.cross_attention
        alibi = None
        if more.use_alibi and not self.cross_attention:
            own = queries.shape[1]
            alibi = alibi_bias(
                keys.shape[2],
                self.num_attention_heads,
                group.rank * own,
                own,
                more.alibi_bias_max,
                queries,
            )
        return Visible(is_causal, more.attention_window if is_causal else None, mask, alibi)
