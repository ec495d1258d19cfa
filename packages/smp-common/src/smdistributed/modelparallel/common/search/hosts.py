"""What the host takes to start what a device computes, by framework.

It is no matter of the device, and differs threefold from machine to machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from smdistributed.modelparallel.common.config import Framework


@dataclass(frozen=True)
class Host:
    """What the host takes, in seconds.

    Attributes:
        action_seconds: for an action of a pipeline.
        carried_rate: bytes a second that processes which compute on it carry to each other.
        call_seconds: for a kernel; None where Python launches it, which a device tells.
        comparing_seconds: to compare a call with one that was captured.
        module_seconds: for a module whose Python runs on tensors without data, of a step that is
            known.
    """

    action_seconds: float
    carried_rate: float = float("inf")
    call_seconds: float | None = None
    comparing_seconds: float = 0.0
    module_seconds: float = 0.0


HOSTS: dict[Framework, Host] = {
    # An action on the host of an H200. A layer of GPT-2 takes 0.16 ms and one of Llama 0.13, which
    # both have 13 modules; a call 3 us in GPT-2 XL.
    "pytorch": Host(150e-6, comparing_seconds=3e-6, module_seconds=12e-6),
    # TensorFlow launches a pass without Python. To send 256 KiB by gRPC takes 405 us of a core and
    # to receive them 317, 4 KiB 147 and 144; about as many transfers as actions.
    "tensorflow": Host(300e-6, 360e6, call_seconds=3e-6),
}
