"""Addresses, and how channels are filled from what they stand for."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from smdistributed.modelparallel.common.config import ConfigWarning
from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError
from smdistributed.modelparallel.launch.channels import file as channels
from smdistributed.modelparallel.launch.exceptions import StorageError
from smdistributed.modelparallel.launch.inputs import (
    FileSystemInput,
    ShuffleConfig,
    TrainingInput,
    s3_input,
)
from smdistributed.modelparallel.launch.inputs import channels as channels_of
from smdistributed.modelparallel.launch.request.document import Channel
from smdistributed.modelparallel.launch.session import Session
from smdistributed.modelparallel.launch.storage import places


@pytest.fixture(autouse=True)
def no_object_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in places._S3_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for name in ("train/a.txt", "train/b/c.txt", "training.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def fill(tmp_path: Path, given: Any, mode: str = "File") -> dict[str, str]:
    """Returns the files of a channel, with what is in them."""
    (config,) = channels_of(given)
    channel = Channel.model_validate(config)
    root, target = tmp_path / "jobs", tmp_path / "target"
    channels.check(channel, root, mode)
    count = channels.fill(channel, target, root, mode)
    found = {
        str(path.relative_to(target)): path.read_text()
        for path in target.rglob("*")
        if path.is_file()
    }
    assert count == len(found) or mode == "FastFile"
    return found


def test_a_folder_is_linked_file_by_file(tmp_path: Path, data: Path) -> None:
    found = fill(tmp_path, str(data / "train"))
    assert found == {"a.txt": "train/a.txt", "b/c.txt": "train/b/c.txt"}
    # The folders are the job's own: what a script adds is not added to the data.
    (tmp_path / "target/b/new.txt").touch()
    assert not (data / "train/b/new.txt").exists()


def test_a_file_is_a_channel_with_a_file(tmp_path: Path, data: Path) -> None:
    assert fill(tmp_path, f"file://{data}/train/a.txt") == {"a.txt": "train/a.txt"}


def test_fast_files_are_one_link(tmp_path: Path, data: Path) -> None:
    fill(tmp_path, data / "train", "FastFile")
    assert (tmp_path / "target").resolve() == data / "train"


def test_an_object_store_without_settings_is_a_folder(tmp_path: Path, data: Path) -> None:
    session = Session(root=tmp_path / "jobs")
    address = session.upload_data(str(data / "train"), key_prefix="demo/train")
    assert address == "s3://smp-launch/demo/train"
    assert fill(tmp_path, address) == {"a.txt": "train/a.txt", "b/c.txt": "train/b/c.txt"}
    assert (tmp_path / "jobs/s3/smp-launch/demo/train/a.txt").is_file()
    one = session.upload_data(str(data / "training.txt"), bucket="b")
    assert one == "s3://b/data/training.txt"
    got = session.download_data(str(tmp_path / "down"), "smp-launch", "demo")
    assert [Path(path).name for path in got] == ["a.txt", "c.txt"]


def test_keys_are_found_by_how_they_begin(tmp_path: Path, data: Path) -> None:
    session = Session(root=tmp_path / "jobs")
    session.upload_data(str(data), bucket="b", key_prefix="")
    assert set(fill(tmp_path, "s3://b/trai")) == {"train/a.txt", "train/b/c.txt", "training.txt"}


def test_a_manifest_names_the_files(tmp_path: Path, data: Path) -> None:
    session = Session(root=tmp_path / "jobs")
    session.upload_data(str(data), bucket="b", key_prefix="")
    manifest = tmp_path / "m.json"
    manifest.write_text(json.dumps([{"prefix": "s3://b/train/"}, "b/c.txt"]))
    address = session.upload_data(str(manifest), bucket="b")
    given = TrainingInput(address, s3_data_type="ManifestFile")
    assert fill(tmp_path, {"x": given}) == {"b/c.txt": "train/b/c.txt"}


@pytest.mark.parametrize("name", ["../../up.txt", "/../../up.txt"])
def test_a_manifest_does_not_lead_out(tmp_path: Path, data: Path, name: str) -> None:
    session = Session(root=tmp_path / "jobs")
    (tmp_path / "m.json").write_text(json.dumps([{"prefix": "s3://b/train/"}, name]))
    address = session.upload_data(str(tmp_path / "m.json"), bucket="b")
    with pytest.raises(ConfigError, match=r"must not have '\.\.' in it"):
        fill(tmp_path, {"x": TrainingInput(address, s3_data_type="ManifestFile")})


@pytest.mark.parametrize("text", ["[]", "{}", "no json", '["a"]'])
def test_what_is_no_manifest_is_an_error(tmp_path: Path, text: str) -> None:
    session = Session(root=tmp_path / "jobs")
    (tmp_path / "m.json").write_text(text)
    address = session.upload_data(str(tmp_path / "m.json"), bucket="b")
    with pytest.raises(StorageError, match="must be a manifest"):
        fill(tmp_path, {"x": TrainingInput(address, s3_data_type="ManifestFile")})


def test_a_file_system_is_where_it_is_mounted(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"train": FileSystemInput("fs-1", "FSxLustre", str(data / "train"))}
    assert set(fill(tmp_path, given)) == {"a.txt", "b/c.txt"}
    elsewhere = {"train": FileSystemInput("fs-1", "EFS", "/train/b")}
    with pytest.raises(StorageError, match=r"fs-1 has no folder /train/b here: mount it"):
        fill(tmp_path, elsewhere)
    monkeypatch.setenv("SMP_FILE_SYSTEMS", json.dumps({"fs-1": str(data)}))
    (tmp_path / "target").rename(tmp_path / "before")
    assert set(fill(tmp_path, elsewhere)) == {"c.txt"}
    monkeypatch.setenv("SMP_FILE_SYSTEMS", "fs-1=/x")
    with pytest.raises(ConfigError, match="must be a JSON object"):
        fill(tmp_path, elsewhere)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ("missing", StorageError, r"there is nothing at /.*missing"),
        ("s3://b/missing", StorageError, r"there is nothing at s3://b/missing"),
        ("ftp://b/a", ConfigError, r"begins with s3://, gs:// or file://"),
        ("s3://b/../../etc", ConfigError, r"must not have '\.\.'"),
    ],
)
def test_data_that_is_not_there_is_an_error(
    tmp_path: Path, given: str, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        fill(tmp_path, given)


def test_files_are_dealt_out_to_hosts(tmp_path: Path, data: Path) -> None:
    given = {"x": TrainingInput(str(data), distribution="ShardedByS3Key")}
    channel = Channel.model_validate(channels_of(given)[0])
    dealt = []
    for index in range(2):
        target = tmp_path / str(index)
        channels.check(channel, tmp_path, "FastFile", 2)
        channels.fill(channel, target, tmp_path, "FastFile", share=channels.Share(index, 2))
        dealt.append({str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()})
    assert dealt == [{"train/a.txt", "training.txt"}, {"train/b/c.txt"}]
    with pytest.raises(StorageError, match="deals files out to hosts; there are 3 for 4 hosts"):
        channels.check(channel, tmp_path, "File", 4)


def test_what_acts_on_streams_alone_is_said(tmp_path: Path, data: Path) -> None:
    given = TrainingInput(str(data), compression="Gzip", record_wrapping="RecordIO")
    with pytest.warns(ConfigWarning, match="x: compression, record_wrapping acts in input_mode"):
        fill(tmp_path, {"x": given})


def test_words_of_a_channel_are_checked() -> None:
    for given in (
        {"distribution": "Shared"},
        {"compression": "Zip"},
        {"input_mode": "Files"},
        {"s3_data_type": "Prefix"},
        {"record_wrapping": "TFRecord"},
        {"instance_groups": ["a"]},
    ):
        with pytest.raises(ConfigError, match=next(iter(given))):
            TrainingInput("s3://b/a", **given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is of an object store"):
        TrainingInput("/data", s3_data_type="ManifestFile")


def test_settings_of_a_channel_are_in_the_document() -> None:
    given = s3_input(
        "s3://b/a",
        distribution="ShardedByS3Key",
        compression="Gzip",
        content_type="text/csv",
        record_wrapping="RecordIO",
        input_mode="Pipe",
        shuffle_config=ShuffleConfig(3),
    )
    (channel,) = channels_of({"train": given})
    assert channel == {
        "ChannelName": "train",
        "DataSource": {
            "S3DataSource": {
                "S3DataType": "S3Prefix",
                "S3Uri": "s3://b/a",
                "S3DataDistributionType": "ShardedByS3Key",
            }
        },
        "CompressionType": "Gzip",
        "ContentType": "text/csv",
        "RecordWrapperType": "RecordIO",
        "InputMode": "Pipe",
        "ShuffleConfig": {"Seed": 3},
    }


def test_one_input_is_the_channel_training(data: Path) -> None:
    (channel,) = channels_of(str(data))
    assert channel["ChannelName"] == "training"
    assert channels_of(None) == []
    with pytest.raises(ConfigError, match=r"channel train: an input is a path.*got 3"):
        channels_of({"train": 3})


def test_folders_are_private(tmp_path: Path) -> None:
    places.make_private(tmp_path / "a/b")
    assert stat.S_IMODE((tmp_path / "a/b").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_the_place_of_jobs_is_chosen(tmp_path: Path) -> None:
    assert places.jobs_root({"SMP_JOBS": str(tmp_path)}) == tmp_path
    assert places.jobs_root({}).name == "jobs"


def test_a_store_that_is_not_installed_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(places.importlib, "import_module", missing)
    with pytest.raises(UnsupportedError, match=r"pip install 'smp-launch\[gcs\]'"):
        places.locate("gs://b/a", tmp_path)
    with pytest.raises(UnsupportedError, match=r"pip install 'smp-launch\[s3\]'"):
        places.locate("s3://b/a", tmp_path, {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"})
