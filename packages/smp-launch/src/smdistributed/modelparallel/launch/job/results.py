"""Archives of what a script left, at ``<output path>/<job>/output/``.

Source: estimator interface, section 6.
"""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path

from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.request.document import TrainingJob
from smdistributed.modelparallel.launch.storage.places import locate
from smdistributed.modelparallel.launch.storage.transfer import upload

MODEL = "model.tar.gz"
OUTPUT = "output.tar.gz"


def address(request: TrainingJob, name: str) -> str:
    """Returns where an archive goes."""
    path = request.output_data_config.s3_output_path.rstrip("/")
    return f"{path}/{request.training_job_name}/output/{name}"


def deliver(folder: JobFolder, request: TrainingJob) -> str | None:
    """Packs the model and the other results, each where there is something.

    Returns:
        the address of the model's archive; None where the script left no model.
    """
    delivered = {
        name: _deliver(folder, source, address(request, name))
        for name, source in ((OUTPUT, folder.output / "data"), (MODEL, folder.model))
        if source.is_dir() and any(source.iterdir())
    }
    return delivered.get(MODEL)


def _deliver(folder: JobFolder, source: Path, target: str) -> str:
    with tempfile.NamedTemporaryFile(dir=folder.path, prefix=".archive-") as packed:
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for path in sorted(source.iterdir()):
                archive.add(path, path.name)
        packed.flush()
        upload(Path(packed.name), locate(target, folder.root))
    return target
