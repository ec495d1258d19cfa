"""What the runtime, and what lies below a step, a model or an optimizer, knows of these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn


class Step(Protocol):
    """A step in progress.

    Attributes:
        is_tracing: its body runs on fakes.
    """

    is_tracing: bool

    def backward(self, model: Any, tensors: Any, grad_tensors: Any, *, retain_graph: bool) -> None:
        """Takes a call of ``model.backward``."""


class Replicated(Protocol):
    """What a model does together with its replicas."""

    @property
    def is_joining(self) -> bool:
        """Whether replicas may have run out of batches."""

    def updates(self) -> Mapping[nn.Parameter, bool]:
        """Returns for each parameter on this rank whether this rank updates it."""

    def speaks_for(self, parameter: Any, *, is_slice: bool) -> bool:
        """Tells whether this rank is the first of those that have the same of a parameter."""

    def check_reduced(self) -> None:
        """Makes sure before an update by owners that no replica waits for gradients."""

    def share_updates(self) -> None:
        """Gives all ranks the parameters that their owners have updated."""


class Model(Protocol):
    """A DistributedModel.

    Attributes:
        place_in_keys: its number in the keys of random numbers.
        scaled_by: the loss scale that its gradients carry; None without.
    """

    place_in_keys: int
    scaled_by: Any

    def wake(self) -> bool:
        """Has parameters be tensors of torch; returns whether some were not."""

    def rest(self) -> None:
        """Has parameters stand for whole ones, and know who has them."""

    @property
    def partitioned(self) -> bool:
        """Whether it is known which of its parameters are on this rank."""

    @property
    def data_parallel(self) -> Replicated:
        """What it does together with its replicas."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields all parameters; those of other ranks are empty."""

    def split_parameters(self) -> Iterator[nn.Parameter]:
        """Yields the parameters that are split over the tensor-parallel ranks."""


class Optimizer(Protocol):
    """A DistributedOptimizer.

    Attributes:
        optimizer: the torch optimizer that it wraps.
    """

    optimizer: torch.optim.Optimizer

    @property
    def applied_loss_scale(self) -> Any:
        """What the losses of its models are multiplied by; None for nothing."""

    @property
    def needs_wholes(self) -> bool:
        """Whether its updates look at more than this rank has."""

    @property
    def is_updating(self) -> bool:
        """Whether what its masters are updated by runs."""

    def take_gradients(self) -> None:
        """Brings gradients to what the wrapped optimizer updates."""

    def serves(self, model: Any) -> bool:
        """Tells whether it holds a parameter of ``model``."""
