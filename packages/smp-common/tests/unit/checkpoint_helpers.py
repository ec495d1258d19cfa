"""Saving and reading checkpoints of texts, alone or by ranks that are threads."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from smdistributed.modelparallel.common.checkpoint.directory import CheckpointDirectory

Writer = Callable[[BinaryIO], None]


def content(text: str) -> Writer:
    def write(stream: BinaryIO) -> None:
        stream.write(text.encode())

    return write


def disk_full(stream: BinaryIO) -> None:
    stream.write(b"half")
    raise OSError(28, "No space left on device")


def alone(path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(path, rank=0, gather=lambda mine: [mine])


def save(path: Path, tag: str | int, text: str = "text", **options: Any) -> None:
    alone(path).write_partial(tag, {"model_0_0.pt": content(text)}, **options)


def read(path: Path, tag: str | int | None = None, **options: Any) -> dict[str, str]:
    checkpoint = alone(path).resolve(tag, **options)
    found = {}
    for name in checkpoint.paths:
        with checkpoint.open(name) as stream:
            found[name] = stream.read().decode()
    return found


def names(path: Path) -> set[str]:
    return set(os.listdir(path))


class World:
    """Ranks as threads; a rank that waits for one that does not come breaks the barrier."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._slots: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def gather(self, rank: int, mine: object) -> list[Any]:
        self._slots[rank] = pickle.loads(pickle.dumps(mine))
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def run(
        self, body: Callable[[CheckpointDirectory, int], Any], *paths: Path
    ) -> list[Exception | Any]:
        """Result or exception of each rank; rank r works in ``paths[r % len(paths)]``."""
        results: list[Any] = [None] * self.size

        def run_rank(rank: int) -> None:
            directory = CheckpointDirectory(
                paths[rank % len(paths)], rank=rank, gather=lambda mine: self.gather(rank, mine)
            )
            try:
                results[rank] = body(directory, rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        return results


def of_rank(rank: int, text: str = "text") -> Mapping[str, Writer]:
    return {f"model_{rank}_0.pt": content(f"{text} {rank}")}
