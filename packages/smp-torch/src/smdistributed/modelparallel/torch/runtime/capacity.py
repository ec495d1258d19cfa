"""How much memory there is where a process computes."""

from __future__ import annotations

import os

import torch


def capacity_of(device: torch.device) -> int:
    """Returns the bytes of a device's memory; those of the whole host, if that is the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_on(device: torch.device) -> int:
    """Returns the bytes of a device that this process has, or can have: no other one has them."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return capacity_of(device)
