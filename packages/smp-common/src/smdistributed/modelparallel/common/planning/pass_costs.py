"""What the passes of calls cost."""

from __future__ import annotations

from dataclasses import dataclass

#: What products in half precision make while a GPU moves a byte, about: an H200 makes 750e12 and
#: moves 3.7e12 in a second, an H100 700e12 and 2.7e12.
OPERATIONS_A_BYTE = 200
#: How much longer a GPU takes for products in single precision, with TF32 and without.
LONGER_IN_TF32, LONGER_IN_SINGLE = 2, 14
#: What a backward pass takes, in forward passes, where operations are counted: products with
#: weights are two; attention computes its scores again, and others read gradients besides what
#: they have read before.
_BACKWARD_OF_WEIGHTS, _BACKWARD_OF_OTHERS = 2.0, 2.5


@dataclass(frozen=True)
class PassCosts:
    """What passes cost, in seconds or in any one unit for the whole model.

    Attributes:
        forward: the forward pass.
        backward: the whole backward pass.
        weights: the part of it that gives the gradients of weights of products.
    """

    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0

    @classmethod
    def counted(cls, of_weights: float, others: float) -> PassCosts:
        """Returns the costs of passes whose forward pass alone was counted.

        Args:
            of_weights: what products with weights take in the forward pass.
            others: what everything else takes in it.
        """
        backward = _BACKWARD_OF_WEIGHTS * of_weights + _BACKWARD_OF_OTHERS * others
        return cls(of_weights + others, backward, of_weights)

    @property
    def both(self) -> float:
        """Forward and backward pass."""
        return self.forward + self.backward

    def times(self, factor: float) -> PassCosts:
        """Returns what so many times as much costs."""
        return PassCosts(factor * self.forward, factor * self.backward, factor * self.weights)

    def __add__(self, other: PassCosts) -> PassCosts:
        return PassCosts(
            self.forward + other.forward,
            self.backward + other.backward,
            self.weights + other.weights,
        )

    def __sub__(self, other: PassCosts) -> PassCosts:
        return self + PassCosts(-other.forward, -other.backward, -other.weights)
