"""An update by way of masters: gradients in, one update, parameters out.

Source: model-parallel-extended-features-pytorch-fp16.md;
model-parallel-extended-features-pytorch-optimizer-state-sharding.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.compat.private.tensors import multiply_all, norms_of_all
from smdistributed.modelparallel.torch.gradients.norm import norm_over_ranks, who_speaks
from smdistributed.modelparallel.torch.precision import fused_update
from smdistributed.modelparallel.torch.precision.casting import half_type
from smdistributed.modelparallel.torch.precision.loss_scale import LossScale
from smdistributed.modelparallel.torch.precision.master_store import MasterStore
from smdistributed.modelparallel.torch.precision.one_pass_adam import OnePassAdam
from smdistributed.modelparallel.torch.runtime.protocols import Model
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.sharding.parameter import (
    forget_square,
    gradient_here,
    known_square,
)


class MasterUpdate:
    """Updates the parameters of models through masters, together with the other ranks.

    Args:
        runtime: the state of the library in this process.
        optimizer: the wrapped one.
        models: gives the models whose parameters it holds.

    Attributes:
        store: the masters.
        loss_scale: what losses are multiplied by; None where nothing is.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        optimizer: torch.optim.Optimizer,
        models: Callable[[], list[Model]],
    ) -> None:
        self._runtime = runtime
        self._optimizer = optimizer
        self._models = models
        self.loss_scale: LossScale | None = None
        half = half_type(runtime.config)
        self.store = MasterStore(optimizer, self._here, self._is_foreign, half, self._splits)
        #: The gradients that are with the masters, so that clipping and updating share them.
        self._taken: list[tuple[torch.Tensor | None, int]] | None = None
        self._is_updating = False
        optimizer.register_step_pre_hook(_refusal(weakref.ref(self)))

    def _splits(self, source: torch.Tensor) -> bool:
        return (
            source.dtype is torch.bfloat16
            and OnePassAdam.takes(self._optimizer, self._runtime.device)
            and OnePassAdam.is_worth(source)
        )

    @property
    def is_updating(self) -> bool:
        """Whether the wrapped optimizer's step is part of an update of masters."""
        return self._is_updating

    def _here(self) -> Mapping[nn.Parameter, bool]:
        return {
            parameter: updates
            for model in self._models()
            for parameter, updates in model.data_parallel.updates().items()
        }

    def _is_foreign(self, parameter: nn.Parameter) -> bool:
        return any(parameter is each for model in self._models() for each in model.parameters())

    def adopt(self) -> None:
        """Brings masters up to date, once the models are partitioned; before, does nothing."""
        if all(model.partitioned for model in self._models()):
            self.store.adopt()

    # ------------------------------------------------------------------ an update

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Makes one update. Collective: WORLD."""
        self.adopt()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_reduced()
        self._take()
        found = self._found()
        bound = self._runtime.config.sdp_gradient_clipping
        clips = self._runtime.sharding_groups is not None and bound < float("inf")
        self._is_updating = True
        try:
            if found is None and OnePassAdam.takes(self._optimizer, self._runtime.device):
                self._update_in_one_pass(bound if clips else None)
            else:
                if clips:
                    self.clip(bound, 2.0)
                with self.store.sparse_gradients():
                    is_updated = fused_update.update(self._optimizer, found)
                if is_updated:
                    self.store.publish()
        finally:
            self._is_updating = False
        for model in self._models():
            model.data_parallel.share_updates()
        self._end(found)
        return loss

    def _check_reduced(self) -> None:
        for model in self._models():
            model.data_parallel.check_reduced()

    @torch.no_grad()
    def _update_in_one_pass(self, bound: float | None) -> None:
        """Updates with gradients whose norm is bounded, or with all of them."""
        # As torch's clip_grads_with_norm_.
        factor = None if bound is None else (bound / (self._norm(2.0) + 1e-6)).clamp(max=1.0)
        with OnePassAdam(self.store.copies(), factor) as one_pass:
            self._optimizer.step()
        self.store.publish(one_pass.copied)

    def _found(self) -> torch.Tensor | None:
        return None if self.loss_scale is None else self.loss_scale.found

    def _end(self, found: torch.Tensor | None) -> None:
        self._taken = None
        self.store.release_gradients()
        for model in self._models():
            model.scaled_by = None

    def take_gradients(self) -> None:
        """Brings gradients to the masters, for one who changes them before the next update."""
        self.adopt()
        self._take()
        for each in (each for group in self.store.groups for each in group):
            forget_square(each)

    @torch.no_grad()
    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Bounds the norm of the gradients that the next update uses. Collective: WORLD.

        Returns:
            The norm before, over the whole model. Shape: scalar.
        """
        self.adopt()
        self._check_reduced()
        self._take()
        norm = self._norm(norm_type)
        updated = [each for group in self._optimizer.param_groups for each in group["params"]]
        nn.utils.clip_grads_with_norm_(updated, max_norm, norm)
        return norm

    def _norm(self, norm_type: float) -> torch.Tensor:
        """Returns the norm of the masters' gradients, over the whole model. Collective: WORLD."""
        slices = {id(each) for model in self._models() for each in model.split_parameters()}
        is_whole = self._runtime.sharding_groups is None
        speaks = None if is_whole else who_speaks(self._runtime.live_models())
        tensors: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        squares: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for group in self._optimizer.param_groups:
            for each in group["params"]:
                parameter = self.store.parameter_of(each)
                is_slice = id(parameter) in slices
                if each.grad is not None and (speaks is None or speaks(parameter, is_slice)):
                    square = known_square(parameter, each.grad) if norm_type == 2 else None
                    if square is None:
                        tensors[is_slice].append(each.grad)
                    else:
                        squares[is_slice].append(square)
        for is_slice, found in squares.items():
            if found:  # whose norm is that of the gradients
                tensors[is_slice].append(torch.stack(found).sqrt())
        return norm_over_ranks(self._runtime, tensors[False], tensors[True], norm_type)

    @torch.no_grad()
    def _take(self) -> None:
        """Brings gradients to the masters, unless those there are the newest."""
        now = []
        for parameter in (each for group in self.store.groups for each in group):
            gradient = gradient_here(parameter)
            # What masters share they have, whoever changes it.
            shares = self.store.shares_gradient(parameter)
            version = 0 if gradient is None or shares else gradient._version
            now.append((gradient, version))
        if self._taken is None or not all(
            one is other and version == since
            for (one, version), (other, since) in zip(self._taken, now, strict=True)
        ):
            self.store.take_gradients()
            self._unscale()
            self._taken = now

    def _unscale(self) -> None:
        """Takes the loss scale out of the masters' gradients."""


