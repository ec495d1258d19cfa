"""The one slot of a process that holds the library's state.

Everything inside the library takes what it needs as an argument; only the façade of a framework
package reads the slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from smdistributed.modelparallel.common.comm.communicator import Communicator
from smdistributed.modelparallel.common.comm.transport import Transport
from smdistributed.modelparallel.common.config import Config
from smdistributed.modelparallel.common.errors import NotInitializedError
from smdistributed.modelparallel.common.topology import Coordinates, Topology


@dataclass(kw_only=True)
class Runtime:
    """What ``smp.init`` builds; framework packages extend it."""

    config: Config
    topology: Topology
    transport: Transport
    communicator: Communicator

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.transport.rank

    @property
    def coordinates(self) -> Coordinates:
        """This process's ranks in the groups of the topology."""
        return self.topology.coordinates(self.rank)


R = TypeVar("R", bound=Runtime)


class RuntimeSlot(Generic[R]):
    """Holds the runtime of this process, or nothing before ``smp.init``."""

    def __init__(self) -> None:
        self._runtime: R | None = None

    @property
    def is_filled(self) -> bool:
        """Whether ``smp.init`` has run."""
        return self._runtime is not None

    def fill(self, runtime: R) -> None:
        """Keeps the runtime that ``smp.init`` built."""
        self._runtime = runtime

    def clear(self) -> None:
        """Forgets the runtime."""
        self._runtime = None

    def get(self) -> R:
        """Returns the runtime.

        Raises:
            NotInitializedError: ``smp.init`` has not run.
        """
        if self._runtime is None:
            raise NotInitializedError(
                "the model parallelism library is not initialised in this process: call "
                "smp.init() before anything else of smp."
            )
        return self._runtime

    def together(self, call: str) -> R:
        """Returns the runtime, for what all processes call.

        Args:
            call: what is called, for the message.

        Raises:
            NotInitializedError: ``smp.init`` has not run.
            SMPError: the others do not come to this call; see ``Reach``.
        """
        runtime = self.get()
        runtime.communicator.reach.check(call, range(runtime.topology.size))
        return runtime
