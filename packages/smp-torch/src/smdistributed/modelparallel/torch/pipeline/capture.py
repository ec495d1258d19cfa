"""Recording one microbatch of a user's step function as a graph.

The user's function runs once on fake tensors, on every rank alike, without communication. Calls of
modules that sit whole on one partition become leaves; torch functions called between them become
glue. Everything else that Python does in the function is not recorded: it happened once, here, and
its results are constants of the graph. What cannot be recorded soundly raises.

Two runs serve two purposes: ``profile`` records nothing at module level but measures each module,
for the partitioner; ``capture`` records the graph along a partition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from smdistributed.modelparallel.torch.pipeline.fakes import FakeModel
from smdistributed.modelparallel.torch.pipeline.ir import Graph
from smdistributed.modelparallel.torch.pipeline.recorder import Profile, Recorder


def profile(
    models: Sequence[FakeModel],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: FakeTensorMode,
    device: torch.device,
) -> Profile:
    """Runs one microbatch on fakes and measures every module on the way.

    Args:
        models: all models that the function may call.
        function: the user's step function.
        args, kwargs: one microbatch of its arguments.
        mode: the fake mode of the models' fakes.
        device: where the step will run.
    """
    recorder = Recorder(models, mode, device, leaves=None)
    recorder.run(function, args, kwargs)
    return recorder.profile


def capture(
    models: Sequence[FakeModel],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: FakeTensorMode,
    device: torch.device,
    leaves: Mapping[nn.Module, str],
    on_start: Callable[[Recorder], None] = lambda recorder: None,
) -> Graph:
    """Runs one microbatch on fakes and records it.

    Args:
        models: all models that the function may call.
        function: the user's step function.
        args, kwargs: one microbatch of its arguments.
        mode: the fake mode of the models' fakes.
        device: where the step will run.
        leaves: the modules to record as one opaque call, with their names; of nested ones, the
            outermost that is called.
        on_start: told the recorder, so that ``model.backward`` finds it.

    Raises:
        UnsupportedError: the function does something that a replay could not repeat.
    """
    recorder = Recorder(models, mode, device, leaves)
    on_start(recorder)
    result = recorder.run(function, args, kwargs)
    recorder.graph.result = recorder.template(result, "the step function's result")
    recorder.check_rebound_buffers()
    return recorder.graph
