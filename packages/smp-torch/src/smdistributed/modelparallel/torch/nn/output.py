"""``smp.nn.DistributedTransformerOutputLayer``.

Source: smd_model_parallel_pytorch_tensor_parallel.rst, Tensor Parallelism Module APIs and Appendix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from smdistributed.modelparallel.torch.nn.blocks import Block, Maps
from smdistributed.modelparallel.torch.nn.fused import bias_gelu
from smdistributed.modelparallel.torch.nn.options import LayerOptions
from smdistributed.modelparallel.torch.nn.parts import (
    Projection,
    check_norms,
    norm,
)
from smdistributed.modelparallel.torch.tensor_parallel.exchange import leave
from smdistributed.modelparallel.torch.tensor_parallel.gathered_linear import (
    Entered,
    Map,
    entered,
    entered_linear,
    sliced_linear,
    used_slice,
)
from smdistributed.modelparallel.torch.tensor_parallel.module import (
    require_divisible,
)

#: By the words of the API; ``gelu_new`` is an addition: the form with tanh.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "gelu_new": functools.partial(F.gelu, approximate="tanh"),
}
#: The forms of one of them.
_GELUS = {"gelu": "none", "gelu_new": "tanh"}


class DistributedTransformerOutputLayer(Block):
    """The feed-forward block of a transformer layer; its inner channels are split over the ranks.

    Forward and backward are collective: TP_GROUP.

    Shape: ``(N, S, hidden_size)`` to the same; ``N`` may differ between ranks.

    Args:
        hidden_size: channels of the states.
        intermediate_size: inner channels, of all ranks together.
        hidden_dropout_prob: of the output.
        activation: ``"gelu"`` (exact), ``"relu"``, or ``"gelu_new"`` (with tanh).
        layernorm_epsilon: of the norms.
        initializer_range: standard deviation with ``use_normal_initialization``.
        use_normal_initialization: normal initial values; else those of ``nn.Linear``.
        pre_layernorm: norm the input.
        post_layernorm: norm the sum.
        fp32_residual_addition: the residual sum in single precision.
        options: see ``LayerOptions``.

    Raises:
        ValueError: no such activation, no norm at all, or an inner size that ``tp_size`` does not
            divide.

    Source: smd_model_parallel_pytorch_tensor_parallel.rst, Tensor Parallelism Module APIs.
    """

    option_names = LayerOptions.names()

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.options = LayerOptions(**options, fp32_residual_addition=fp32_residual_addition)
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"{name}: activation must be one of {', '.join(ACTIVATIONS)}; received "
                f"{activation!r}."
            )
        if self.options.parallel_residual != "one_norm":
            check_norms(name, pre_layernorm, post_layernorm)
        require_divisible(name, "intermediate_size", intermediate_size, self.tensor_group.size)
        self.activation = activation
        deviation = initializer_range if use_normal_initialization else None
        self.dense1 = Projection(
            hidden_size, intermediate_size, split="outputs", deviation=deviation
        )
        self.dense2 = Projection(
            intermediate_size, hidden_size, split="inputs", deviation=deviation
        )
        self.dropout = nn.Dropout(hidden_dropout_prob)
        self.pre_layernorm = norm(hidden_size, layernorm_epsilon) if pre_layernorm else None
        self.layernorm = norm(hidden_size, layernorm_epsilon) if post_layernorm else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Applies the block to the own examples. Collective: TP_GROUP."""
        group, hidden = self.tensor_group, hidden_states
        with group.examples(self.place, hidden) as (sizes, _):
            given = entered(group, self.entering(hidden), sizes)
            share = self.share(given, self.maps())
            branch = self._branch(leave(group, share, sizes))
        if self.options.parallel_residual is not None:
            return branch
        return self._with_residual(branch, hidden)

    # ------------------------------------------------- the parts of a block (see ``nn.blocks``)

    @property
    def last(self) -> Projection:
        """See ``Block.last``.

        :meta private:
        """
        return self.dense2

    def maps(self) -> Maps:
        """See ``Block.maps``.

        :meta private:
        """
        return Map(self.dense1.weight, self.dense1.bias), Map(self.dense2.weight)

    def share(self, given: Entered, maps: Maps, mask: torch.Tensor | None = None) -> torch.Tensor:
        """See ``Block.share``.

        :meta private:
        """
        group = self.tensor_group
        first, last = maps
        if self.options.fused_bias_gelu and self.activation in _GELUS and first.bias is not None:
            product = entered_linear(group, given, first._replace(bias=None))
            bias = used_slice(group, first.bias)
            inner = bias_gelu(product, bias, _GELUS[self.activation])
        else:
            inner = ACTIVATIONS[self.activation](entered_linear(group, given, first))
        return sliced_linear(group, inner, *last)
