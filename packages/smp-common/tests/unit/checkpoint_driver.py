"""Saves checkpoints and is killed; run as a script by test_checkpoint.py.

``steps <folder> <scenario>``: repeat a save in ``<folder>/<k>`` and end the process right before
its k-th operation on files, for every k until the save completes.
``loop <folder>``: save tags 1, 2, 3, ... until killed; ``loop-behind``: asynchronously.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from smdistributed.modelparallel.common.checkpoint.directory import CheckpointDirectory, made_now

KILLED = 77
FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "test"}


def content(text: str) -> Callable[[BinaryIO], None]:
    def write(stream: BinaryIO) -> None:
        for half in (text[: len(text) // 2], text[len(text) // 2 :]):
            stream.write(half.encode())
            stream.flush()
            sys.audit("test")

    return write


def partial_files(text: str) -> dict[str, Callable[[BinaryIO], None]]:
    return {"model_0_0.pt": content(f"model {text}"), "user_content.pt": content(f"user {text}")}


def full_files(text: str, user_content: bool = True) -> dict[str, Callable[[BinaryIO], None]]:
    files = {"model": content(f"model {text}"), "user_content": content(f"user {text}")}
    return files if user_content else {"model": files["model"]}


def directory(path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(path, rank=0, gather=lambda mine: [mine])


def write_behind(checkpoints: CheckpointDirectory, tag: Any, files: Any, **options: Any) -> None:
    options = {"partial": True, **options}
    takings = {name: made_now(writer) for name, writer in files.items()}
    checkpoints.write_behind(tag, takings, timeout_seconds=60, **options).wait()


def save_three(checkpoints: CheckpointDirectory) -> None:
    for tag in (5, 6, 1):
        checkpoints.write_partial(tag, partial_files("old"))


# What stands there before, and the save that is killed.
SCENARIOS: dict[str, tuple[Callable[[CheckpointDirectory], Any], ...]] = {
    "first": (lambda d: None, lambda d: d.write_partial(2, partial_files("new"))),
    "next": (
        lambda d: d.write_partial(1, partial_files("old")),
        lambda d: d.write_partial(2, partial_files("new")),
    ),
    "same": (
        lambda d: d.write_partial(1, partial_files("old")),
        lambda d: d.write_partial(1, partial_files("new")),
    ),
    "retention": (
        save_three,
        lambda d: d.write_partial(2, partial_files("new"), keep=1),
    ),
    "behind-next": (
        lambda d: d.write_partial(1, partial_files("old")),
        lambda d: write_behind(d, 2, partial_files("new")),
    ),
    "behind-same": (
        lambda d: d.write_partial(1, partial_files("old")),
        lambda d: write_behind(d, 1, partial_files("new")),
    ),
    "behind-retention": (
        save_three,
        lambda d: write_behind(d, 2, partial_files("new"), keep=1),
    ),
    "full-behind": (
        lambda d: d.write_full("a", full_files("old")),
        lambda d: write_behind(d, "b", full_files("new"), partial=False),
    ),
    "full-next": (
        lambda d: d.write_full("a", full_files("old")),
        lambda d: d.write_full("b", full_files("new")),
    ),
    "full-same": (
        lambda d: d.write_full("a", full_files("old")),
        lambda d: d.write_full("a", full_files("new")),
    ),
    "full-same-without-content": (
        lambda d: d.write_full("a", full_files("old")),
        lambda d: d.write_full("a", full_files("new", user_content=False)),
    ),
}


def steps(folder: Path, scenario: str) -> None:
    before, save = SCENARIOS[scenario]
    for k in itertools.count():
        target = folder / str(k)
        before(directory(target))
        child = os.fork()
        if child == 0:
            kill_at(k)
            save(directory(target))
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            return
        if status != KILLED:
            raise SystemExit(f"step {k} failed with {status}")


def kill_at(k: int) -> None:
    remaining = iter(range(k))

    def step() -> None:
        if next(remaining, None) is None:
            os._exit(KILLED)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in FILE_EVENTS:
            step()

    def fsync(descriptor: int, real: Callable[[int], None] = os.fsync) -> None:
        step()
        real(descriptor)

    os.fsync = fsync  # type: ignore[assignment]
    sys.addaudithook(hook)


def loop(folder: Path, behind: bool) -> None:
    checkpoints = directory(folder)
    newest = checkpoints.newest()
    for tag in itertools.count(int(newest.name) + 1 if newest else 1):
        save = write_behind if behind else CheckpointDirectory.write_partial
        save(checkpoints, tag, partial_files(str(tag) * 1000), keep=2)
        print(tag, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "steps":
        steps(Path(sys.argv[2]), sys.argv[3])
    else:
        loop(Path(sys.argv[2]), behind=sys.argv[1] == "loop-behind")
