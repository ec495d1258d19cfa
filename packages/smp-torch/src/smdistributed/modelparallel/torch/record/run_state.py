"""Where a run on fakes is, for the objects that record it together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from smdistributed.modelparallel.torch.record.python_state import StateWatch


@dataclass
class RunState:
    """The place of a run.

    Attributes:
        watch: follows the Python code that runs at present.
        is_profile: nothing is recorded, only measured.
        paused: how many reasons there are to record nothing.
        leaf_depth: how many leaves the run is inside of.
        region: number of the checkpointed call that it is inside of; None outside.
        runs_for_real: a module runs on real tensors at present.
    """

    watch: StateWatch
    is_profile: bool
    paused: int = 0
    leaf_depth: int = 0
    region: int | None = None
    num_regions: int = 0
    runs_for_real: bool = False

    @property
    def is_glue(self) -> bool:
        """Whether what runs at present will be replayed call by call."""
        return not self.is_profile and not self.leaf_depth

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Records nothing meanwhile."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    @contextlib.contextmanager
    def checkpointed(self) -> Iterator[None]:
        """Gives what is recorded inside a region of its own; the outermost one counts."""
        if self.region is not None:
            yield
            return
        self.region = self.num_regions
        self.num_regions += 1
        try:
            yield
        finally:
            self.region = None

    @contextlib.contextmanager
    def in_leaf(self, watch: StateWatch) -> Iterator[None]:
        """Stands for being inside a leaf, which ``watch`` follows."""
        outer, paused = self.watch, self.paused
        self.watch, self.paused = watch, 0
        self.leaf_depth += 1
        try:
            yield
        finally:
            self.leaf_depth -= 1
            self.watch, self.paused = outer, paused
