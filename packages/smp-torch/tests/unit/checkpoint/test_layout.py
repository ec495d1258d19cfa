"""The index of a partial checkpoint: what it lists can be put together again."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import CheckpointError
from smdistributed.modelparallel.common.pieces import Bands, Rectangle
from smdistributed.modelparallel.torch.api.slot import slot
from smdistributed.modelparallel.torch.checkpoint.layout import Layout, StoredPiece, StoredTensor
from smdistributed.modelparallel.torch.checkpoint.parts_of_files import PartsOfFiles
from smdistributed.modelparallel.torch.parts.blocks import taken

WEIGHT = torch.arange(35.0).reshape(7, 5)


@pytest.fixture(scope="module")
def library() -> Iterator[None]:
    """Starts the library in this process, once."""
    smp.init({"pipeline_parallel_degree": 1})
    yield
    slot.get().close()
    slot.clear()


def stored(*parts: tuple[str, Rectangle]) -> StoredTensor:
    pieces = tuple(StoredPiece(file, part.offsets, part.sizes) for file, part in parts)
    return StoredTensor((7, 5), "float32", pieces)


def layout_of(slices: int, blocks: int) -> tuple[Layout, dict[str, dict[str, torch.Tensor]]]:
    whole = Rectangle.whole((7, 5))
    parts, files = [], {}
    for s, b in itertools.product(range(slices), range(blocks)):
        part = whole.cut(1, slices, s).cut(0, blocks, b)
        parts.append((f"model_{s}_{b}.pt", part))
        files[f"model_{s}_{b}.pt"] = {"w": WEIGHT[part.within(whole)].clone()}
    return Layout(1, slices, {"": 0}, {"w": stored(*parts)}), files


@pytest.mark.parametrize(("slices", "blocks"), list(itertools.product((1, 2, 3), (1, 2, 4))))
def test_pieces_make_the_whole(slices: int, blocks: int) -> None:
    layout, files = layout_of(slices, blocks)
    again = Layout.parse(layout.text())
    assert again == layout
    with torch.device("meta"):  # wherever the script makes its tensors
        state = again.assemble(files)
    assert torch.equal(state["w"], WEIGHT)
    assert state["_smp_is_partial"] is False


@pytest.mark.parametrize(("slices", "blocks"), list(itertools.product((1, 2, 3), (1, 2, 4))))
def test_a_part_is_made_of_the_pieces_that_have_it_and_no_larger(slices: int, blocks: int) -> None:
    layout, files = layout_of(slices, blocks)
    parts = PartsOfFiles(layout, files, {})
    in_files = {each["w"].untyped_storage().data_ptr() for each in files.values()}
    whole = Rectangle.whole((7, 5))
    sides = Bands((whole.cut(1, 5, 0), whole.cut(1, 5, 4)), 1)
    for wanted in (whole, whole.cut(0, 2, 1), whole.cut(1, 2, 1).cut(0, 3, 1), sides):
        found = parts.read({"model.w": wanted}, [])["model.w"]
        assert torch.equal(found, taken(WEIGHT, wanted))
        storage = found.untyped_storage()
        assert storage.data_ptr() in in_files or storage.nbytes() == 4 * wanted.num_elements


def test_what_is_no_tensor_of_the_model_comes_along() -> None:
    layout, files = layout_of(2, 1)
    files["model_1_0.pt"]["counter._extra_state"] = {"calls": 3}  # type: ignore[assignment]
    assert layout.assemble(files)["counter._extra_state"] == {"calls": 3}


def test_a_missing_piece_is_named() -> None:
    layout, files = layout_of(2, 2)
    del files["model_1_0.pt"]
    with pytest.raises(CheckpointError, match=r"lacks elements of w: .* of which model_0_0\.pt, "):
        layout.assemble(files)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"tensors": {"w": {}}}', '{"tensors": {}, "x": 1}', "[" * 100_000),
        Layout(0, 1, {}).text(),
        Layout(2, "1", {}).text(),  # type: ignore[arg-type]
    ],
    ids=range(8),
)
def test_something_else_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"layout\.json must be what smp\.save_checkpoint"):
        Layout.parse(text)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("degree", ["pipeline_parallel_degree", "tensor_parallel_degree"])
def test_a_degree_that_no_job_can_have_had(tmp_path: Path, degree: str) -> None:
    model = smp.DistributedModel(nn.Linear(2, 2))
    smp.save_checkpoint(tmp_path, tag=1, model=model)
    (index,) = tmp_path.rglob("layout.json")
    damaged = {**json.loads(index.read_text()), degree: 10**12}
    index.write_text(json.dumps(damaged))
    manifest = index.with_name("manifest.json")
    content = json.loads(manifest.read_text())
    content["files"]["layout.json"] = {
        "size_bytes": index.stat().st_size,
        "sha256": hashlib.sha256(index.read_bytes()).hexdigest(),
    }
    manifest.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"must fit the files.*{degree} 1000000000000"):
        smp.resume_from_checkpoint(tmp_path, model=model)


@pytest.mark.usefixtures("library")
def test_every_tensor_that_a_job_saves_is_listed_once(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    net.register_buffer("unsaved", torch.zeros(1), persistent=False)
    model = smp.DistributedModel(net)
    smp.save_checkpoint(tmp_path, tag=1, model=model)
    (index,) = tmp_path.rglob("layout.json")
    tensors = Layout.parse(index.read_text()).tensors
    assert list(tensors) == list(net.state_dict())
    assert tensors["0.weight"] == StoredTensor(
        (2, 3), "float32", (StoredPiece("model_0_0.pt", (0, 0), (2, 3)),)
    )
    assert tensors["1.num_batches_tracked"].dtype == "int64"
