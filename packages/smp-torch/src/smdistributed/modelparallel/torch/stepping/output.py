"""The results of a step: one value for each microbatch.

Source: smd_model_parallel_common_api.rst, StepOutput.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class StepOutput:
    """All microbatch versions of one tensor that a step function returned.

    The values are the same on every rank of the PP_GROUP. Step functions make these objects; the
    class is public for ``isinstance`` checks.

    Args:
        outputs: one tensor a microbatch, in order.
        weights: share of the batch in each microbatch; their sum is 1. None: equal shares.
    """

    def __init__(
        self, outputs: Sequence[torch.Tensor], weights: Sequence[float] | None = None
    ) -> None:
        self._outputs = list(outputs)
        self._weights = list(weights or [1 / len(self._outputs)] * len(self._outputs))

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The constituent tensors, index = microbatch."""
        return self._outputs

    def reduce_mean(self) -> torch.Tensor:
        """Returns the element-wise mean over microbatches, weighted by their sizes.

        So the mean of losses that are means over a microbatch is that over the batch, also where
        the batch does not divide evenly.

        Shape: that of one microbatch's tensor.

        Raises:
            ValueError: the tensors differ in shape.
            TypeError: the tensors are integers.
        """
        first = self._outputs[0]
        if not (first.is_floating_point() or first.is_complex()):
            raise TypeError(
                f"the mean of {first.dtype} tensors is not defined: use reduce_sum(), or cast the "
                "tensor to a floating type in the step function."
            )
        stacked = self._stacked("reduce_mean")
        if len(set(self._weights)) == 1:
            return stacked.mean(0)
        # Half precision adds up in float32, as torch's mean does.
        wide = torch.promote_types(first.dtype, torch.float32)
        weights = torch.tensor(self._weights, dtype=wide, device=first.device)
        mean: torch.Tensor = torch.tensordot(weights, stacked.to(wide), dims=1)
        return mean.to(first.dtype)

    def reduce_sum(self) -> torch.Tensor:
        """Returns the element-wise sum over microbatches.

        Shape: that of one microbatch's tensor.

        Raises:
            ValueError: the tensors differ in shape.
        """
        return self._stacked("reduce_sum").sum(0)

    def concat(self) -> torch.Tensor:
        """Returns the tensors joined along dim 0, which restores the order of the batch.

        Shape: (microbatch, ...) each, to (batch, ...).

        Raises:
            ValueError: the tensors are scalars.
        """
        if self._outputs[0].dim() == 0:
            raise ValueError("scalars have no dim to join along: use stack().")
        return torch.cat(self._outputs)

    def merge(self) -> torch.Tensor:
        """Same as ``concat``; the name that the TensorFlow package documents."""
        return self.concat()

    def stack(self) -> torch.Tensor:
        """Returns the tensors along a new leading dim, one entry a microbatch.

        Shape: (...) each, to (microbatches, ...).

        Raises:
            ValueError: the tensors differ in shape.
        """
        return self._stacked("stack")

    def detach(self) -> StepOutput:
        """Returns the StepOutput of the detached tensors."""
        return StepOutput([output.detach() for output in self._outputs], self._weights)

    def _stacked(self, method: str) -> torch.Tensor:
        shapes = [tuple(output.shape) for output in self._outputs]
        if len(set(shapes)) > 1:
            raise ValueError(
                f"{method}() needs tensors of one shape; the microbatches gave {shapes}. Use "
                "concat() for tensors along the batch, or reduce them in the step function."
            )
        return torch.stack(self._outputs)

    def __repr__(self) -> str:
        return f"StepOutput({self._outputs!r})"
