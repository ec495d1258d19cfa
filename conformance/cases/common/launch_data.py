"""How a job gets its data, beside files."""

from __future__ import annotations

from conformance.adapters.base import Adapter
from conformance.bench import bench
from conformance.registry import later
from conformance.worlds import FRAMEWORKS
from smdistributed.modelparallel.launch.inputs import TrainingInput


@later("launch.data_file.pipe_mode", "launch.data_file.compression", frameworks=FRAMEWORKS)
def channels_are_streams(adapter: Adapter) -> None:
    with bench(adapter) as place:
        given = TrainingInput(str(place.data()), input_mode="Pipe", compression="Gzip")
        place.run(inputs={"train": given})
