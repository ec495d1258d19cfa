"""A step whose body runs on fakes, and what the runtime asks of it meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from smdistributed.modelparallel.torch.activations.offloading import Offloading
from smdistributed.modelparallel.torch.model.distributed import DistributedModel
from smdistributed.modelparallel.torch.record.recorder import Recorder
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime


class StepOnFakes:
    """The step in progress, as long as a recorder runs its body.

    Args:
        runtime: the state of the library in this process.
    """

    is_tracing = True  # the body itself runs for nothing else
    offloading: Offloading | None = None

    def __init__(self, runtime: TorchRuntime) -> None:
        self.runtime = runtime
        self._recorder: Recorder | None = None

    @contextlib.contextmanager
    def _running(self, recorder: Recorder) -> Iterator[None]:
        """Marks the runtime as being inside this step while the body runs."""
        self._recorder = recorder
        try:
            with self._trying():
                yield
        finally:
            self._recorder = None

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        """The same while the body, or a part of it, is tried."""
        self.runtime.current_step = self
        try:
            yield
        finally:
            self.runtime.current_step = None

    def backward(
        self, model: DistributedModel, tensors: Any, grad_tensors: Any, *, retain_graph: bool
    ) -> None:
        """Notes a ``model.backward`` of the body; graphs stay until all are made."""
        if self._recorder is not None:
            # What is recorded keeps no DistributedModel: the script lets go of that.
            self._recorder.backward(model.get_module(), tensors, grad_tensors)
