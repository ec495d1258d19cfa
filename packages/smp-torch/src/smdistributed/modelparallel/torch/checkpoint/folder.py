"""What saving and resuming have in common: where a checkpoint lies, and what may be in it."""

from __future__ import annotations

import os
from pathlib import Path

from smdistributed.modelparallel.common.checkpoint.directory import CheckpointDirectory
from smdistributed.modelparallel.common.checkpoint.store import Checkpoint, Tag
from smdistributed.modelparallel.common.errors import CheckpointError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.checkpoint.dcp_folder import METADATA
from smdistributed.modelparallel.torch.checkpoint.safetensors_folder import INDEX, SINGLE
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime

#: The content of a partial checkpoint that is the user's own.
USER_CONTENT = "user_content.pt"


def directory_at(runtime: TorchRuntime, path: str | os.PathLike[str]) -> CheckpointDirectory:
    """Returns the folder of checkpoints at a path, as all processes of the job see it."""
    return CheckpointDirectory(
        path,
        rank=runtime.rank,
        gather=lambda obj: runtime.communicator.allgather(obj, CommGroup.WORLD),
    )


def finish_pending(runtime: TorchRuntime) -> None:
    """Waits for a save that is still being written. Collective: every process.

    Raises:
        CheckpointError: it failed; on all ranks.
    """
    pending, runtime.pending_save = runtime.pending_save, None
    if pending is not None:
        pending.wait()


def expect_wrapped(value: object, kind: type, argument: str) -> None:
    """Raises unless an argument is None or wrapped by this library.

    Raises:
        TypeError: names the argument.
    """
    if value is not None and not isinstance(value, kind):
        raise TypeError(
            f"{argument} takes a smp.{kind.__name__}; received {type(value).__name__}: wrap it "
            "first."
        )


def of_torchs_own(directory: CheckpointDirectory, tag: str | int | None) -> Checkpoint | None:
    """Returns a folder of DCP that is no checkpoint of this library; None if there is none.

    It is the one of this name, or without a tag the folder of checkpoints itself; where this
    library has saved one, that is meant. Collective: every process.

    Raises:
        CheckpointError: not all ranks see it.
    """
    folder = directory.path if tag is None else directory.path / str(tag)

    def find() -> bool:
        if tag is None:
            is_own = directory.newest() is not None
        else:
            is_own = (directory.path / Tag(str(tag), True).entry).exists()
        return not is_own and (folder / METADATA).is_file()

    replies = directory.everywhere(f"Looking for {METADATA} in {folder}", find)
    missing = [reply for reply in replies if not reply.result]
    if len(missing) == len(replies):
        return None
    if missing:
        raise CheckpointError(
            f"All ranks must resume from one checkpoint, and rank {missing[0].rank} on host "
            f"{missing[0].host} does not see {folder / METADATA}: put it on storage that all hosts "
            "share."
        )
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    return Checkpoint(Tag.from_entry(folder.name), files, None)


def weights_at(path: str | os.PathLike[str], tag: str | int | None) -> str | int | None:
    """Returns the tag of the weights that are asked for.

    Without a tag, a folder in which Transformers has saved a model is that model.

    Compatibility: the Trainer of Transformers asks for the name that its files had before it wrote
    them by safetensors.
    """
    folder = Path(path)
    is_there = (folder / ("newest" if tag is None else str(tag))).exists()
    if not is_there and tag in (None, "pytorch_model.bin", SINGLE):
        return next((name for name in (SINGLE, INDEX) if (folder / name).exists()), tag)
    return tag
