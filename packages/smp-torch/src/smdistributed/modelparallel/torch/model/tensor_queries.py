"""What a model answers about tensor parallelism, of which there is none yet.

Source: smd_model_parallel_pytorch.rst, Additional Methods for Tensor Parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


class TensorParallelQueries:
    """The part of ``DistributedModel`` that speaks of tensor parallelism.

    No module is split over the tensor-parallel ranks, and each of them has a batch of its own, so
    every gradient is reduced over the DP_GROUP.
    """

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See ``DistributedModel.local_named_parameters``."""
        raise NotImplementedError

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Yields the modules that are split over the tensor-parallel ranks."""
        return iter(())

    def is_distributed_parameter(self, param: nn.Parameter) -> bool:
        """Tells whether a parameter is split over the tensor-parallel ranks."""
        return False

    def is_distributed_buffer(self, buf: torch.Tensor) -> bool:
        """Tells whether a buffer is split over the tensor-parallel ranks."""
        return False

    def is_scaled_batch_parameter(self, param: nn.Parameter) -> bool:
        """Tells whether a parameter acts on the batch of the whole TP_GROUP."""
        return False

    def is_scaled_batch_buffer(self, buf: torch.Tensor) -> bool:
        """Tells whether the module of a buffer acts on the batch of the whole TP_GROUP."""
        return False

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields name and parameter of those whose gradients are reduced over the DP_GROUP.

        Raises:
            NotPartitionedError: the model is not partitioned yet.
        """
        return self.local_named_parameters()

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields name and parameter of those whose gradients are reduced over the RDP_GROUP."""
        return iter(())
