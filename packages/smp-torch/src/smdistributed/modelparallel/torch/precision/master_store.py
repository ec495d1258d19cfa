"""What an optimizer updates in place of the parameters of a model.

A parameter of a model is what the forward pass reads. What is updated is its *master*: with half
precision a copy in fp32, where state is sharded on one of the ranks that hold the parameter only,
and otherwise the parameter itself. The wrapped optimizer gets the masters of this rank in its
parameter groups, so that whatever it computes, it computes on them; each update ends by writing the
masters back to the parameters.

Source: model-parallel-extended-features-pytorch-fp16.md;
model-parallel-extended-features-pytorch-optimizer-state-sharding.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.absence.optimizers import cleared_unseen
from smdistributed.modelparallel.torch.compat.private.tensors import copy_all
from smdistributed.modelparallel.torch.precision.split_master import (
    SplitMaster,
    follow,
    is_split,
    values_of,
)
from smdistributed.modelparallel.torch.sharding.parameter import (
    ShardedParameter,
    block_of,
    gradient_here,
    held,
    sparse_gradient_here,
)


@dataclass(eq=False)
class Master:
    """What is updated for one parameter of the model.

    Attributes:
        parameter: of the model.
        source: what is here of the parameter: itself, or the block of a sharded one.
        tensor: what the wrapped optimizer updates; ``source`` itself where it is as precise.
        version: of ``source`` when the master was last written to it.
    """

    parameter: nn.Parameter
    source: nn.Parameter
    tensor: nn.Parameter
    version: int

    @property
    def is_copy(self) -> bool:
        """Whether it has memory of its own."""
        return self.tensor is not self.source

    @property
    def is_rounded(self) -> bool:
        """Whether it is a block of another type than sums of its gradients have."""
        is_sharded = isinstance(self.parameter, ShardedParameter)
        return is_sharded and not self.is_copy and self.parameter.shard.is_wide  # type: ignore[attr-defined]


class MasterStore:
    """The masters of one optimizer on this rank.

    Args:
        optimizer: the wrapped one, whose parameter groups get masters in place of parameters.
        here: gives the parameters of models on this rank, each with whether this rank updates it.
        foreign: tells whether a parameter is one of a model, and not on this rank.
        half: the type of parameters that have masters in fp32; None where there are none.
        splits: tells of such a parameter whether its master is updated together with it.

    Attributes:
        groups: the parameters that the script gave, by parameter group.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        here: Callable[[], Mapping[nn.Parameter, bool]],
        foreign: Callable[[nn.Parameter], bool],
        half: torch.dtype | None,
        splits: Callable[[torch.Tensor], bool],
    ) -> None:
        self._splits = splits
        self._optimizer = optimizer
        self._here = here
        self._foreign = foreign
        self._half = half
        self._of_tensor: dict[int, Master] = {}
        self._seen: set[int] = set()
        self.groups: list[list[nn.Parameter]] = []

    def __iter__(self) -> Iterator[Master]:
        return iter(self._of_tensor.values())

    def parameter_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the parameter of the model behind what the wrapped optimizer holds."""
        master = self._of_tensor.get(id(tensor))
        return tensor if master is None else master.parameter

    # ------------------------------------------------------------------ taking them

    def adopt(self) -> None:
        """Puts masters in the places of parameters, also of those that came since.

        A parameter that has been written to since the last update counts: its master follows.
        """
        here = self._here()
        for number, group in enumerate(self._optimizer.param_groups):
            if number == len(self.groups):
                self.groups.append([])
            kept = []
            for each in group["params"]:
                if id(each) in self._of_tensor:
                    kept.append(each)
                    continue
                if id(each) not in self._seen:
                    self._seen.add(id(each))
                    self.groups[number].append(each)
                kept += self._kept(each, here)
            group["params"][:] = kept
        for master in self:
            if master.is_copy and master.source._version != master.version:
                self._read(master)

    def _kept(self, parameter: nn.Parameter, here: Mapping[nn.Parameter, bool]) -> list[Any]:
        """Returns what the wrapped optimizer holds for a parameter: one tensor or none."""
        if parameter not in here:
            if not self._foreign(parameter):
                return [parameter]  # of no model
        elif not parameter.requires_grad:
            return [parameter]  # frozen: it is not updated, and may be set free
        elif here[parameter] and held(parameter).numel():
            return [self._make(parameter).tensor]
        self._optimizer.state.pop(parameter, None)
        return []

    @torch.no_grad()
    def _make(self, parameter: nn.Parameter) -> Master:
        source = tensor = held(parameter)
        if parameter.dtype is self._half:
            split = self._splits(source)
            tensor = SplitMaster.of(source) if split else nn.Parameter(source.detach().float())
        if tensor is not parameter and parameter in self._optimizer.state:
            state = self._optimizer.state.pop(parameter)
            self._optimizer.state[tensor] = {
                key: value.float() if _is_half(value) else value
                for key, value in block_of(parameter, state).items()
            }
        master = Master(parameter, source, tensor, source._version)
        self._of_tensor[id(tensor)] = master
        return master

    @torch.no_grad()
    def _read(self, master: Master) -> None:
        if isinstance(master.tensor, SplitMaster):
            follow(master.tensor)
        else:
            master.tensor.copy_(master.source)
        master.version = master.source._version

    # ------------------------------------------------------------------ an update

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Gives each master the gradient of its parameter.

        Raises:
            UnsupportedError: a gradient is sparse.
        """
        for master in self:
            gradient = gradient_here(master.parameter)
            if not (master.is_copy or master.is_rounded):
                continue
            if master.is_rounded and gradient is not None:
                master.tensor.grad = gradient.to(master.tensor.dtype)
            elif gradient is None:
                master.tensor.grad = None
            elif gradient.is_sparse:
                raise UnsupportedError(
                    f"a parameter of shape {tuple(master.parameter.shape)} has a sparse gradient, "
                    "which half precision does not take; use sparse=False."
                )
            else:
                # A copy, since it will be unscaled.
                copy = not self.shares_gradient(master.parameter)
                master.tensor.grad = gradient.to(torch.float32, copy=copy)

    def shares_gradient(self, parameter: torch.Tensor) -> bool:
        """Whether the gradient of a master is that of its parameter, in the same memory.

        Blocks of sums in fp32 are the largest tensors of a step, and without a loss scale only
        clipping changes them, as torch's does.
        """
        return self._half is torch.bfloat16 and isinstance(parameter, ShardedParameter)

    @contextlib.contextmanager
    def sparse_gradients(self) -> Iterator[None]:
        """Inside, an optimizer sees blocks of sparse gradients as such."""
        found = [(each.tensor, sparse_gradient_here(each.parameter)) for each in self]
        dense = [(each, each.grad) for each, gradient in found if gradient is not None]
        for tensor, gradient in found:
            if gradient is not None:
                tensor.grad = gradient.to(tensor.dtype)
        try:
            yield
        finally:
            for tensor, gradient in dense:
                tensor.grad = gradient

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients that the wrapped optimizer is about to use."""
        return [
            each.grad
            for group in self._optimizer.param_groups
            for each in group["params"]
            if each.grad is not None
        ]

    @torch.no_grad()
    def publish(self, written: Collection[int] = ()) -> None:
        """Writes the masters to their parameters.

        Args:
            written: ids of what the wrapped optimizer updates that are there already.
        """
        copies = [master for master in self if master.is_copy]
        # What is split has written its upper half already.
        missing = [
            each for each in copies if id(each.tensor) not in written and not is_split(each.tensor)
        ]
        if missing:
            copy_all([each.source for each in missing], [each.tensor for each in missing])
        for master in copies:
            master.version = master.source._version

    def forget_gradients(self, set_to_none: bool) -> None:
        """Clears the gradients of the parameters that the script gave, and of masters."""
        parameters = [each for group in self.groups for each in group]
        with cleared_unseen(parameters if set_to_none else ()):
            for parameter in parameters:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if set_to_none:
                    parameter.grad = None
                else:
                    if gradient.grad_fn is not None:
                        gradient.detach_()
                    gradient.zero_()
        self.release_gradients()

    def release_gradients(self) -> None:
        """Frees the gradients of masters that are not those of parameters."""
        for master in self:
            if master.is_copy or master.is_rounded:
                master.tensor.grad = None

    # ------------------------------------------------------------------ state

    def copies(self) -> dict[int, torch.Tensor]:
        """Returns what masters with memory of their own are written to, by the master's id."""
        return {id(each.tensor): each.source for each in self if each.is_copy}

    def values(self) -> dict[nn.Parameter, torch.Tensor]:
        """Returns what the masters hold, by parameter, of those with memory of their own."""
        return {each.parameter: values_of(each.tensor) for each in self if each.is_copy}

    @torch.no_grad()
    def load(self, values: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Gives masters and their parameters values that ``values`` gave."""
        for master in self:
            if master.parameter in values:
                master.tensor.copy_(values[master.parameter])
        self.publish()


def _is_half(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