class FP16_Optimizer(MasterUpdate):  # noqa: N801 - the name that scripts know
    """What ``DistributedOptimizer`` updates by under fp16: masters, and a loss scale.

    Args:
        runtime: the state of the library in this process.
        optimizer: the wrapped one.
        models: gives the models whose parameters it holds.
        loss_scale: of these models; None for bf16, which needs none.

    Source: model-parallel-extended-features-pytorch-fp16.md.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        optimizer: torch.optim.Optimizer,
        models: Callable[[], list[Model]],
        loss_scale: LossScale | None,
    ) -> None:
        super().__init__(runtime, optimizer, models)
        self.loss_scale = loss_scale

    @property
    def overflow(self) -> bool:
        """Whether the last update was left out, as gradients were not finite on some rank."""
        return self.loss_scale is not None and bool(self.loss_scale.found.item())

    def _unscale(self) -> None:
        scale = self.loss_scale
        if scale is None:
            return
        self._check_scaled(scale)
        gradients = self.store.gradients()
        if gradients:
            multiply_all(gradients, scale.scale.double().reciprocal().float())
            scale.vote(norms_of_all(gradients).isfinite().all())
        else:
            scale.vote(torch.ones((), dtype=torch.bool, device=scale.scale.device))

    def _check_scaled(self, scale: LossScale) -> None:
        """Raises if gradients lack the factor that is about to be taken out.

        Raises:
            SMPError: a backward pass was not made by ``model.backward``.
        """
        for model in self._models():
            has_gradients = any(gradient_here(each) is not None for each in model.parameters())
            if has_gradients and model.scaled_by is not scale and not scale.is_one:
                raise SMPError(
                    "under fp16 losses are differentiated by model.backward(loss), which applies "
                    "the loss scale; there are gradients that came in another way, by "
                    "loss.backward() or through another model: call model.backward, or set "
                    "static_loss_scale=1.0."
                )

    def _end(self, found: torch.Tensor | None) -> None:
        super()._end(found)
        if self.loss_scale is None:
            return
        self.loss_scale.update()
        if not getattr(self._optimizer, "_step_supports_amp_scaling", False):
            self.loss_scale.check()  # the host has waited already


def _refusal(update: weakref.ref[MasterUpdate]) -> Callable[..., None]:
    """Returns what refuses a step of the wrapped optimizer alone, which nobody would publish."""

    def check(*_: object) -> None:
        own = update()
        if own is not None and not own.is_updating:
            raise SMPError(
                "with fp16, bf16, shard_optimizer_state and sharded data parallelism an optimizer "
                "updates masters, which DistributedOptimizer.step gives gradients and writes back; "
                "received a call of the wrapped optimizer's step: call that of the "
                "DistributedOptimizer."
            )

    return check
