"""Folders of torch.distributed.checkpoint: parts of tensors, and metadata that is not trusted."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata

from smdistributed.modelparallel.common.errors import CheckpointError
from smdistributed.modelparallel.common.pieces import Bands, Rectangle
from smdistributed.modelparallel.torch.checkpoint.dcp_folder import (
    METADATA,
    DcpFolder,
    DcpWriter,
    Held,
)

#: Torch says so of each save and load in one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

WHOLE = torch.arange(24.0).reshape(6, 4)
#: Rows 0, 1 and 4, 5 as one, as a slice of a fused tensor lies; and the rows between.
OUTER = Bands((Rectangle((0, 0), (2, 4)), Rectangle((4, 0), (2, 4))), 0)
INNER = Rectangle((2, 0), (2, 4))


def write(folder: Path, held: Sequence[Sequence[Held]]) -> None:
    """Writes what each rank holds, by the steps of all."""
    writers = [DcpWriter(rank, each, behind=False) for rank, each in enumerate(held)]
    results: list[Any] = []
    for step in zip(*(each.steps for each in writers), strict=True):
        results = [take(folder, results) for take in step]
    assert sorted(name for names in results for name in names) == sorted(os.listdir(folder))


def two_ranks(folder: Path) -> None:
    path = ("model", "weight")
    outer = Held(path, torch.cat([WHOLE[:2], WHOLE[4:]]), (6, 4), OUTER)
    inner = Held(path, WHOLE[2:4], (6, 4), INNER)
    write(folder, [[outer, Held.whole(("settings", 0, "lr"), 0.5)], [inner]])


def test_torch_reads_what_ranks_wrote_in_parts(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    wanted = {"model": {"weight": torch.empty(6, 4)}}
    dcp.load(wanted, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(wanted["model"]["weight"], WHOLE)


def test_any_part_is_read_of_what_torch_wrote(tmp_path: Path) -> None:
    dcp.save({"model": {"weight": WHOLE}, "lr": 0.5}, checkpoint_id=tmp_path, no_dist=True)
    folder = DcpFolder(tmp_path)
    assert folder.tensors == {"model.weight": (6, 4)}
    with torch.device("meta"):  # wherever the script makes its tensors
        read = folder.read({"model.weight": OUTER}, ["lr"])
    assert torch.equal(read["model.weight"], torch.cat([WHOLE[:2], WHOLE[4:]]))
    assert read["lr"] == 0.5


def test_ranks_that_leave_something_out_write_nothing(tmp_path: Path) -> None:
    held = Held(("model", "weight"), WHOLE[2:4], (6, 4), INNER)
    # PyTorch 2.11 names it in the log alone.
    with pytest.raises(ValueError, match=r"weight|Failed to validate global plan"):
        write(tmp_path, [[held], []])


class Evil:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def test_what_is_damaged_or_asks_for_trust_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    two_ranks(folder)
    good = (folder / METADATA).read_bytes()
    path = metadata.__name__.encode()
    by_dots = (
        b"\x80\x04\x8c" + bytes([len(path)]) + path + b"\x8c\x08os.mkdir\x93\x8c\x04evil\x85R."
    )
    for bad in (pickle.dumps(Evil()), by_dots, good[:-9], b"", pickle.dumps({})):
        (folder / METADATA).write_bytes(bad)
        with pytest.raises(CheckpointError, match="must be metadata"):
            DcpFolder(folder)
    (folder / METADATA).write_bytes(good)
    (folder / "__1_0.distcp").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"names the file __1_0\.distcp"):
        DcpFolder(folder)
    dcp.save({"lr": Evil()}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(CheckpointError, match="can run code"):
        DcpFolder(tmp_path / "other").read({}, ["lr"])
    assert not (tmp_path / "evil").exists()


class Asking:
    """Is pickled as what ``getattr`` gives, as enumerations are by Python 3.11.0 to 3.11.3."""

    def __init__(self, owner: Any, name: str) -> None:
        self._asked = owner, name

    def __reduce__(self) -> Any:
        return getattr, self._asked


def test_members_of_enumerations_alone_are_got_by_name(tmp_path: Path) -> None:
    dcp.save({"weight": WHOLE}, checkpoint_id=tmp_path, no_dist=True)
    file = tmp_path / METADATA
    whole = pickle.loads(file.read_bytes())

    def write_with(asking: Asking) -> None:
        whole.planner_data = {"asked": asking}
        file.write_bytes(pickle.dumps(whole))

    write_with(Asking(metadata._MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))
    assert DcpFolder(tmp_path).tensors == {"weight": (6, 4)}
    write_with(Asking(metadata.Metadata, "__init__"))
    with pytest.raises(CheckpointError, match="asks for __init__ of a type"):
        DcpFolder(tmp_path)
