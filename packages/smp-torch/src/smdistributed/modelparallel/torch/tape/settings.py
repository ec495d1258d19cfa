"""What a call of a function of torch is made under, beside its arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.torch.compat.private.backward import saved_tensors_hooks
from smdistributed.modelparallel.torch.compat.private.modes import (
    deterministic_algorithms,
    is_any_autocast,
    read_backend_switches,
)
from smdistributed.modelparallel.torch.state.switches import (
    Autocast,
    autocast_of,
    default_dtype,
    switched,
)

_is_grad_enabled = torch.is_grad_enabled
_is_inference = torch.is_inference_mode_enabled
_default_dtype = torch.get_default_dtype
_is_deterministic: Callable[[], bool] = deterministic_algorithms


class Settings(NamedTuple):
    """Switches of PyTorch that decide what a call computes."""

    grad_enabled: bool
    inference: bool
    autocast: Autocast
    switches: tuple[bool, ...]
    default_dtype: torch.dtype
    is_deterministic: bool
    saves_otherwise: bool

    @classmethod
    def now(cls, devices: tuple[str, ...], known_hooks: Any = None) -> Settings:
        """Returns what holds now.

        Args:
            devices: the types of those that autocast may be on for.
            known_hooks: hooks of saved tensors that do not count: those of a checkpointed call.
        """
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast_of(devices) if is_any_autocast() else (),
            read_backend_switches(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            saved_tensors_hooks() != known_hooks,
        )

    def hold(self, devices: tuple[str, ...], known_hooks: Any = None) -> bool:
        """Whether they hold now; one by one, since this runs for every call of every pass.

        Args:
            devices, known_hooks: as of ``now``.
        """
        return (
            _is_grad_enabled() is self.grad_enabled
            and _is_inference() is self.inference
            and read_backend_switches() == self.switches
            and (autocast_of(devices) if is_any_autocast() else ()) == self.autocast
            and _default_dtype() is self.default_dtype
            and _is_deterministic() is self.is_deterministic
            and (saved_tensors_hooks() != known_hooks) is self.saves_otherwise
        )

    def hold_for_views(self) -> bool:
        """The same for a call that computes nothing: whether autograd follows it."""
        return _is_grad_enabled() is self.grad_enabled and _is_inference() is self.inference

    @contextlib.contextmanager
    def holding(self, devices: tuple[str, ...]) -> Iterator[None]:
        """Inside they hold, as far as they differ from what holds outside."""
        now = read_backend_switches()
        differing = tuple(
            (number, wanted)
            for number, (wanted, is_now) in enumerate(zip(self.switches, now, strict=True))
            if wanted != is_now
        )
        wanted = dict(self.autocast)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for device in devices:
                stack.enter_context(
                    torch.autocast(device, dtype=wanted.get(device), enabled=device in wanted)
                )
            if differing:
                stack.enter_context(switched(differing))
            if self.default_dtype is not torch.get_default_dtype():
                stack.enter_context(default_dtype(self.default_dtype))
            yield
