"""Channels as streams: what is in them, epoch by epoch, and readers that leave."""

from __future__ import annotations

import gzip
import io
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smdistributed.modelparallel.launch.channels import framing, pipe
from smdistributed.modelparallel.launch.channels.file import Share
from smdistributed.modelparallel.launch.exceptions import StorageError
from smdistributed.modelparallel.launch.inputs import ShuffleConfig, TrainingInput
from smdistributed.modelparallel.launch.inputs import channels as channels_of
from smdistributed.modelparallel.launch.request.document import Channel

Feed = Callable[..., Path]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in "abcdef":
        (folder / name).write_text(f"{name}\n")
    return folder


@pytest.fixture
def feed(tmp_path: Path, data: Path) -> Feed:
    """Feeds a channel from a thread; returns what the names of its pipes begin with."""

    def start(share: Share = Share(), **given: Any) -> Path:  # noqa: B008 - a constant
        channel = TrainingInput(str(data), input_mode="Pipe", **given)
        (config,) = channels_of({"train": channel})
        base = tmp_path / "input/train"
        pipe.make(base, 0)
        feeder = pipe.Feeder(Channel.model_validate(config), base, tmp_path / "jobs", share)
        threading.Thread(target=feeder.run, daemon=True).start()
        return base

    return start


def read(base: Path, epoch: int) -> bytes:
    return base.with_name(f"{base.name}_{epoch}").read_bytes()


def test_each_epoch_is_a_pipe_with_all_files_in_order(feed: Feed) -> None:
    base = feed()
    for epoch in range(3):
        assert read(base, epoch) == b"a\nb\nc\nd\ne\nf\n"


def test_a_reader_that_leaves_early_has_the_next_epoch(feed: Feed, data: Path) -> None:
    # More than a pipe holds.
    (data / "a").write_bytes(b"x" * (1 << 20))
    base = feed()
    with base.with_name("train_0").open("rb") as stream:
        assert stream.read(10) == b"x" * 10
    assert len(read(base, 1)) == (1 << 20) + 10


def test_an_order_is_drawn_for_each_epoch_and_is_that_of_the_seed(
    feed: Feed, tmp_path: Path, data: Path
) -> None:
    base = feed(shuffle_config=ShuffleConfig(3))
    epochs = [read(base, epoch) for epoch in range(3)]
    assert len(set(epochs)) > 1
    assert {bytes(sorted(epoch)) for epoch in epochs} == {b"\n" * 6 + b"abcdef"}
    (config,) = channels_of({"a": TrainingInput(str(data), shuffle_config=ShuffleConfig(3))})
    feeder = pipe.Feeder(Channel.model_validate(config), base, tmp_path, Share())
    order = "".join(f"{entry.name}\n" for entry in feeder._in_order(1))
    assert order.encode() == epochs[1]


def test_files_are_unpacked_and_wrapped_on_the_way(feed: Feed, data: Path) -> None:
    for file in data.iterdir():
        file.write_bytes(gzip.compress(file.read_bytes()))
    base = feed(compression="Gzip", record_wrapping="RecordIO")
    records = framing.record_io(io.BytesIO(read(base, 0)))
    assert list(records) == [b"a\n", b"b\n", b"c\n", b"d\n", b"e\n", b"f\n"]


def test_each_host_has_its_share(feed: Feed) -> None:
    base = feed(Share(1, 2), distribution="ShardedByS3Key")
    assert read(base, 0) == b"b\nd\nf\n"


def test_what_is_not_compressed_is_an_error_that_ends_the_feeding(
    tmp_path: Path, data: Path
) -> None:
    (config,) = channels_of({"train": TrainingInput(str(data), compression="Gzip")})
    base = tmp_path / "train"
    feeder = pipe.Feeder(Channel.model_validate(config), base, tmp_path, Share())
    pipe.make(base, 0)
    threading.Thread(target=read, args=(base, 0), daemon=True).start()
    with pytest.raises(
        StorageError, match=r"channel train: .*/data/a cannot be streamed: Not a gz"
    ):
        pipe.feed([feeder])


def test_records_of_every_format_are_found() -> None:
    stored = b"".join(map(framing.as_record_io, (b"", b"abc", b"abcd")))
    assert list(framing.record_io(io.BytesIO(stored))) == [b"", b"abc", b"abcd"]
    magic = struct.pack("<I", 0xCED7230A)
    parts = [
        magic + struct.pack("<I", (kind << 29) | 2) + text + b"\0\0"
        for kind, text in ((1, b"ab"), (2, b"cd"), (3, b"ef"))
    ]
    whole = b"ab" + magic + b"cd" + magic + b"ef"
    assert list(framing.record_io(io.BytesIO(b"".join(parts)))) == [whole]
    tf_record = struct.pack("<QI", 3, 0) + b"abc" + struct.pack("<I", 0)
    assert list(framing.tf_record(io.BytesIO(tf_record * 2))) == [b"abc", b"abc"]
    assert list(framing.text_line(io.BytesIO(b"a\r\nb\n\nc"))) == [b"a", b"b", b"", b"c"]


@pytest.mark.parametrize(
    ("stream", "match"),
    [
        (b"12345678", "begins records with 0xced7230a"),
        (framing.as_record_io(b"abc")[:-1], "ends inside of a record"),
        (framing.as_record_io(b"abc")[:6], "ends inside of a record"),
        (struct.pack("<II", 0xCED7230A, 3 << 29), "are not in order"),
        (struct.pack("<II", 0xCED7230A, 1 << 29), "ends inside of a record"),
    ],
)
def test_a_stream_of_another_format_is_an_error(stream: bytes, match: str) -> None:
    with pytest.raises(framing.FramingError, match=match):
        list(framing.record_io(io.BytesIO(stream)))
