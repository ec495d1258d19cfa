"""Where a run on fakes is, for the objects that record it together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from smdistributed.modelparallel.torch.record.calls.regions import Again, Region
from smdistributed.modelparallel.torch.state.snapshot import Change


@dataclass
class RunState:
    """The place of a run.

    Attributes:
        is_open: no module is a leaf yet.
        paused: how many reasons there are to record nothing.
        leaf_depth: how many leaves the run is inside of.
        outside: how many hooks that are lifted out of modules the run is inside of.
        region: the checkpointed call that it is inside of; None outside.
        written_again: identities of the buffers that regions wrote to, which write to them again
            when they are computed again.
        runs_for_real: a module runs on real tensors at present.
        replaces_fakes: it does so because it cannot run on fakes.
        possible: what modules that decide by their input change for other numbers.
        questions: how many about inputs were answered.
        real_runs: how often a module had to run on real tensors.
        backward_code: how often code was given that a backward pass will run.
        gradient_reads: how often a gradient was looked at.
        parameter_hooks: how often a hook was put on the gradient of a parameter.
    """

    is_open: bool
    paused: int = 0
    leaf_depth: int = 0
    outside: int = 0
    region: Region | None = None
    num_regions: int = 0
    written_again: list[int] = field(default_factory=list)
    runs_for_real: bool = False
    replaces_fakes: bool = False
    possible: list[Change] = field(default_factory=list)
    questions: int = 0
    real_runs: int = 0
    backward_code: int = 0
    gradient_reads: int = 0
    parameter_hooks: int = 0

    def begin(self) -> None:
        """Starts a microbatch."""
        self.paused = self.leaf_depth = self.outside = self.num_regions = 0
        self.region = None
        self.possible.clear()
        self.written_again.clear()

    @property
    def is_glue(self) -> bool:
        """Whether what runs at present will be replayed call by call."""
        return not self.is_open and not self.leaf_depth

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Records nothing meanwhile."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    @contextlib.contextmanager
    def checkpointed(self, how: Again) -> Iterator[None]:
        """Gives what is recorded inside a region of its own; the outermost one counts."""
        outer = self.region
        if outer is None:
            self.region = Region(self.num_regions, how)
            self.num_regions += 1
        else:
            self.region = outer._replace(depth=outer.depth + 1)
        try:
            yield
        finally:
            self.region = outer

    @contextlib.contextmanager
    def in_leaf(self) -> Iterator[None]:
        """Stands for being inside a leaf."""
        paused, self.paused = self.paused, 0
        self.leaf_depth += 1
        try:
            yield
        finally:
            self.leaf_depth -= 1
            self.paused = paused
