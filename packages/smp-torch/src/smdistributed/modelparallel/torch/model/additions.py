"""What code adds to a model that has one partition while a step runs."""

from __future__ import annotations

from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.model.holder import Holder
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime


class Additions:
    """Modules and parameters that were added since the last step.

    Args:
        runtime: of the job.
        holder: of the model.
    """

    def __init__(self, runtime: TorchRuntime, holder: Holder) -> None:
        self._runtime = runtime
        self._holder = holder
        self._has_any = False

    def note(self, parent: nn.Module, name: str, added: nn.Module | nn.Parameter) -> None:
        """Takes note of an addition; called before it is there.

        Raises:
            UnsupportedError: it has gradients, which replicas would not average.
        """
        runtime, fakes = self._runtime, self._holder.fakes
        if parent not in fakes.names or runtime.topology.pp_size > 1:
            return  # on fakes the recorder sees to it
        self._has_any = True
        known = set(map(id, fakes.model.parameters()))
        parameters = added.parameters() if isinstance(added, nn.Module) else [added]
        is_new = any(each.requires_grad and id(each) not in known for each in parameters)
        if is_new and runtime.config.ddp and runtime.topology.dp_cp_size > 1:
            raise UnsupportedError(
                f"{name} is added to {fakes.names[parent] or 'the model'} inside a step, and "
                "replicas would not average its gradients in this step. Make that change between "
                "two steps, or run the model once before it becomes a DistributedModel."
            )

    def take(self) -> bool:
        """Returns whether there were any, and forgets them."""
        had_any, self._has_any = self._has_any, False
        return had_any
