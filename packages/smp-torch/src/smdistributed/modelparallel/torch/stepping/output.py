"""The results of a step: one value for each microbatch.

Where each is a scalar, as a loss is, they are used as the number that they are over the batch.

Source: smd_model_parallel_common_api.rst, StepOutput.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch


def _binary(
    operation: Callable[[Any, Any], Any], *, is_reflected: bool = False
) -> Callable[[StepOutput, Any], Any]:
    """Returns the method of ``StepOutput`` that does an operation on the mean over the batch."""

    def method(self: StepOutput, other: Any) -> Any:
        mean = self._mean_of_scalars(f"an operation ({operation.__name__})")
        if isinstance(other, StepOutput):
            other = other._mean_of_scalars(f"an operation ({operation.__name__})")
        return operation(other, mean) if is_reflected else operation(mean, other)

    return method


def _equality(operation: Callable[[Any, Any], Any]) -> Callable[[StepOutput, object], Any]:
    """Returns the method that compares numbers, and as any objects where one of them is none."""

    def method(self: StepOutput, other: object) -> Any:
        is_object = isinstance(other, StepOutput) and not other._is_number
        if is_object or not self._is_number:
            return NotImplemented
        return operation(
            self.reduce_mean(), other.reduce_mean() if isinstance(other, StepOutput) else other
        )

    return method


def _unary(operation: Callable[[Any], Any], name: str) -> Callable[[StepOutput], Any]:
    """Returns the method of ``StepOutput`` that asks for something of the mean over the batch."""

    def method(self: StepOutput) -> Any:
        return operation(self._mean_of_scalars(name))

    return method


class StepOutput:
    """All microbatch versions of one tensor that a step function returned.

    The values are the same on every rank of the PP_GROUP. Step functions make these objects; the
    class is public for ``isinstance`` checks. One whose values are scalars of a floating type can
    be used as the number that ``reduce_mean`` gives: ``item()``, ``float()``, formatting,
    comparison and arithmetic.

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

    def item(self) -> float | complex:
        """Returns the mean over the batch as a number, where each microbatch has a scalar.

        Raises:
            TypeError: the tensors are no scalars, or integers.
        """
        number: float | complex = self._mean_of_scalars("item()").item()
        return number

    __float__ = _unary(float, "float()")
    __abs__ = _unary(abs, "abs()")
    __neg__ = _unary(operator.neg, "a sign")
    __add__ = _binary(operator.add)
    __radd__ = _binary(operator.add, is_reflected=True)
    __sub__ = _binary(operator.sub)
    __rsub__ = _binary(operator.sub, is_reflected=True)
    __mul__ = _binary(operator.mul)
    __rmul__ = _binary(operator.mul, is_reflected=True)
    __truediv__ = _binary(operator.truediv)
    __rtruediv__ = _binary(operator.truediv, is_reflected=True)
    __pow__ = _binary(operator.pow)
    __rpow__ = _binary(operator.pow, is_reflected=True)
    __lt__ = _binary(operator.lt)
    __le__ = _binary(operator.le)
    __gt__ = _binary(operator.gt)
    __ge__ = _binary(operator.ge)

    __eq__ = _equality(operator.eq)
    __ne__ = _equality(operator.ne)
    __hash__ = object.__hash__

    def __format__(self, spec: str) -> str:
        if not (spec or self._is_number):
            return repr(self)
        return format(self._mean_of_scalars("a format"), spec)

    @property
    def _is_number(self) -> bool:
        return all(
            each.dim() == 0 and (each.is_floating_point() or each.is_complex())
            for each in self._outputs
        )

    def _mean_of_scalars(self, use: str) -> torch.Tensor:
        """Returns the mean over the batch; raises where it is not clear what the number is.

        Raises:
            TypeError: the tensors are no scalars, or integers.
        """
        if not self._is_number:
            shapes = [tuple(output.shape) for output in self._outputs]
            raise TypeError(
                f"{use} needs one number, and a step returns a tensor for each microbatch, whose "
                f"mean it is where they are scalars of a floating type; received "
                f"{self._outputs[0].dtype} of shapes {shapes}: use reduce_mean(), reduce_sum() "
                "or concat() first."
            )
        return self.reduce_mean()

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
