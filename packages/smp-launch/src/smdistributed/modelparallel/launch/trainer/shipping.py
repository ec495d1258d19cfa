"""Code, and what says how it is run, on their way into a job: two channels, as the SDK has them."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.job import trainer
from smdistributed.modelparallel.launch.session import Session
from smdistributed.modelparallel.launch.trainer.configs import SourceCode
from smdistributed.modelparallel.launch.trainer.distributed import DistributedConfig


def channels(
    source: SourceCode, distributed: DistributedConfig | None, session: Session, prefix: str
) -> list[dict[str, Any]]:
    """Uploads what is on this machine; returns the channels.

    Args:
        source: what is run.
        distributed: what starts it, or None.
        session: to whose bucket it goes.
        prefix: what its keys begin with.

    Raises:
        ConfigError: there is no such code.
        StorageError: it cannot be uploaded.
    """
    found = []
    with tempfile.TemporaryDirectory() as place:
        if address := source.source_dir:
            if "://" not in address:
                taken = _taken(Path(address), source, Path(place, trainer.CODE))
                address = session.upload_data(str(taken), key_prefix=f"{prefix}/{trainer.CODE}")
            found.append(_of_address(trainer.CODE, address))
        files = Path(place, trainer.DRIVERS)
        _write_drivers(files, source, distributed)
        address = session.upload_data(str(files), key_prefix=f"{prefix}/{trainer.DRIVERS}")
        found.append(_of_address(trainer.DRIVERS, address))
    return found


def _of_address(name: str, address: str) -> dict[str, Any]:
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": address,
        "S3DataDistributionType": "FullyReplicated",
    }
    return {"ChannelName": name, "InputMode": "File", "DataSource": {"S3DataSource": source}}


def _taken(path: Path, source: SourceCode, target: Path) -> Path:
    """Returns what is to be uploaded: an archive, or a copy without what is left behind."""
    path = path.expanduser()
    if path.is_file() and path.name.endswith(".tar.gz"):
        return path
    if not path.is_dir():
        raise ConfigError(
            f"SourceCode.source_dir is a folder, a .tar.gz or an address; there is none at "
            f"{path.absolute()}: correct it."
        )
    shutil.copytree(path, target, ignore=shutil.ignore_patterns(*source.ignore_patterns or ()))
    return target


def _write_drivers(files: Path, source: SourceCode, distributed: DistributedConfig | None) -> None:
    """Writes what says how the code is run, in the SDK's files."""
    files.mkdir()
    driver = distributed.driver_script if distributed else trainer.ALONE
    if distributed and distributed.driver_dir:
        shutil.copytree(distributed.driver_dir, files / trainer.FOLDER)
    told = distributed.model_dump(mode="json") if distributed else {}
    for name, text in {
        trainer.SOURCE_FILE: json.dumps(source.model_dump(mode="json")),
        trainer.STARTER_FILE: json.dumps(told),
        trainer.SCRIPT_FILE: f"python3 {trainer.FOLDER}/{driver}\n",
    }.items():
        (files / name).write_text(text, encoding="utf-8")
