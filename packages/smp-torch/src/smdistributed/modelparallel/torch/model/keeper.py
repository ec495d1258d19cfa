"""Which rank has the values of a tensor that not every rank has."""

from __future__ import annotations

import functools
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.absence import following, owned
from smdistributed.modelparallel.torch.absence.forms import Forms
from smdistributed.modelparallel.torch.absence.given import GivenData
from smdistributed.modelparallel.torch.absence.notes import GRADIENT_OF, REMEDY, shortened
from smdistributed.modelparallel.torch.absence.sharing import MemorySharers
from smdistributed.modelparallel.torch.absence.values import Question, answer
from smdistributed.modelparallel.torch.compat.calling_line import is_called_by_library
from smdistributed.modelparallel.torch.compat.private import below, compiled
from smdistributed.modelparallel.torch.parts import at_rest
from smdistributed.modelparallel.torch.runtime.published import NotPublishedError, Published
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime

#: What brings a function of torch to those who ask whether code of this library has called it.
_MECHANISM = frozenset(
    (
        *(__name__, following.__name__, owned.__name__),
        *(below.__name__, compiled.__name__, at_rest.__name__),
    )
)


class ModelsKeeper:
    """What absent tensors, and those of this rank, know of the models of this process.

    Args:
        runtime: the state of the library in this process.
    """

    def __init__(self, runtime: TorchRuntime) -> None:
        self._runtime = runtime
        self.fake_mode = runtime.fake_mode
        self.run = following.run
        self._forms = Forms(runtime.fake_mode)
        self.sharing_memory = MemorySharers().of
        self.given = GivenData()

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

    def is_of_library(self) -> bool:
        """Whether code of this library has called a function of torch."""
        return is_called_by_library(_MECHANISM)

    def needs_values(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the form of what a function gives depends on values; see ``following``."""
        return self._forms.depend_on_values(func, args, kwargs)

    def leave(self, place: str, values: torch.Tensor) -> None:
        """Leaves values that this rank has for the others of its pipeline."""
        self._published.leave(self._now(place), values)

    def _now(self, place: str) -> str:
        return f"{place}/{self._runtime.num_updates}"

    @property
    def _published(self) -> Published:
        published = self._runtime.published
        assert published is not None  # with partitions there are several ranks
        return published

    def _taken(self, question: Question, owner: int) -> torch.Tensor:
        """Returns what one other rank has, and reads at the same place of the script."""
        runtime = self._runtime
        rank = runtime.topology.members(CommGroup.PP_GROUP, runtime.rank)[owner]
        try:
            values = self._published.take(rank, self._now(question.place))
        except NotPublishedError as error:
            raise question.refusal() from error
        return values.to(runtime.device)

    def answer(self, question: Question) -> torch.Tensor:
        """Returns what an absent tensor is. Collective: PP_GROUP, unless one rank has it.

        Raises:
            UnsupportedError: the ranks cannot compute it together.
        """
        runtime = self._runtime
        if runtime.shares_gradients and any(
            each.startswith(GRADIENT_OF) for each in question.origin.names
        ):
            raise UnsupportedError(
                f"{question.what} asks for {shortened(question.origin.names)}, which is on another "
                "partition, where with shard_optimizer_state or sharded data parallelism no rank "
                "of this pipeline needs to have it: update by an optimizer in "
                "smp.DistributedOptimizer, clip by smp.clip_grad_norm_, and change gradients in "
                "place, on every rank (gradient.mul_)."
            )
        owner = question.owner
        if owner is not None and owner != runtime.coordinates.pp_rank:
            return self._taken(question, owner)
        exchange = functools.partial(
            runtime.communicator.allgather, group=CommGroup.PP_GROUP, purpose="values of parameters"
        )
        return answer(question, exchange, runtime.coordinates.pp_rank, runtime.device)
