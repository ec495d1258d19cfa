"""A channel of Pipe mode as a ``tf.data.Dataset``: ``sagemaker_tensorflow`` of scripts.

Source: estimator interface, section 5 (reader).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.common.config.schema import describe
from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.channels.framing import FORMATS

_STATE = "/opt/ml/pipe_state"
_PIPES = "/opt/ml/input/data"
_CONFIG = "/opt/ml/input/config"
#: What goes to TensorFlow at once.
_CHUNK_RECORDS = 1024
_CHUNK_BYTES = 1 << 20


class PipeModeDatasetException(ConfigError):  # noqa: N818 - the documented name
    """A channel is not there, or no stream."""


def PipeModeDataset(  # noqa: N802 - the documented name
    channel: str,
    record_format: str = "RecordIO",
    state_dir: str = _STATE,
    pipe_dir: str = _PIPES,
    config_dir: str = _CONFIG,
    benchmark: bool = False,
) -> Any:
    """Returns a dataset of the records of a channel, each a scalar of bytes.

    Each pass over it, such as an epoch of ``repeat``, reads the next pipe of the channel. One
    process of a host reads a channel.

    Args:
        channel: its name.
        record_format: ``RecordIO``, ``TFRecord`` or ``TextLine``.
        state_dir: where the number of the next pipe is kept; default the job's.
        pipe_dir: where the pipes are; default the job's.
        config_dir: where the files that configure the job are; default the job's.
        benchmark: without effect.

    Raises:
        PipeModeDatasetException: there is no such channel, or it is none of Pipe mode.

    Source: estimator interface, section 5 (reader).
    """
    import tensorflow as tf

    if record_format not in FORMATS:
        raise PipeModeDatasetException(
            f"record_format must be one of {', '.join(FORMATS)}; got {describe(record_format)}."
        )
    config = _own(config_dir, _CONFIG, "SM_INPUT_CONFIG_DIR")
    _check(channel, config / "inputdataconfig.json")
    variable = f"SM_CHANNEL_{channel.upper()}"
    base = Path(pipe_dir, channel)
    if pipe_dir == _PIPES and variable in os.environ:
        base = Path(os.environ[variable])
    state = Path(state_dir) if state_dir != _STATE else config.parents[1] / "pipe_state"

    def chunks() -> Iterator[list[bytes]]:
        epoch = _next_epoch(state / base.parent.name / channel)
        with base.with_name(f"{base.name}_{epoch}").open("rb") as stream:
            chunk: list[bytes] = []
            size = 0
            for record in FORMATS[record_format](stream):
                chunk.append(record)
                size += len(record)
                if len(chunk) == _CHUNK_RECORDS or size > _CHUNK_BYTES:
                    yield chunk
                    chunk, size = [], 0
            if chunk:
                yield chunk

    spec = tf.TensorSpec([None], tf.string)
    return tf.data.Dataset.from_generator(chunks, output_signature=spec).unbatch()


def _own(given: str, default: str, variable: str) -> Path:
    """Returns a folder of the job where its place in a container is meant."""
    return Path(os.environ.get(variable, given) if given == default else given)


def _check(channel: str, file: Path) -> None:
    try:
        channels = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PipeModeDatasetException(
            f"channels are listed in {file}, which cannot be read ({error}): run this in a job."
        ) from None
    if channel not in channels:
        known = ", ".join(channels) or "none"
        raise PipeModeDatasetException(f"channel must be one of {known}; got {describe(channel)}.")
    mode = channels[channel].get("TrainingInputMode")
    if mode != "Pipe":
        raise PipeModeDatasetException(
            f"channel {channel} must have input_mode 'Pipe' to be read as a stream; it has {mode}."
        )


def _next_epoch(file: Path) -> int:
    """Returns the number of the next pipe, and counts it as read."""
    epoch = int(file.read_text()) if file.exists() else 0
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(str(epoch + 1))
    return epoch
