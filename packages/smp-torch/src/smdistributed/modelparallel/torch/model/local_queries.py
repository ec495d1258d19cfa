"""What a model answers about its parts on this rank.

Source: smd_model_parallel_pytorch.rst, DistributedModel, Methods.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from smdistributed.modelparallel.torch.model.holder import Holder


class LocalQueries:
    """The part of ``DistributedModel`` that lists what is on this rank."""

    holder: Holder

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields name and parameter of the modules on this rank; names of the whole model.

        Raises:
            NotPartitionedError: the model is not partitioned yet.
        """
        return self.holder.named_parameters()

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Yields the parameters of the modules on this rank; there may be none.

        Raises:
            NotPartitionedError: the model is not partitioned yet.
        """
        return (tensor for _, tensor in self.local_named_parameters())

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields name and buffer of the modules on this rank.

        Raises:
            NotPartitionedError: the model is not partitioned yet.
        """
        return self.holder.named_buffers()

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """Yields the buffers of the modules on this rank.

        Raises:
            NotPartitionedError: the model is not partitioned yet.
        """
        return self.holder.buffers()

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields name and module of the modules on this rank.

        Raises:
            NotPartitionedError: the model is not partitioned yet.
        """
        return self.holder.named_modules()

    def local_modules(self) -> Iterator[nn.Module]:
        """Yields the modules on this rank.

        Raises:
            NotPartitionedError: the model is not partitioned yet.
        """
        return (module for _, module in self.local_named_modules())
