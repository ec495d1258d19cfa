"""Times of a backward pass beside its two halves: gradients of inputs, then of weights.

One process, one device: ``python benchmarks/torch/halves.py --size 1.3b --layers 12``. The passes
of a stage of blocks are run in turns, so that their ratio means something. Times are medians, in
milliseconds; ``held_gib`` is what the second half waits for, more than before the forward pass.
With ``--compile`` each block is compiled, and in pieces where its backward pass is two halves.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from gpt import GPT, SIZES

from smdistributed.modelparallel.torch.execute.compiled_backward import WaitingCalls
from smdistributed.modelparallel.torch.execute.waiting_layers import putting_off
from smdistributed.modelparallel.torch.execute.weight_gradients import WaitingGradients, put_off_in


class Clock:
    """Times what a device does."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def now(self) -> Any:
        """Returns a point in the device's time."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, points: list[Any]) -> list[float]:
        """Returns the times between points."""
        if self._is_cuda:
            torch.cuda.synchronize()
            return [one.elapsed_time(other) for one, other in itertools.pairwise(points)]
        return [1e3 * (other - one) for one, other in itertools.pairwise(points)]


def main() -> None:
    """Prints a line of medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = SIZES[options.size]
    with device:
        model = GPT(size, options.layers, first=False, last=False)
    if device.type == "cuda":
        model = model.to(torch.bfloat16)
    if options.compile:
        for block in model.blocks:
            block.compile()
    shape = (options.microbatch_size, size.length, size.hidden)
    given = torch.randn(shape, device=device, dtype=next(model.parameters()).dtype)
    start = torch.randn_like(given)
    clock = Clock(device)
    calls = WaitingCalls(model.blocks)
    held: list[float] = []

    def memory() -> float:
        return torch.cuda.memory_allocated() / 2**30 if device.type == "cuda" else 0.0

    def whole(out: torch.Tensor) -> list[Any]:
        points = [clock.now()]
        out.backward(start)
        return [*points, clock.now()]

    def halves(out: torch.Tensor, before: float) -> list[Any]:
        points = [clock.now()]
        waiting = WaitingGradients([out])
        with put_off_in(waiting):
            out.backward(start)
        points.append(clock.now())
        held.append(memory() - before)
        waiting.compute()
        return [*points, clock.now()]

    names = {"whole": ("forward", "backward"), "halves": ("forward_of_halves", "inputs", "weights")}
    times: dict[str, list[float]] = defaultdict(list)
    for kind in ("whole", "halves") * options.rounds:
        before = memory()
        x = given.clone().requires_grad_()
        points = [clock.now()]
        with contextlib.ExitStack() as stack:
            if kind == "halves":
                stack.enter_context(putting_off())
                stack.enter_context(calls.in_place())
            out = model(x)
            points += whole(out) if kind == "whole" else halves(out, before)
        del out, x
        for name, each in zip(names[kind], clock.milliseconds(points), strict=True):
            times[name].append(each)
    row = {name: round(statistics.median(each[2:]), 3) for name, each in times.items()}
    row["ratio"] = round((row["inputs"] + row["weights"]) / row["backward"], 3)
    row["held_gib"] = round(statistics.median(held), 3)
    print(json.dumps({**vars(options), "device": str(device), **row}))


if __name__ == "__main__":
    main()
