"""How a job gets its data, beside files: streams, and their reader."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path

import pytest

from conformance.adapters.base import Adapter
from conformance.bench import bench
from conformance.registry import job_case
from smdistributed.modelparallel.common.config import ConfigWarning

_READS = """
import os
for epoch in range(2):
    with open(os.environ["SM_CHANNEL_TRAIN"] + f"_{epoch}") as stream:
        print("epoch", epoch, stream.read().split())
"""


@job_case("launch.data_file.pipe_mode", "launch.data_file.compression")
def channels_are_streams(adapter: Adapter) -> None:
    from smdistributed.modelparallel.launch.inputs import TrainingInput

    with bench(adapter) as place:
        data = place.root / "packed"
        data.mkdir()
        for name in "ab":
            (data / name).write_bytes(gzip.compress(f"{name}\n".encode()))
        given = TrainingInput(str(data), input_mode="Pipe", compression="Gzip")
        job = place.run(_READS, inputs={"train": given})
        for epoch in range(2):
            assert f"epoch {epoch} ['a', 'b']" in place.log(job)
        # Beside streams it has no effect, and says so.
        files = TrainingInput(str(data), compression="Gzip")
        with pytest.warns(ConfigWarning, match="compression acts in input_mode 'Pipe' alone"):
            place.run(inputs={"train": files})


@job_case("launch.data_file.reader", quick_with=("tensorflow",))
def a_dataset_reads_a_pipe_in_each_pass(adapter: Adapter) -> None:
    if adapter.name == "torch":
        return  # it is of TensorFlow
    from smdistributed.modelparallel.launch.channels import pipe
    from smdistributed.modelparallel.launch.channels.dataset import (
        PipeModeDataset,
        PipeModeDatasetException,
    )
    from smdistributed.modelparallel.launch.channels.file import Share
    from smdistributed.modelparallel.launch.inputs import TrainingInput, channels
    from smdistributed.modelparallel.launch.request.document import Channel

    with bench(adapter) as place:
        given = TrainingInput(str(place.data()), input_mode="Pipe", record_wrapping="RecordIO")
        (config,) = channels({"train": given})
        base = place.root / "input/data/train"
        pipe.make(base, 0)
        feeder = pipe.Feeder(Channel.model_validate(config), base, place.root, Share())
        threading.Thread(target=feeder.run, daemon=True).start()
        _describe(place.root / "input/config")
        os.environ.update(
            SM_CHANNEL_TRAIN=str(base), SM_INPUT_CONFIG_DIR=str(place.root / "input/config")
        )
        dataset = PipeModeDataset(channel="train", record_format="RecordIO")
        records = dataset.repeat(2).map(lambda record: record + "!").batch(3).prefetch(1)
        assert [batch.tolist() for batch in records.as_numpy_iterator()] == [
            [b"a!", b"b!", b"a!"],
            [b"b!"],
        ]
        for wrong, match in (
            ({"channel": "other"}, "channel must be one of train, plain"),
            ({"channel": "plain"}, "must have input_mode 'Pipe'"),
            ({"channel": "train", "record_format": "CSV"}, "RecordIO, TFRecord, TextLine"),
        ):
            with pytest.raises(PipeModeDatasetException, match=match):
                PipeModeDataset(**wrong)


def _describe(config: Path) -> None:
    config.mkdir(parents=True)
    modes = {"train": "Pipe", "plain": "File"}
    content = {name: {"TrainingInputMode": mode} for name, mode in modes.items()}
    (config / "inputdataconfig.json").write_text(json.dumps(content))
