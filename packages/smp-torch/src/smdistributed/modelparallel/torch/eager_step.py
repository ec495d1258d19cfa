"""A step with one partition: the body runs as it is, once for each microbatch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from smdistributed.modelparallel.common.microbatch import SplitRules, split_arguments
from smdistributed.modelparallel.torch.model import DistributedModel
from smdistributed.modelparallel.torch.pipeline.capture import profile
from smdistributed.modelparallel.torch.random_streams import draw_step_seed
from smdistributed.modelparallel.torch.runtime import TorchRuntime
from smdistributed.modelparallel.torch.step_results import combine
from smdistributed.modelparallel.torch.tensors import TENSORS

logger = logging.getLogger(__name__)


class EagerStep:
    """Runs a step function with one partition.

    Args:
        runtime: the state of the library in this process.
        function: the user's function.
        rules: which arguments are split.
        detach_outputs: detach returned tensors.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        function: Callable[..., Any],
        rules: SplitRules,
        detach_outputs: bool,
    ) -> None:
        self.runtime = runtime
        self._function = function
        self._rules = rules
        self._detach_outputs = detach_outputs
        self._weight = 1.0
        self._microbatch = 0
        self._reached: dict[DistributedModel, None] = {}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one mini-batch; see ``StepFunction``."""
        runtime = self.runtime
        calls, weights = split_arguments(
            TENSORS, self._rules, runtime.config.microbatches, args, kwargs
        )
        models = runtime.live_models()
        self._measure(models, *calls[0])
        seed = draw_step_seed()
        results = []
        self._reached = {}
        for model in models:
            model.sync_buffers()
            if model.random_streams is not None:
                model.random_streams.begin_step(seed)
        runtime.current_step = self
        try:
            for microbatch, (call, weight) in enumerate(zip(calls, weights, strict=True)):
                self._microbatch, self._weight = microbatch, weight
                self._enter_pass(backward=False)
                results.append(self._function(*call[0], **call[1]))
        finally:
            runtime.current_step = None
            for model in models:
                if model.random_streams is not None:
                    model.random_streams.end_step()
        for model in self._reached:
            model.reduce_gradients()
        return combine(results, self._detach_outputs)

    def backward(self, model: DistributedModel, tensors: Any, grad_tensors: Any) -> None:
        """Differentiates one microbatch; its gradients count by its share of the batch."""
        self._reached[model] = None
        scale = self._weight if model.gradient_scale == "mean" else 1.0
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
            grad_tensors = None if grad_tensors is None else [grad_tensors]
        starts = [
            None
            if tensor.numel() != 1 and start is None
            else torch.full_like(tensor, scale)
            if start is None
            else start * scale
            for tensor, start in zip(tensors, grad_tensors or [None] * len(tensors), strict=True)
        ]
        self._enter_pass(backward=True)
        torch.autograd.backward(tensors, starts)
        self._enter_pass(backward=False)

    def _enter_pass(self, *, backward: bool) -> None:
        for model in self.runtime.live_models():
            if model.random_streams is not None:
                model.random_streams.enter_pass(self._microbatch, backward=backward)

    def _measure(
        self, models: list[DistributedModel], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Finds the modules that draw random numbers, once, by a run on fakes."""
        if all(model.random_streams is not None for model in models):
            return
        runtime = self.runtime
        runtime.current_step = _Unmeasured()
        try:
            fakes = [model.fakes for model in models]
            costs = profile(fakes, self._function, args, kwargs, runtime.fake_mode, runtime.device)
        except Exception as error:
            # One partition needs no recording; only the independence of masks is lost.
            logger.warning(
                "this step cannot be recorded, so its random numbers will differ from those with "
                "more partitions: %s",
                error,
            )
            return
        finally:
            runtime.current_step = None
        for model in models:
            model.measure(costs)


class _Unmeasured:
    """Stands for the step during the run on fakes: there is nothing to differentiate."""

    def backward(self, model: DistributedModel, tensors: Any, grad_tensors: Any) -> None:
        pass
