"""Channels as streams.

An epoch of a channel is a named pipe, ``<channel>_0`` and so on. It is written when a reader has
come; one that leaves early has the next pipe to read from. The pipe of the next epoch is there
before the present one ends.

Source: estimator interface, section 5 (Pipe mode, compression).
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import random
import shutil
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from smdistributed.modelparallel.launch.channels import file as file_channels
from smdistributed.modelparallel.launch.channels.file import Entry, Share
from smdistributed.modelparallel.launch.channels.framing import FramingError, as_record_io
from smdistributed.modelparallel.launch.exceptions import StorageError
from smdistributed.modelparallel.launch.request.document import Channel

_WAIT_SECONDS = 0.05
_PIECE_BYTES = 1 << 20


def make(base: Path, epoch: int) -> Path:
    """Makes the pipe of an epoch, if it is not there; returns it.

    Args:
        base: the folder that the channel would have in File mode.
        epoch: from 0.
    """
    pipe = base.with_name(f"{base.name}_{epoch}")
    pipe.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkfifo(pipe, 0o600)
    return pipe


class Feeder:
    """Feeds one channel, for ever."""

    def __init__(self, channel: Channel, base: Path, root: Path, share: Share) -> None:
        self._channel = channel
        self._base = base
        self._entries = file_channels.entries_of(channel, root, share)

    def run(self) -> None:
        """Feeds one epoch after another.

        Raises:
            StorageError: data cannot be read, or is not compressed as it should be.
        """
        epoch = 0
        while True:
            pipe = make(self._base, epoch)
            with _opened(pipe) as stream:
                make(self._base, epoch + 1)
                # A reader may have enough before the end.
                with contextlib.suppress(BrokenPipeError):
                    for entry in self._in_order(epoch):
                        self._write(entry, stream)
            pipe.unlink()
            epoch += 1

    def _in_order(self, epoch: int) -> Iterator[Entry]:
        entries = list(self._entries)
        if self._channel.shuffle_config is not None:
            random.Random(f"{self._channel.shuffle_config.seed}-{epoch}").shuffle(entries)
        yield from entries

    def _write(self, entry: Entry, target: BinaryIO) -> None:
        try:
            with entry.source.files.open(entry.source.path, "rb") as opened:
                source: BinaryIO = opened
                if self._channel.compression_type == "Gzip":
                    source = cast(BinaryIO, gzip.GzipFile(fileobj=opened))
                if self._channel.record_wrapper_type == "RecordIO":
                    target.write(as_record_io(source.read()))
                else:
                    shutil.copyfileobj(source, target, _PIECE_BYTES)
        except BrokenPipeError:
            raise
        except (OSError, EOFError, zlib.error, FramingError) as error:
            raise StorageError(
                f"channel {self._channel.channel_name}: {entry.source.address} cannot be streamed: "
                f"{error}."
            ) from None


def _opened(pipe: Path) -> BinaryIO:
    """Returns a pipe that somebody reads; waits for that without holding up the end of the job."""
    while True:
        try:
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            time.sleep(_WAIT_SECONDS)
            continue
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "wb", buffering=0)


def feed(feeders: list[Feeder]) -> None:
    """Feeds several channels; returns when one fails, by raising its error."""
    failed: list[BaseException] = []
    ended = threading.Event()

    def run(feeder: Feeder) -> None:
        try:
            feeder.run()
        except BaseException as error:
            failed.append(error)
            ended.set()

    for feeder in feeders:
        threading.Thread(target=run, args=(feeder,), daemon=True).start()
    ended.wait()
    raise failed[0]
