"""``smp.nn.DistributedEmbedding``, and the head that shares its weight.

Source: smd_model_parallel_pytorch_tensor_parallel.rst, Tensor Parallelism Module APIs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.tensor_parallel.exchange import (
    gathered,
    to_examples,
    whole,
)
from smdistributed.modelparallel.torch.tensor_parallel.gathered_linear import used_slice
from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule


class DistributedEmbedding(DistributedModule):
    """An ``nn.Embedding`` whose dimension is split over the tensor-parallel ranks.

    Each rank looks up its channels for the tokens of all ranks, and gets all channels of its own
    tokens. Forward and backward are collective: TP_GROUP.

    Shape: ``(N, ...)`` of integers to ``(N, ..., embedding_dim)``; ``N`` may differ between ranks.
    The weight is ``(num_embeddings, embedding_dim / tp_size)``.

    It takes the arguments of ``nn.Embedding``, and those below.

    Args:
        _weight: initial values of the whole weight.
        initializer_range: standard deviation of the initial values.
        _skip_allgather: the tokens of all ranks are given, and are not gathered.
        _skip_scatter_and_merge: returns the own channels of the tokens of all ranks.

    Raises:
        ValueError: ``tp_size`` does not divide ``embedding_dim``.
        UnsupportedError: ``max_norm`` with several ranks, which needs norms over all slices.

    Source: smd_model_parallel_pytorch_tensor_parallel.rst, Tensor Parallelism Module APIs.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        initializer_range: float = 0.02,
        _skip_allgather: bool = False,
        _skip_scatter_and_merge: bool = False,
    ) -> None:
        super().__init__()
        if max_norm is not None and self.tensor_group.size > 1:
            raise UnsupportedError(
                f"DistributedEmbedding(max_norm={max_norm!r}) needs the norms of rows that lie on "
                "several ranks: leave it at None, or the module whole."
            )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self._options: dict[str, Any] = {
            "padding_idx": padding_idx,
            "max_norm": max_norm,
            "norm_type": norm_type,
            "scale_grad_by_freq": scale_grad_by_freq,
            "sparse": sparse,
        }
        self._skip_allgather = _skip_allgather
        self._skip_scatter_and_merge = _skip_scatter_and_merge

        def initialise(weight: torch.Tensor) -> None:
            if _weight is not None:
                weight.copy_(_weight)
                return
            nn.init.normal_(weight, std=initializer_range)
            if padding_idx is not None:
                weight[padding_idx].zero_()

        self.weight = self.add_slice("weight", (num_embeddings, embedding_dim), 1, initialise)

    def forward(self, input: torch.Tensor, as_head: bool = False) -> torch.Tensor:
        """Looks up tokens, or compares hidden states with all of them. Collective: TP_GROUP.

        Args:
            input: tokens; or with ``as_head`` hidden states ``(..., embedding_dim)``.
            as_head: returns the products with each row of the whole weight, ``(...,
                num_embeddings)``: what a head that shares the weight computes. The weight is
                gathered, which is smaller than what it makes.
        """
        group = self.tensor_group
        if as_head:
            return F.linear(input, whole(group, self.weight))
        if group.size == 1:
            return F.embedding(input, self.weight, **self._options)
        with group.examples(self.place, input) as (sizes, _):
            tokens = input if self._skip_allgather else gathered(group, input, sizes)
            channels = F.embedding(tokens, used_slice(group, self.weight), **self._options)
            if self._skip_scatter_and_merge:
                return channels
            return to_examples(group, channels, sizes)

    def extra_repr(self) -> str:
        """Returns the sizes, as ``nn.Embedding`` prints them."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


class Head(DistributedModule):
    """A language model's head with a weight of its own.

    Shape: ``(..., hidden_size)`` to ``(..., vocab_size)``. The weight is
    ``(vocab_size, hidden_size / tp_size)``; the bias is whole on each rank.

    Args:
        hidden_size: channels of a hidden state.
        vocab_size: how many tokens there are.
        bias: add one.
        initializer_range: standard deviation of the initial values.
    """

    def __init__(
        self, hidden_size: int, vocab_size: int, *, bias: bool, initializer_range: float
    ) -> None:
        super().__init__()

        def initialise(weight: torch.Tensor) -> None:
            nn.init.normal_(weight, std=initializer_range)

        self.weight = self.add_slice("weight", (vocab_size, hidden_size), 1, initialise)
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compares hidden states with every token. Collective: TP_GROUP."""
        return F.linear(input, whole(self.tensor_group, self.weight), self.bias)
