"""Torch's attention, of which each rank has some heads.

``nn.MultiheadAttention`` reads weights in which query, key and value are fused, so it cannot run on
slices of them. This forward computes the same for the own heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from smdistributed.modelparallel.torch.tensor_parallel.auto.split_linear import (
    Gate,
    Leaves,
    SplitLinear,
)
from smdistributed.modelparallel.torch.tensor_parallel.gathered_linear import sliced_linear
from smdistributed.modelparallel.torch.tensor_parallel.module import (
    DistributedModule,
    without_values,
)

#: Gives a slice its values, from the name and the whole.
Fill = Callable[[str, nn.Module, DistributedModule], None]


class SplitAttention(DistributedModule, nn.MultiheadAttention, is_part=True):
    """What a ``nn.MultiheadAttention`` becomes in a module that was split by ``auto=True``.

    Attributes keep the sizes of the whole. The output is that of ``SplitLinear``, a share of a sum
    or what becomes of that. Weights that are averaged over heads are a share of a sum; others are
    those of the own heads.

    Shape: as of ``nn.MultiheadAttention``.
    """

    gate: Gate

    @staticmethod
    def make_of(module: nn.MultiheadAttention, gate: Gate, fill: Fill, leaves: Leaves) -> None:
        """Makes an attention one of the own heads, in place.

        Args:
            module: which becomes it.
            gate: opened by the module that is called by all ranks, around it or itself.
            fill: gives slices their values.
            leaves: what the output is.
        """
        whole, out = nn.Module(), module.out_proj
        whole._parameters.update(module._parameters)
        module.__class__ = SplitAttention
        assert isinstance(module, SplitAttention)
        vars(module).update(_slices={}, place="MultiheadAttention", translations=None, gate=gate)
        # Torch's layers would read the weights without calling this, where they see this one set.
        module._qkv_same_embed_dim = False
        width = module.embed_dim
        with without_values():
            for name, parameter in whole._parameters.items():
                if parameter is None:
                    continue
                fused = (width,) * 3 if name.startswith("in_proj") else ()
                dim = parameter.dim() - 1 if name.startswith("bias") else 0
                module.add_slice(name, parameter.shape, dim, nn.init.zeros_, sections=fused)
            made = SplitLinear(width, width, out.bias is not None, "inputs", leaves=leaves)
        fill("", whole, module)
        made.gate = gate
        made.train(out.training)
        fill("out_proj", out, made)
        module._modules["out_proj"] = made

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attends with the own heads; arguments are those of ``nn.MultiheadAttention``."""
        is_batched = query.dim() == 3
        if is_batched and not self.batch_first:
            query, key, value = _changed(lambda each: each.transpose(0, 1), query, key, value)
        elif not is_batched:
            query, key, value = _changed(lambda each: each[None], query, key, value)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        self.gate.is_used = True
        try:
            queries, keys, values = self._heads(query, key, value)
        finally:
            self.gate.is_used = False
        mask = self._mask(query, attn_mask, key_padding_mask)
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        if is_causal and key_padding_mask is None and not need_weights:
            mask = None
        else:
            is_causal = False
        seen, weights = self._attended(queries, keys, values, mask, is_causal, need_weights)
        output = self.out_proj(seen.permute(2, 0, 1, 3).flatten(2))  # as it lies in torch's memory
        if weights is not None and average_attn_weights:
            weights = weights.sum(1) / self.num_heads
        if not is_batched:
            return output[:, 0], None if weights is None else weights[0]
        return output.transpose(0, 1) if self.batch_first else output, weights

    def _heads(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Returns query, key and value by head: ``(N, heads / tp_size, length, head_dim)``."""
        group = self.tensor_group
        biases: tuple[torch.Tensor | None, ...] = (None,) * 3
        if self.in_proj_bias is not None:
            biases = self.in_proj_bias.chunk(3)
        together = self._parameters["in_proj_weight"]
        weights: tuple[torch.Tensor, ...]
        if together is None:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        else:
            weights = together.chunk(3)
        if together is not None and len(set(map(id, tensors))) == 1:
            fused = sliced_linear(group, tensors[0], together, self.in_proj_bias)
            made = list(fused.chunk(3, -1))
        else:
            made = [
                sliced_linear(group, *each) for each in zip(tensors, weights, biases, strict=True)
            ]
        for place, name in enumerate(("bias_k", "bias_v"), 1):
            if getattr(self, name) is not None:
                more = self.use_slice(name).expand(made[place].shape[0], 1, -1)
                made[place] = torch.cat([made[place], more], 1)
        heads = self.num_heads // group.size, self.head_dim
        found = [each.view(*each.shape[:-1], *heads).transpose(1, 2) for each in made]
        if self.add_zero_attn:
            found[1:] = [F.pad(each, (0, 0, 0, 1)) for each in found[1:]]
        return found

    def _mask(
        self,
        query: torch.Tensor,
        attn_mask: torch.Tensor | None,
        key_padding_mask: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Returns what is added to the scores of the own heads."""
        group, number = self.tensor_group, self.num_heads // self.tensor_group.size
        found = []
        if attn_mask is not None and attn_mask.dim() == 3:
            by_head = attn_mask.reshape(-1, self.num_heads, *attn_mask.shape[1:])
            found.append(by_head.narrow(1, group.rank * number, number))
        elif attn_mask is not None:
            found.append(attn_mask)
        if key_padding_mask is not None:
            found.append(key_padding_mask[:, None, None, :])
        added: torch.Tensor | None = None
        for mask in found:
            if mask.dtype == torch.bool:
                zeros = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
                mask = zeros.masked_fill(mask, -math.inf)
            added = mask if added is None else added + mask
        more = (self.bias_k is not None) + self.add_zero_attn
        return added if added is None or not more else F.pad(added, (0, more))

    def _attended(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
        need_weights: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rate = self.dropout if self.training else 0.0
        if not need_weights:
            attend = F.scaled_dot_product_attention
            return attend(query, key, value, mask, rate, is_causal), None
        scores = (query * math.sqrt(1 / self.head_dim)) @ key.mT
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = F.dropout(weights, self.dropout, self.training)
        return weights @ value, weights


def _changed(
    change: Callable[[torch.Tensor], torch.Tensor], *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Returns tensors changed alike; what is one tensor stays one."""
    made = {id(each): change(each) for each in tensors}
    return tuple(made[id(each)] for each in tensors)
