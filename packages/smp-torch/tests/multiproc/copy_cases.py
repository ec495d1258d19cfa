"""Exchanges by reading each other's memory, on the CPU by files."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import slice_cases
import torch
from shared_files import FileMemory

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import CommError
from smdistributed.modelparallel.torch.collectives.copy_engine import CopyEngineCollectives
from smdistributed.modelparallel.torch.collectives.interface import Collectives
from smdistributed.modelparallel.torch.collectives.sums import sum_of
from smdistributed.modelparallel.torch.collectives.symmetric_memory import why_not

CPU = torch.device("cpu")


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Gives a folder in memory that all ranks share."""
    own = tempfile.mkdtemp(prefix="smp-test-", dir="/dev/shm")
    common = smp.allgather(own, smp.WORLD)[0]
    try:
        yield Path(common)
    finally:
        smp.barrier()
        shutil.rmtree(own)


def backend() -> Collectives:
    """Returns the collectives of the job."""
    found: Any = smp.nn.DistributedModule().tensor_group.collectives
    return found


class Counting(CopyEngineCollectives):
    """Counts exchanges by memory, and others."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.found: Counter[str] = Counter()

    def _takes(self, tensor: torch.Tensor, most: int) -> bool:
        takes = super()._takes(tensor, most)
        self.found["copied" if takes else "left"] += 1
        return takes


def engine(where: Path, **options: Any) -> Counting:
    plain = backend()
    return Counting(
        plain,
        lambda size: FileMemory(size, where, plain),
        CPU,
        lambda: None,
        contextlib.nullcontext,
        **options,
    )


def exchanges() -> dict[str, int]:
    """All shapes, types and sizes give what the process group gives, bit for bit."""
    plain, size = backend(), smp.tp_size()
    draws = torch.Generator().manual_seed(7)  # the same on all ranks, so that shapes are
    with folder() as where:
        tried = engine(where, largest_bytes=5000)
        for number, dtype in itertools.product(
            range(60), (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float64)
        ):
            sizes = torch.randint(0, 5, (size,), generator=draws).tolist()
            rest = torch.randint(1, 9, (number % 3,), generator=draws).tolist()
            rest = [*rest, 200] if number % 7 == 0 else rest
            if not sum(sizes):
                sizes[0] = 1
            own = torch.Generator().manual_seed(number * 8 + smp.tp_rank())

            def values(count: int, rest: Any = rest, dtype: Any = dtype, own: Any = own) -> Any:
                made = (torch.randn(count, *rest, generator=own) * 8).to(dtype)
                # Not contiguous, at times.
                return made if count % 2 else made.flip(0).transpose(0, -1).clone().transpose(0, -1)

            given = values(sizes[smp.tp_rank()])
            assert torch.equal(tried.gather(given, sizes), plain.gather(given, sizes)), sizes
            given = values(sum(sizes))
            got, want = tried.scatter_sum(given, sizes), plain.scatter_sum(given, sizes)
            assert torch.equal(got, want), (sizes, rest, dtype)
            assert got.dtype == want.dtype
            assert torch.equal(sum_of(*tried.scatter_parts(given, sizes)), want), sizes
            parts = [each.reshape(-1) for each in torch.split(given, sizes)]
            assert torch.equal(tried.sum_parts(parts), want.reshape(-1)), sizes
            without = [*parts]
            without[smp.tp_rank()] = torch.zeros_like(parts[smp.tp_rank()])
            want = plain.sum_parts(without)
            for each in (tried, plain):  # whatever stands in the own part
                assert torch.equal(each.sum_parts(parts, with_own=False), want), sizes
        return dict(tried.found)


def slow_readers() -> None:
    """A buffer is written again only when all have read it."""
    with folder() as where:
        tried = engine(where)
        sizes = [2] * smp.tp_size()
        piece = FileMemory.piece

        def slow(self: FileMemory, rank: int, *args: Any) -> torch.Tensor:
            if smp.tp_rank() == 1:
                time.sleep(0.01)
            return piece(self, rank, *args)

        with mock.patch.object(FileMemory, "piece", slow):
            for number in range(20):
                own = torch.full((2, 3), float(10 * number + smp.tp_rank()))
                got = tried.gather(own, sizes)
                want = [10 * number + rank for rank in range(smp.tp_size())]
                assert got[::2, 0].tolist() == want
            for number in range(20):
                own = torch.full((sum(sizes), 3), float(10 * number + smp.tp_rank()))
                total = sum(10 * number + rank for rank in range(smp.tp_size()))
                assert tried.scatter_sum(own, sizes).tolist() == [[total] * 3] * 2


def training() -> dict[str, int]:
    """Layers in slices train over memory as over the process group."""
    group = smp.nn.DistributedModule().tensor_group
    former = group._collectives
    with folder() as where:
        tried = engine(where)
        model = smp.DistributedModel(slice_cases.language_model(**slice_cases.CAUSAL))
        given = slice_cases.examples(8)
        results = []
        for each in (former, tried):
            group._collectives = each
            try:
                results.append(
                    slice_cases.gradients(model, slice_cases.train_lm, given, whole=False)
                )
            finally:
                group._collectives = former
        assert results[0][0] == results[1][0]
        for name, want in results[0][1].items():
            assert torch.equal(results[1][1][name], want), name
        assert results[1][2]
        return dict(tried.found)


def trial() -> list[str]:
    """Memory that does not work is found out, by all ranks alike."""
    plain, rank = backend(), smp.tp_rank()
    with folder() as where:

        class Wrong(FileMemory):
            def piece(self, of: int, *args: Any) -> torch.Tensor:
                found = super().piece(of, *args)
                return found + 1 if rank == 1 and of == 0 else found

        class OwnAlone(FileMemory):
            def piece(self, of: int, *args: Any) -> torch.Tensor:
                found = super().piece(of, *args)
                return found if of == rank else found.clone()

        class Late(FileMemory):
            def barrier(self) -> None:
                super().barrier()
                if rank == 0:
                    raise RuntimeError("the barrier is broken\nat a place")

        def none(size: int) -> FileMemory:
            made = FileMemory(size, where, plain)
            if rank == 1:
                raise RuntimeError("no such driver")
            return made

        def reason(make: Any, place: str = f"here {rank}") -> str:
            return why_not(make, plain, place, lambda: None)

        def of(kind: type[FileMemory]) -> Any:
            return lambda size: kind(size, where, plain)

        found = [
            reason(of(FileMemory)),
            reason(of(Wrong)),
            reason(of(OwnAlone)),
            reason(of(Late)),
            reason(none),
            reason(of(FileMemory), "here 0"),
            reason(of(FileMemory), f"host{rank} 0"),
            reason(of(FileMemory), "" if rank else "here 0"),
        ]
    assert not found[0]
    for got, want in zip(
        found[1:],
        (
            "reads other numbers than rank 0",
            "reads other numbers than rank",
            "RuntimeError: the barrier is broken",
            "RuntimeError: no such driver",
            "ranks share a GPU",
            "several hosts",
            "switched off",
        ),
        strict=True,
    ):
        assert want in got, (want, got)
    return found


def errors() -> None:
    """An error of memory names the peers, as others do."""
    plain: Any = backend()

    def make(size: int) -> FileMemory:
        raise RuntimeError("Timed out")

    inner = plain
    while not hasattr(inner, "_blaming"):
        inner = inner._backend
    tried = CopyEngineCollectives(plain, make, CPU, lambda: None, inner._blaming)
    with pytest.raises(CommError, match=r"exchanging activations with rank [01] failed"):
        tried.gather(torch.zeros(1), [1] * smp.tp_size())


def device_exchanges() -> None:
    """GPUs that read each other's memory get what every rank has made."""
    group = smp.nn.DistributedModule().tensor_group
    inner: Any = group.collectives
    while hasattr(inner, "_backend") and not isinstance(inner, CopyEngineCollectives):
        inner = inner._backend
    assert isinstance(inner, CopyEngineCollectives), "the trial at the start has failed"
    size, rank = smp.tp_size(), smp.tp_rank()
    for number, dtype in itertools.product(range(40), (torch.float32, torch.bfloat16)):
        sizes = [1 + (number + each) % 4 for each in range(size)]
        width = 8 << (number % 18)

        def values(of: int, count: int, width: int = width, dtype: Any = dtype) -> torch.Tensor:
            draws = torch.Generator("cuda").manual_seed(1000 * of + count)
            return torch.randn(count, width, generator=draws, device="cuda").to(dtype)

        want = torch.cat([values(each, sizes[each]) for each in range(size)])
        assert torch.equal(group.collectives.gather(values(rank, sizes[rank]), sizes), want)
        total = values(0, sum(sizes)).float()
        for each in range(1, size):
            total += values(each, sum(sizes)).float()
        wanted = torch.split(total.to(dtype), sizes)[rank]
        got = group.collectives.scatter_sum(values(rank, sum(sizes)), sizes)
        assert torch.equal(got, wanted)
        # On another stream than that of exchanges, and on it.
        parts = group.collectives.scatter_parts(values(rank, sum(sizes)), sizes)
        assert len(parts) == 1
        assert torch.equal(parts[0], wanted)
        with group.stream.entered():
            parts = group.collectives.scatter_parts(values(rank, sum(sizes)), sizes)
            assert len(parts) == size
            got = sum_of(*parts)
        group.stream.wait(group.stream.mark(), [got])
        assert torch.equal(got, wanted)


def made_on_busy_devices() -> None:
    """A GPU that is behind its host when memory is made loses no signal of the others."""
    inner: Any = smp.nn.DistributedModule().tensor_group.collectives
    while not isinstance(inner, CopyEngineCollectives):
        inner = inner._backend
    size, rank = smp.tp_size(), smp.tp_rank()
    for number in range(2 * size):
        if number % size == rank:
            torch.cuda._sleep(1 << 30)  # about half a second
        memory = inner._buffers._make(1 << 20)
        memory.barrier()
        torch.cuda.synchronize()
