"""What passes hold is noted where somebody is told of it: in the log, or because it may not fit."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.torch.record.costs.meter import Meter
from smdistributed.modelparallel.torch.stepping import tracing
from smdistributed.modelparallel.torch.stepping.tracing import Tracing

#: Of two weights of four bytes, their gradients and two moments.
NEEDED = 32


@pytest.mark.parametrize(
    ("level", "capacity", "num_partitions", "is_known", "is_noted"),
    [
        (logging.INFO, 1 << 40, 1, False, True),
        (logging.WARNING, 1 << 40, 1, False, False),
        (logging.WARNING, 3 * NEEDED, 1, False, True),
        (logging.WARNING, 3 * NEEDED, 2, False, False),
        (logging.INFO, 3 * NEEDED, 1, True, False),
    ],
)
def test_what_passes_hold_is_noted_where_it_is_told(
    level: int, capacity: int, num_partitions: int, is_known: bool, is_noted: bool
) -> None:
    runtime: Any = SimpleNamespace(
        device=torch.device("cuda"),
        fake_mode=None,
        passes=SimpleNamespace(knows=lambda function: is_known),
        topology=SimpleNamespace(pp_size=num_partitions),
    )
    module = nn.Linear(2, 1, bias=False)
    model: Any = SimpleNamespace(
        tracing=SimpleNamespace(trace_execution_times=False, trace_memory_usage=False),
        get_module=lambda: module,
    )
    scene: Any = SimpleNamespace(open=[], storages=set())
    found = Tracing(runtime, lambda: None, compiles_runs=False)
    with (
        mock.patch.object(tracing, "available_on", return_value=capacity),
        mock.patch.object(tracing.logger, "isEnabledFor", lambda asked: asked >= level),
        mock.patch.object(tracing, "Meter", wraps=Meter) as made,
        found.metered([model], scene),
    ):
        assert ("not_kept" in made.call_args.kwargs) is is_noted
