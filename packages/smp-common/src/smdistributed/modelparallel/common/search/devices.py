"""What devices can do, by their public data sheets: estimates, for plans made without the device.

Rates are peaks, for dense products; what of them training reaches is one share for all devices.
What the host takes is no matter of the device, and differs threefold from machine to machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.search.profile import Precision

_GIB = 1 << 30
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{letter}iB": 1 << 10 * power for power, letter in enumerate("KMGT", 1)
}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]i?B)")


@dataclass(frozen=True)
class Device:
    """A kind of device that a process computes on.

    Attributes:
        name: in commands and tables.
        operations: floating-point operations of products a second, by precision.
        memory_rate: bytes a second that it reads or writes.
        memory_bytes: that there are; None where that differs from machine to machine.
        host_rate: bytes a second to another device of its host, in one direction.
        network_rate: the same to a device of another host.
        latency_seconds: of a transfer.
        kernel_seconds: between the end of a kernel and the work of the next one.
        call_seconds: what the host takes for a kernel that Python launches, and for the call of a
            module besides.
        context_bytes: what the driver and the libraries of collectives keep.
        slack: share of all else that the allocator keeps besides. Of 12 jobs on an H200 one took
            9% more than tensors and a context, the others 4 to 6 (``benchmarks/torch/fits.py``).
        is_gpu: whether memory takes the time of all that is no product, and the host is another
            processor, which works meanwhile.
    """

    name: str
    operations: Mapping[Precision, float]
    memory_rate: float
    memory_bytes: int | None
    host_rate: float
    network_rate: float
    latency_seconds: float = 10e-6
    kernel_seconds: float = 1.5e-6
    call_seconds: float = 25e-6
    context_bytes: int = 1 * _GIB
    slack: float = 0.10
    is_gpu: bool = True


#: What of its peak rates a device reaches in training, about. By a profile of kernels of a GPT of
#: 1.3 billion parameters on an H200, 4 sequences of 2048: 763e12 operations of products a second,
#: and 2.6e12 bytes of all else; kernel_seconds from the same GPT with 2 and 8 sequences.
REACHED = 0.75
REACHED_OF_MEMORY = 0.6
#: What of the rate of its links a collective reaches, about: of 450e9 bytes a second an H200 makes
#: 284e9 with 128 MiB, and 326e9 with 512.
REACHED_OF_LINKS = 0.6

DEVICES = {
    device.name: device
    for device in (
        # NVIDIA H100 Tensor Core GPU data sheet, SXM5: NVLink 900 GB/s in both directions; a
        # network adapter of 400 Gb/s for each GPU, as in the DGX H100 data sheet.
        Device(
            "h100",
            {"half": 989e12, "tf32": 494e12, "single": 67e12},
            3.35e12,
            79 * _GIB,
            450e9,
            50e9,
        ),
        # NVIDIA H200 Tensor Core GPU data sheet, SXM: an H100 with more and faster memory.
        Device(
            "h200",
            {"half": 989e12, "tf32": 494e12, "single": 67e12},
            4.8e12,
            139 * _GIB,
            450e9,
            50e9,
        ),
        # NVIDIA A100 data sheet, SXM with 80 GB: NVLink 600 GB/s in both directions; adapters of
        # 200 Gb/s, as in the DGX A100 data sheet.
        Device(
            "a100",
            {"half": 312e12, "tf32": 156e12, "single": 19.5e12},
            2.0e12,
            79 * _GIB,
            300e9,
            25e9,
        ),
        # NVIDIA L40S data sheet: PCIe 4.0 x16; no NVLink, an adapter of 100 Gb/s taken.
        Device(
            "l40s",
            {"half": 362e12, "tf32": 183e12, "single": 91.6e12},
            0.864e12,
            44 * _GIB,
            32e9,
            12.5e9,
        ),
        # A core of a server: 16 multiply-adds in single precision at 3 GHz, and its share of the
        # memory of a socket. Processes of one host talk over its loopback.
        Device(
            "cpu",
            {"half": 96e9, "tf32": 96e9, "single": 96e9},
            10e9,
            None,
            2e9,
            1e9,
            latency_seconds=100e-6,
            kernel_seconds=0.0,
            call_seconds=10e-6,
            context_bytes=0,
            slack=0.0,
            is_gpu=False,
        ),
    )
}


#: That plans are for, where nobody names one and the host has none.
USUAL_DEVICE = "h100"


def device_of(name: str) -> Device:
    """Returns a device of the table.

    Raises:
        ConfigError: it has none of that name.
    """
    if name not in DEVICES:
        raise ConfigError(
            f"a device is one that the planner has figures of: {', '.join(DEVICES)}; received "
            f"{name!r}: name the one that is most like yours, and give its memory with --memory."
        )
    return DEVICES[name]


def _parse_bytes(text: str) -> int:
    """Reads a size as a user writes it."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match["number"]):
        raise ConfigError(
            f"memory is a number above 0 and a unit; received {text!r}: write 80GiB or 80GB."
        )
    return int(float(match["number"]) * _UNITS[match["unit"]])


def device_like(model: str) -> Device:
    """Returns the kind of device that a driver describes, as in ``NVIDIA H100 PCIe``.

    Raises:
        ConfigError: the table has none of that kind.
    """
    words = re.findall(r"[a-z0-9]+", model.lower())
    return device_of(next((word for word in words if word in DEVICES), model))


@dataclass(frozen=True)
class Machine:
    """The devices of a job; one process on each.

    Attributes:
        device: the kind of all.
        num_devices: on all hosts.
        num_hosts: that have equally many.
        memory_bytes: of a device.
    """

    device: Device
    num_devices: int
    num_hosts: int
    memory_bytes: int

    @classmethod
    def of(
        cls, device: str, num_devices: int, num_hosts: int = 1, memory: str | None = None
    ) -> Machine:
        """Returns the machine that words describe.

        Args:
            device: name of the kind of all.
            num_devices: on all hosts.
            num_hosts: that have equally many.
            memory: of a device, as ``80GiB`` or ``80GB``; None for what its data sheet says.

        Raises:
            ConfigError: there is no such machine, or the memory of its devices is not known.
        """
        if num_devices < 1 or num_hosts < 1 or num_devices % num_hosts:
            raise ConfigError(
                "a job has one device or more, equally many on each host; received "
                f"{num_devices} on {num_hosts} hosts: give a multiple of the hosts."
            )
        kind = device_of(device)
        if memory is None and kind.memory_bytes is None:
            raise ConfigError(f"the memory of a {device} is not known: give it, such as 4GiB.")
        num_bytes = kind.memory_bytes if memory is None else _parse_bytes(memory)
        assert num_bytes is not None
        return cls(kind, num_devices, num_hosts, num_bytes)

    @property
    def devices_per_host(self) -> int:
        """Devices of one host."""
        return self.num_devices // self.num_hosts

    def rate(self, num_neighbours: int) -> float:
        """Returns the bytes a second between so many ranks that follow each other."""
        fits = self.devices_per_host % num_neighbours == 0
        return self.device.host_rate if fits else self.device.network_rate
