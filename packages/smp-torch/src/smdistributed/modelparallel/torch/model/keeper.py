"""Which rank has the values of an absent tensor."""

from __future__ import annotations

import functools
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.absence import following
from smdistributed.modelparallel.torch.absence.notes import REMEDY, shortened
from smdistributed.modelparallel.torch.absence.sharing import MemorySharers
from smdistributed.modelparallel.torch.absence.tensors import GRADIENT_OF
from smdistributed.modelparallel.torch.absence.values import Question, answer
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime


class ModelsKeeper:
    """What absent tensors know of the models of this process.

    Args:
        runtime: the state of the library in this process.
    """

    def __init__(self, runtime: TorchRuntime) -> None:
        self._runtime = runtime
        self.fake_mode = runtime.fake_mode
        self.run = following.run
        self.sharing_memory = MemorySharers().of

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter, a buffer or a gradient that this rank has."""
        models: Any = self._runtime.live_models()
        return any(
            tensor is each or (each.requires_grad and tensor is each.grad)
            for model in models
            for each in (*model.local_parameters(), *model.local_buffers())
        )

    def check_use(self, names: str, what: str) -> None:
        """Raises inside a step.

        Raises:
            UnsupportedError: it is one.
        """
        if self._runtime.current_step is not None or self._runtime.random.is_real:
            raise UnsupportedError(
                f"{what} gets {names}, which another partition has, or what a script computed from "
                "it, while a step runs. Make it a parameter or a buffer of the model, or gather "
                f"its values before the step. {REMEDY}"
            )

    def answer(self, question: Question) -> torch.Tensor:
        """Returns what an absent tensor is. Collective: PP_GROUP, unless that is known.

        Raises:
            UnsupportedError: the ranks cannot compute it together.
        """
        runtime = self._runtime
        if runtime.shares_gradients and any(
            each.startswith(GRADIENT_OF) for each in question.names
        ):
            raise UnsupportedError(
                f"{question.what} asks for {shortened(question.names)}, which is on another "
                "partition, where with shard_optimizer_state or sharded data parallelism no rank "
                "of this pipeline needs to have it: update by an optimizer in "
                "smp.DistributedOptimizer, clip by smp.clip_grad_norm_, and change gradients in "
                "place, on every rank (gradient.mul_)."
            )
        exchange = functools.partial(
            runtime.communicator.allgather, group=CommGroup.PP_GROUP, purpose="values of parameters"
        )
        return answer(question, exchange, runtime.coordinates.pp_rank, runtime.device)
