"""What a GPU did during some steps: milliseconds a step by kind of kernel, and idle time."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

#: The first kind one of whose words is in a kernel's name.
_KINDS = {
    "exchange": ("nccl", "symm", "barrier"),
    "attention": ("flash", "fmha", "sdpa", "attention", "mha"),
    "product": ("gemm", "nvjet", "cutlass", "xmma", "wgmma", "cublas"),
    "optimizer": ("adam", "multi_tensor"),
    "copy": ("memcpy", "copy", "memset", "fill", "cat", "cast"),
    "compiled": ("triton",),
}
_STEPS = 2


def kernel_milliseconds(step: Callable[[], Any], most_names: int = 12) -> dict[str, Any]:
    """Profiles steps on this rank's GPU.

    Returns:
        ``by_kind``: summed times (kernels of several streams may overlap); ``busy``: the time in
        which at least one kernel other than an exchange ran; ``span``: from the first to the last;
        ``longest``: kernels by their share.
    """
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(_STEPS):
            step()
        torch.cuda.synchronize()
    kinds: collections.Counter[str] = collections.Counter()
    names: collections.Counter[str] = collections.Counter()
    spans: list[tuple[float, float]] = []
    for event in found.events() or ():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        start, end = event.time_range.start, event.time_range.end
        kind = _kind(event.name)
        kinds[kind] += end - start
        names[event.name[:90]] += end - start
        if kind != "exchange":
            spans.append((start, end))
    if not spans:
        raise RuntimeError("the profiler has seen no kernel: this needs a GPU")
    spans.sort()
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)

    def a_step(microseconds: float) -> float:
        return round(microseconds / 1e3 / _STEPS, 1)

    return {
        "by_kind": {kind: a_step(value) for kind, value in kinds.most_common()},
        "busy": a_step(busy),
        "span": a_step(reached - spans[0][0]),
        "longest": {name: a_step(value) for name, value in names.most_common(most_names)},
    }


def _kind(name: str) -> str:
    lower = name.lower()
    found = (kind for kind, words in _KINDS.items() if any(word in lower for word in words))
    return next(found, "elementwise")
