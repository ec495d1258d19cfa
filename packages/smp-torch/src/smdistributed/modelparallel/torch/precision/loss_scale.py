"""The factor that keeps small gradients of fp16 from vanishing; it lives on the device.

Losses are multiplied by it before they are differentiated, and the update divides by it. Where a
gradient is not finite on any rank of the job, every rank skips the update and the factor falls.
Nothing here waits for the device, unless somebody asks for a number.

Source: smd_model_parallel_pytorch.rst, DistributedOptimizer;
model-parallel-extended-features-pytorch-fp16.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime


@dataclass(frozen=True)
class DynamicLossScale:
    """How the factor follows what is seen.

    Attributes:
        init_scale: where it begins.
        scale_factor: by what it falls and grows.
        scale_window: after so many updates in a row it grows.
        min_scale: it does not fall below.
        delayed_shift: with the first of so many skipped updates it does not fall yet.
        consecutive_hysteresis: each update restores that tolerance; else growth does.
    """

    init_scale: float = 2.0**32
    scale_factor: float = 2.0
    scale_window: int = 1000
    min_scale: float = 1.0
    delayed_shift: int = 1
    consecutive_hysteresis: bool = False


def options_of(
    static: float | None, dynamic: bool, given: Mapping[str, Any]
) -> float | DynamicLossScale:
    """Returns what the arguments of ``DistributedOptimizer`` say about the loss scale.

    Raises:
        ValueError: they contradict each other, or a number is out of range.
        TypeError: there is no such argument.
    """
    names = [field.name for field in fields(DynamicLossScale)]
    if unknown := sorted(set(given) - set(names)):
        raise TypeError(
            f"the arguments of a dynamic loss scale are {', '.join(names)}; received "
            f"{', '.join(unknown)}."
        )
    if not dynamic:
        value = 1.0 if static is None else float(static)
        if not 0 < value < float("inf"):
            raise ValueError(f"static_loss_scale must be a number above 0; received {static!r}.")
        return value
    if static not in (None, 1.0):
        raise ValueError(
            "a loss scale is static or dynamic: with dynamic_loss_scale=True leave out "
            f"static_loss_scale; received {static!r}."
        )
    options = DynamicLossScale(**given)
    for name, least, value in (
        ("init_scale", 0, options.init_scale),
        ("scale_factor", 1, options.scale_factor),
        ("scale_window", 0, options.scale_window),
        ("min_scale", 0, options.min_scale),
        ("delayed_shift", 0, options.delayed_shift),
    ):
        if not least < value < float("inf"):
            raise ValueError(f"{name} must be a number above {least}; received {value!r}.")
    return options


class LossScale:
    """The loss scale of one optimizer, the same on every rank.

    Args:
        runtime: the state of the library in this process.
        options: a fixed factor, or how it follows.

    Attributes:
        scale: the factor. Shape: scalar, fp32, on the device.
        found: 1 where the last gradients were not finite on some rank. Shape: as ``scale``.
    """

    def __init__(self, runtime: TorchRuntime, options: float | DynamicLossScale) -> None:
        self._runtime = runtime
        self.dynamic = options if isinstance(options, DynamicLossScale) else None
        self._static = options if isinstance(options, float) else None
        self.scale = self._number(self._static or self.dynamic.init_scale)  # type: ignore[union-attr]
        self.found = self._number(0.0)
        self._updates = self._number(0.0)
        self._tolerance = self._number(self.dynamic.delayed_shift if self.dynamic else 1)
        self._is_exhausted = self._number(0.0)

    def _number(self, value: float) -> torch.Tensor:
        return torch.tensor(float(value), dtype=torch.float32, device=self._runtime.device)

    @property
    def is_one(self) -> bool:
        """Whether it never changes anything."""
        return self._static == 1.0

    def vote(self, is_finite: torch.Tensor) -> None:
        """Takes what this rank found, and shares it. Collective: WORLD.

        Args:
            is_finite: whether all of its gradients are. Shape: scalar, bool.
        """
        flag = 1.0 - is_finite.to(torch.float32)
        runtime = self._runtime
        group = runtime.process_groups.get(CommGroup.WORLD)
        if group is not None:
            everyone = runtime.topology.members(CommGroup.WORLD, runtime.rank)
            with runtime.peers.blaming(everyone, "looking for infinite gradients with"):
                dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        self.found = flag

    @torch.no_grad()
    def update(self) -> None:
        """Follows what the ranks found. Every rank calls it after each update or skipped one."""
        options = self.dynamic
        if options is None:
            return
        found, one = self.found, torch.ones_like(self.found)
        falls = found * (self._tolerance <= 1)
        lowest = torch.full_like(self.scale, options.min_scale)
        self._is_exhausted = falls * (self.scale <= lowest)
        self._updates = (self._updates + one) * (one - found)
        grows = (one - found) * (torch.remainder(self._updates, options.scale_window) == 0)
        self._tolerance = self._tolerance - (found - falls)
        restored = one - found if options.consecutive_hysteresis else grows
        full = torch.full_like(self._tolerance, options.delayed_shift)
        self._tolerance = torch.where(restored > 0, full, self._tolerance)
        smaller = torch.maximum(self.scale / options.scale_factor, lowest)
        self.scale = torch.where(
            falls > 0,
            smaller,
            torch.where(grows > 0, self.scale * options.scale_factor, self.scale),
        )

    def check(self) -> None:
        """Raises where the factor cannot fall any more. It waits for the device.

        Raises:
            SMPError: it is at its least, and gradients are not finite; the same on every rank.
        """
        if self.dynamic is not None and self._is_exhausted.item():
            raise SMPError(
                f"gradients are not finite although the loss scale is at its min_scale "
                f"({self.dynamic.min_scale:g}): the model or its loss diverges, or min_scale is "
                "too large. Lower min_scale or the learning rate, or train in bf16."
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the factor and what it depends on. It waits for the device."""
        return {
            "scale": self.scale.item(),
            "updates": self._updates.item(),
            "tolerance": self._tolerance.item(),
            "dynamic": None if self.dynamic is None else asdict(self.dynamic),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state; a fixed factor stays as the script has it."""
        if self.dynamic is None or state.get("dynamic") is None:
            return
        self.scale = self._number(state["scale"])
        self._updates = self._number(state["updates"])
        self._tolerance = self._number(state["tolerance"])
