"""``smp.save`` and ``smp.load``: one object in one file, or in one file a rank.

Source: smd_model_parallel_pytorch.rst, APIs for Saving and Loading.
"""

from __future__ import annotations

import glob
import pickle
import re
from pathlib import Path
from typing import Any

import torch

from smdistributed.modelparallel.common.checkpoint.durable_files import write_file
from smdistributed.modelparallel.common.errors import CheckpointError
from smdistributed.modelparallel.torch.checkpoint.plain_classes import is_trusted, plain_classes
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime


def save(
    runtime: TorchRuntime,
    obj: Any,
    path: str,
    *,
    partial: bool,
    v3: bool,
    pickle_module: Any,
    pickle_protocol: int,
) -> None:
    """See ``smp.save``."""
    target = Path(_file_name(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"smp.save: the folder {target.parent} does not exist; make it.")
    if partial:
        target = target.with_name(f"{target.name}_{_part(runtime, three=v3)}")
    write_file(
        target,
        lambda stream: torch.save(
            obj, stream, pickle_module=pickle_module, pickle_protocol=pickle_protocol
        ),
    )


def load(
    runtime: TorchRuntime,
    path: str,
    *,
    partial: bool,
    map_location: Any,
    pickle_module: Any,
    arguments: dict[str, Any],
) -> Any:
    """See ``smp.load``."""
    target = Path(_file_name(path))
    if partial:
        names = [f"{target.name}_{_part(runtime, three=three)}" for three in (True, False)]
        found = [name for name in names if target.with_name(name).exists()]
        if not found:
            raise CheckpointError(
                f"rank {runtime.rank}: there is no file {names[1]} (or {names[0]}) in "
                f"{target.parent}; {_describe_parts(target)}, this job has "
                f"{_degrees(runtime)}. Load with the degrees that it was saved with, or a whole "
                "file with partial=False."
            )
        target = target.with_name(found[0])
    arguments = {"weights_only": not is_trusted(), **arguments}
    # Torch refuses a module by name together with weights_only, the standard one too.
    module = None if pickle_module is pickle else pickle_module
    with plain_classes(target):
        return torch.load(target, map_location=map_location, pickle_module=module, **arguments)


def _file_name(path: object) -> str:
    if not isinstance(path, str):
        raise TypeError(f"the file must be given by name, as a str; received {path!r}.")
    return path


def _part(runtime: TorchRuntime, *, three: bool) -> str:
    place = runtime.coordinates
    if three:
        return f"{place.pp_rank}_{place.tp_rank}_{place.rdp_cp_rank}"
    if runtime.topology.tp_size > 1:
        return f"{place.pp_rank}_{place.tp_rank}"
    return str(place.mp_rank)


def _degrees(runtime: TorchRuntime) -> str:
    topology = runtime.topology
    return (
        f"pipeline_parallel_degree {topology.pp_size} and tensor_parallel_degree {topology.tp_size}"
    )


def _describe_parts(target: Path) -> str:
    """Says which partial files there are, and from the ranks in their names of which degrees."""
    pattern = re.compile(re.escape(target.name) + r"_(\d+)(?:_(\d+))?(?:_\d+)?")
    found = {
        path.name: match.groups()
        for path in sorted(target.parent.glob(f"{glob.escape(target.name)}_*"))
        if (match := pattern.fullmatch(path.name))
    }
    if not found:
        return "it has no partial file of this name"
    pp_size = 1 + max(int(pp_rank) for pp_rank, _ in found.values())
    tp_size = 1 + max(int(tp_rank or 0) for _, tp_rank in found.values())
    return (
        f"it has {', '.join(found)}, as of pipeline_parallel_degree {pp_size} and "
        f"tensor_parallel_degree {tp_size}"
    )
