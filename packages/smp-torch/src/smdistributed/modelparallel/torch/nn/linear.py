"""``smp.nn.DistributedLinear``, and what ``auto=True`` makes of maps that widen.

Source: smd_model_parallel_pytorch_tensor_parallel.rst, Tensor Parallelism Module APIs.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from smdistributed.modelparallel.torch.collectives.interface import Sizes
from smdistributed.modelparallel.torch.compat.private.jagged import is_jagged, with_values
from smdistributed.modelparallel.torch.tensor_parallel.exchange import (
    leave,
    to_channels,
    to_examples,
)
from smdistributed.modelparallel.torch.tensor_parallel.gathered_linear import (
    Map,
    entered,
    entered_linear,
    sliced_linear,
)
from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule


class DistributedLinear(DistributedModule):
    """An ``nn.Linear`` whose input channels are split over the tensor-parallel ranks.

    Each rank multiplies its channels of the examples of all ranks, and gets the sums of its own
    examples. Forward and backward are collective: TP_GROUP.

    Shape: ``(..., in_features)`` to ``(..., out_features)``; what is before channels may differ
    between ranks, as batches of other lengths do. So may lengths within a nested tensor of the
    layout ``torch.jagged``.
    The weight is ``(out_features, in_features / tp_size)``; the bias is whole on each rank.

    Args:
        in_features: channels of an input, of all ranks together.
        out_features: channels of an output.
        bias: add one.
        device: as in ``nn.Linear``.
        dtype: as in ``nn.Linear``.

    Raises:
        ValueError: ``tp_size`` does not divide ``in_features``.

    Source: smd_model_parallel_pytorch_tensor_parallel.rst, Tensor Parallelism Module APIs.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = self.add_slice("weight", (out_features, in_features), 1, _drawn, **made)
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, **made))
            _draw_bias(self.bias, in_features)
        else:
            self.register_parameter("bias", None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Applies the map to the own examples. Collective: TP_GROUP."""
        group = self.tensor_group
        if group.size == 1:
            return F.linear(input, self.weight, self.bias)
        if is_jagged(input):
            return with_values(input, self.forward(input.values()))
        if input.dim() != 2:  # all that is before channels counts as examples
            examples = self.forward(input.reshape(-1, input.shape[-1]))
            return examples.view(*input.shape[:-1], self.out_features)
        with group.examples(self.place, input) as (sizes, _):
            return self._applied(input, sizes)

    def _applied(self, input: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        group = self.tensor_group
        channels = to_channels(group, input, sizes)
        output = leave(group, sliced_linear(group, channels, self.weight), sizes)
        return output if self.bias is None else output + self.bias

    def extra_repr(self) -> str:
        """Returns the sizes, as ``nn.Linear`` prints them."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )


class WideningLinear(DistributedLinear):
    """The same with its output channels split, as where there are more of these than of inputs.

    Each rank computes its channels for the examples of all ranks, and gets all channels of its own
    ones. What goes between ranks is the narrow input, and once each channel of the output, of which
    a rank never has more than those of its own examples; shares of sums would be as many times
    larger as there are ranks. So it is for a head over a vocabulary.

    Shape: as of ``DistributedLinear``; the weight is ``(out_features / tp_size, in_features)``, the
    bias ``(out_features / tp_size,)``.

    Args:
        in_features: channels of an input.
        out_features: channels of an output, of all ranks together.
        bias: add one.

    Raises:
        ValueError: ``tp_size`` does not divide ``out_features``.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        DistributedModule.__init__(self)
        self.in_features = in_features
        self.out_features = out_features
        shape = (out_features, in_features)
        self.weight = self.add_slice("weight", shape, 0, _drawn)
        self.bias: nn.Parameter | None
        if bias:
            draw = functools.partial(_draw_bias, in_features=in_features)
            self.bias = self.add_slice("bias", (out_features,), 0, draw)
        else:
            self.register_parameter("bias", None)

    def _applied(self, input: torch.Tensor, sizes: Sizes) -> torch.Tensor:
        group = self.tensor_group
        given = entered(group, input, sizes)
        channels = entered_linear(group, given, Map(self.weight, self.bias))
        return to_examples(group, channels, sizes)


def _drawn(weight: torch.Tensor) -> None:
    """Gives a weight the initial values of ``nn.Linear``."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def _draw_bias(bias: torch.Tensor, in_features: int) -> None:
    bound = 1 / math.sqrt(in_features) if in_features else 0
    nn.init.uniform_(bias, -bound, bound)
