"""The interface of adapters."""

from __future__ import annotations

import abc
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from smdistributed.modelparallel.common.config import Config

Array = npt.NDArray[Any]

#: Width of the inputs and outputs of an adapter's models.
WIDTH = 6


class Adapter(abc.ABC):
    """A framework.

    Attributes:
        name: of the framework.
        smp: its package.
    """

    name: str
    smp: ModuleType

    @property
    @abc.abstractmethod
    def config(self) -> Config:
        """The configuration in force."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Makes the random numbers of the next case those of every run."""

    @abc.abstractmethod
    def tensor(self, array: Array) -> Any:
        """Returns a tensor with the content of an array, where the library computes."""

    @abc.abstractmethod
    def array(self, tensor: Any) -> Array:
        """Returns the content of a tensor."""

    @abc.abstractmethod
    def is_tensor(self, obj: Any) -> bool:
        """Tells whether something is a tensor."""

    @abc.abstractmethod
    def mean(self, tensor: Any) -> Any:
        """Returns the mean of all numbers of a tensor, as a tensor."""

    @abc.abstractmethod
    def model(self) -> Any:
        """Returns a DistributedModel that computes ``reference`` of its input."""

    @abc.abstractmethod
    def reference(self, x: Array) -> Array:
        """Returns what a new ``model`` makes of x, of shape (batch, WIDTH)."""

    @property
    def is_first(self) -> bool:
        """Whether this process is the first of its pipeline, whose inputs count."""
        return bool(self.smp.pp_rank() == 0)

    def batch(self, size: int = 8, seed: int = 0) -> Array:
        """Returns numbers of shape (size, WIDTH), the same in every process."""
        return np.random.default_rng(seed).standard_normal((size, WIDTH)).astype(np.float32)
