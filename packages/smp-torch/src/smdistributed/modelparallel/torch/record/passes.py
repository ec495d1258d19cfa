"""What a microbatch whose Python has run leaves behind."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.record.costs.meter import Profile
from smdistributed.modelparallel.torch.record.ir import Graph
from smdistributed.modelparallel.torch.record.leaves.spans import Span
from smdistributed.modelparallel.torch.record.questions.decisions import Decisions
from smdistributed.modelparallel.torch.record.questions.pending import PendingNumber
from smdistributed.modelparallel.torch.record.trace.constants import Constants
from smdistributed.modelparallel.torch.record.trace.stored import Stored
from smdistributed.modelparallel.torch.record.trace.tree import Entry, Trace, Way
from smdistributed.modelparallel.torch.state.contents import tensors_held
from smdistributed.modelparallel.torch.tensors.nested import template

logger = logging.getLogger(__name__)


@dataclass
class Passed:
    """A microbatch whose Python has run.

    Attributes:
        result: what the step function returned: a template with values.
        way: that it went; None while the partition is not decided.
        constants: the tensors that it read besides its arguments.
        pending: the numbers that were taken from activations.
        profile: of the modules that ran on fakes.
        opened: what to make the way of, once the partition is decided.
        stored: where it has stored activations that outlive it.
    """

    result: Any
    way: Way | None
    constants: Constants
    pending: list[PendingNumber]
    profile: Profile
    opened: OpenPass | None = None
    stored: list[Stored] = field(default_factory=list)

    @property
    def graph(self) -> Graph:
        """What it computes."""
        assert self.way is not None
        return self.way.graph

    @property
    def plan(self) -> Any:
        """The graph, cut."""
        assert self.way is not None
        return self.way.plan

    def leave_fakes(self) -> None:
        """Puts values in the places of fakes: these stand for other tensors in the next pass."""
        returned = iter(self.graph.result)
        self.result = template(self.result, lambda tensor: next(returned), _returned_object)
        for number in self.pending:
            number.tensor = None

    def constants_read(self) -> list[torch.Tensor]:
        """Returns the tensors that stand behind its arguments.

        Raises:
            UnsupportedError: a large one was changed in place since it was read.
        """
        return self.constants.tensors(self.graph.constants)


@dataclass
class OpenPass:
    """A pass in which modules were run that had no partition yet.

    Attributes:
        at: the last entry that was known.
        known: the entries up to it.
        log: the new ones, those of modules that turn out to be leaves included.
        spans: the calls of modules.
        trace, call, decisions: what the pass was made with.
        end: of the way.
        models: those whose parameters or buffers were read.
    """

    at: Entry
    known: list[Entry]
    log: list[Entry]
    spans: list[Span]
    trace: Trace
    call: tuple[Sequence[Any], Mapping[str, Any]]
    decisions: Decisions
    end: Entry
    models: set[nn.Module]


def _returned_object(obj: Any) -> Any:
    """Returns what the user gets for an object that the step function returned."""
    if isinstance(obj, PendingNumber) or not any(True for _ in tensors_held(obj)):
        return obj
    logger.warning(
        "the step function returned an object of class %s, whose tensors are spread over the "
        "partitions; None is returned in its place.",
        type(obj).__qualname__,
    )
    return None
