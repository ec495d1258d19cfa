"""The optimizer that replaces the user's: ``smp.DistributedOptimizer``.

Source: smd_model_parallel_pytorch.rst, DistributedOptimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import CheckpointError, SMPError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.model import PARTIAL_KEY, DistributedModel
from smdistributed.modelparallel.torch.runtime import TorchRuntime


class DistributedOptimizer(torch.optim.Optimizer):
    """A torch optimizer over the parameters of a distributed model.

    It may be built before or after the model is wrapped or partitioned: parameters of other ranks
    have no gradient here, so the wrapped optimizer passes over them and keeps no state for them.
    Attributes that are not its own are those of the wrapped optimizer.

    Args:
        runtime: the state of the library in this process.
        optimizer: the torch optimizer to wrap.

    Raises:
        TypeError: ``optimizer`` is no ``torch.optim.Optimizer``.
    """

    # Not initialised by the base class: groups and state are the wrapped optimizer's.
    def __init__(self, runtime: TorchRuntime, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "DistributedOptimizer takes a torch.optim.Optimizer; received "
                f"{type(optimizer).__name__}."
            )
        self.optimizer = optimizer
        self._runtime = runtime
        runtime.optimizers.append(weakref.ref(self))

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's."""
        return self.optimizer.defaults

    def serves(self, model: DistributedModel) -> bool:
        """Tells whether it holds a parameter of ``model``."""
        own = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        return any(id(parameter) in own for parameter in model.parameters())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies the gradients that the step function left; call it outside the step function.

        Raises:
            SMPError: called inside a step function, whose body runs once a microbatch.
        """
        if self._runtime.current_step is not None:
            raise SMPError(
                "optimizer.step was called inside a step function, which runs once for each "
                "microbatch; call it after the step function has returned."
            )
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, as torch's."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as torch's."""
        self.optimizer.add_param_group(param_group)

    def local_state_dict(self) -> dict[str, Any]:
        """Returns the state of this rank's parameters, and whether that is only a part."""
        state: dict[str, Any] = dict(self.optimizer.state_dict())
        state[PARTIAL_KEY] = self._runtime.topology.pp_size > 1
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what ``local_state_dict`` returned on the same rank under the same partition.

        Raises:
            CheckpointError: the state is of another partition.
        """
        state = dict(state_dict)
        state.pop(PARTIAL_KEY, None)
        parameters = [each for group in self.param_groups for each in group["params"]]
        for index, values in state["state"].items():
            parameter = parameters[index]
            for name, value in values.items():
                if (
                    isinstance(value, torch.Tensor)
                    and value.dim()
                    and (value.shape != parameter.shape)
                ):
                    raise CheckpointError(
                        f"optimizer state {name} of parameter {index} has shape "
                        f"{tuple(value.shape)}, the parameter here {tuple(parameter.shape)}: the "
                        "state was saved under another partition. Resume with the same one."
                    )
        self.optimizer.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the optimizer over all partitions.

        Collective: every rank of the PP_GROUP.
        """
        own = self.optimizer.state_dict()
        if self._runtime.topology.pp_size == 1:
            return own
        parts = self._runtime.communicator.allgather(own, CommGroup.PP_GROUP)
        merged = dict(own)
        merged["state"] = {
            index: values for part in parts for index, values in part["state"].items()
        }
        return merged
