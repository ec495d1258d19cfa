"""What a model answers about tensor parallelism.

Source: smd_model_parallel_pytorch.rst, Additional Methods for Tensor Parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.model.holder import Holder
from smdistributed.modelparallel.torch.model.translation import ModelTranslation
from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule


class TensorParallelQueries:
    """The part of ``DistributedModel`` that speaks of tensor parallelism.

    A split parameter sees the examples of the whole TP_GROUP; all others, also those of
    distributed modules such as norms, see the own ones.
    """

    holder: Holder

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See ``DistributedModel.local_named_parameters``."""
        raise NotImplementedError

    @property
    def translation(self) -> ModelTranslation:
        """Between the state of the model and that of the modules that were replaced in it."""
        return ModelTranslation(self.holder.fakes.model)

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Yields the modules that the tensor-parallel ranks, of which there may be one, share."""
        for module in self.holder.fakes.names:
            if isinstance(module, DistributedModule):
                yield module

    def check_outside_steps(self) -> None:
        """Raises unless a prescaled batch needs no common random numbers.

        Raises:
            SMPError: the model is split, and trains.
        """
        if self.holder.has_slices and self.holder.fakes.model.training:
            raise SMPError(
                "with prescaled_batch and tensor parallelism the model can only be trained inside "
                "a function decorated with @smp.step: the ranks must draw the same random numbers."
            )

    def split_dim(self, tensor: torch.Tensor) -> int | None:
        """Returns the dim along which a parameter is split; None if it is whole."""
        for module in self.distributed_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter is tensor and isinstance(module, DistributedModule):
                    kept = module.slice_of(name)
                    return None if kept is None else kept.dim
        return None

    def split_parameters(self) -> Iterator[nn.Parameter]:
        """Yields the parameters that are split over the tensor-parallel ranks."""
        for module in self.distributed_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if isinstance(module, DistributedModule) and module.slice_of(name) is not None:
                    yield parameter

    def is_distributed_parameter(self, param: nn.Parameter) -> bool:
        """Tells whether a parameter is split over the tensor-parallel ranks."""
        return self.holder.is_sliced(param)

    def is_distributed_buffer(self, buf: torch.Tensor) -> bool:
        """Tells whether a buffer is split over the tensor-parallel ranks."""
        return False

    def is_scaled_batch_parameter(self, param: nn.Parameter) -> bool:
        """Tells whether a parameter acts on the batch of the whole TP_GROUP."""
        return self.holder.is_sliced(param)

    def is_scaled_batch_buffer(self, buf: torch.Tensor) -> bool:
        """Tells whether the module of a buffer acts on the batch of the whole TP_GROUP."""
        return False

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields name and parameter of those whose gradients are reduced over the DP_GROUP.

        Raises:
            NotPartitionedError: the model is not partitioned yet.
        """
        return self._chosen(sliced=False)

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields name and parameter of those whose gradients are reduced over the RDP_GROUP.

        Raises:
            NotPartitionedError: the model is not partitioned yet.
        """
        return self._chosen(sliced=True)

    def _chosen(self, *, sliced: bool) -> Iterator[tuple[str, nn.Parameter]]:
        split = self.holder.sliced_names()
        for name, parameter in self.local_named_parameters():
            if (name in split) is sliced:
                yield name, parameter
