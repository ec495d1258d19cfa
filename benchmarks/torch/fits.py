"""Whether a job fits where its plan says that it does, and does not where it says so; on one GPU.

    python benchmarks/torch/fits.py llama_1.3b:4:0 gpt2_xl:8:1

A case is a model, its microbatches and ``checkpointed_blocks``. It is planned, and then trained
with as much memory left as the plan says that it takes, with a tenth less, and with other
``--shares`` of it; the rest of the device is taken before. A line has the plan, and of each share
whether the job trained, whether it warned before its first step, and what its tensors took at most.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import logging
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import gpt
import torch
import transformers
import transformers_step
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.search.candidates import Configuration
from smdistributed.modelparallel.common.search.devices import Machine
from smdistributed.modelparallel.common.search.ranking import Search

GIB = 1 << 30
STEPS = 6
#: Shares of what the plan says that the job is to train with, and is not to.
ENOUGH, TOO_LITTLE = 1.0, 0.9


class Case:
    """A model of a benchmark, which an optimizer trains in this process.

    Args:
        words: the model, its microbatches and ``checkpointed_blocks``, with colons between.
        batch: sequences of a step.
    """

    def __init__(self, words: str, batch: int) -> None:
        self.words = words
        self.name, microbatches, checkpointed = words.split(":")
        self.microbatches, self.checkpointed = int(microbatches), int(checkpointed)
        self.batch = batch

    def begin(self) -> None:
        """Makes the model and all that trains it."""
        device = torch.device("cuda", 0)
        settings: dict[str, Any] = {"microbatches": self.microbatches, "ddp": True}
        if self.checkpointed:
            settings["checkpointed_blocks"] = self.checkpointed
        smp.init(settings)
        torch.manual_seed(1)
        with device:
            model, vocabulary, length = self._made()
        draws = torch.Generator().manual_seed(5)
        tokens = torch.randint(vocabulary, (self.batch, length), generator=draws)
        self.tokens = tokens.to(device)
        self.model = smp.DistributedModel(model.to(torch.bfloat16))
        self.optimizer = smp.DistributedOptimizer(
            torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        )

        @smp.step
        def train(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
            if self.name in gpt.SIZES:
                loss = gpt.loss_of(model(tokens), tokens)
            else:
                loss = model(input_ids=tokens, labels=tokens).loss
            model.backward(loss)
            return loss

        self.train = train

    def _made(self) -> tuple[nn.Module, int, int]:
        if self.name in gpt.SIZES:
            size = gpt.SIZES[self.name]
            return gpt.GPT(size, size.layers), size.vocabulary, size.length
        kind, config, _, length = transformers_step.MODELS[self.name]
        return getattr(transformers, kind)(config), config.vocab_size, length

    def step(self) -> None:
        """Trains by one batch."""
        self.train(self.model, self.tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()


def planned(case: Case) -> dict[str, float]:
    """Returns what a plan says that the job takes, in bytes, and what of it its tensors do."""
    case.begin()
    profile = case.train.profile((case.model, case.tokens), {}, "h100")
    job = Configuration(1, 1, 1, 1, False, case.microbatches, "interleaved")
    peak = Search(profile, Machine.of("h100", 1, 1, "1TiB")).estimate(job).peak
    return {"total": peak.total, "tensors": peak.total - peak.reserve}


def trained(case: Case, left: float) -> dict[str, Any]:
    """Trains with a part of the device's memory; returns how that went.

    Args:
        case: to train.
        left: the bytes that this process may take.
    """
    torch.cuda.init()
    _, everything = torch.cuda.mem_get_info()
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    place = ctypes.c_void_p()
    status = runtime.cudaMalloc(ctypes.byref(place), ctypes.c_size_t(int(everything - left)))
    assert status == 0, f"the rest of the device could not be taken: error {status}"
    told = _Told()
    logging.getLogger("smdistributed").addHandler(told)
    found: dict[str, Any] = {"trained": True, "warned": False}
    try:
        case.begin()
        for _ in range(STEPS):
            case.step()
            found["warned"] = found["warned"] or told.has_warned
        torch.cuda.synchronize()
    except (torch.OutOfMemoryError, SMPError) as error:
        found |= {"trained": False, "warned": told.has_warned, "error": str(error)[:200]}
    found["tensors_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
    return found


class _Told(logging.Handler):
    """Takes note of a warning that the device has less than training needs."""

    has_warned = False

    def emit(self, record: logging.LogRecord) -> None:
        """Looks at a line of the log."""
        self.has_warned = self.has_warned or "and this has" in record.getMessage()


def _apart(part: Callable[[], Any]) -> Any:
    """Returns what a part of the program does in a process of its own."""
    here, there = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")  # which has imported everything
    process = context.Process(target=_sent, args=(part, there))
    process.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        return f"ended with {process.exitcode}"
    finally:
        process.join()


def _sent(part: Callable[[], Any], there: Connection) -> None:
    there.send(part())
    there.close()
    os._exit(0)


def main() -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+", metavar="MODEL:MICROBATCHES:CHECKPOINTED")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--shares", type=float, nargs="+", default=[ENOUGH, TOO_LITTLE])
    words = parser.parse_args()
    gc.freeze()
    verdicts: list[bool] = []
    for each in words.cases:
        case = Case(each, words.batch)
        plan = _apart(functools.partial(planned, case))
        row = {"case": each, **{f"{kind}_gib": round(plan[kind] / GIB, 2) for kind in plan}}
        for share in words.shares:
            found = _apart(functools.partial(trained, case, share * plan["total"]))
            row[str(share)] = found
            if share >= ENOUGH or share <= TOO_LITTLE:
                verdicts.append(found["trained"] == (share >= ENOUGH))
        print(json.dumps(row), flush=True)
    print(json.dumps({"right": sum(verdicts), "of": len(verdicts)}))


if __name__ == "__main__":
    main()
