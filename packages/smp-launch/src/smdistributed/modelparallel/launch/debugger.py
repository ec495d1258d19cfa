"""Settings of the service's debugger that notebooks import: those that act here.

Source: estimator interface, section 1 (debugger); the public signatures of the settings.
"""

from __future__ import annotations

from dataclasses import dataclass

from smdistributed.modelparallel.common.config.schema import describe
from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.launch.request.document import TENSORBOARD_PATH

__all__ = ["TensorBoardOutputConfig"]


@dataclass(frozen=True)
class TensorBoardOutputConfig:
    """Where files of TensorBoard go while a job runs.

    Args:
        s3_output_path: an address or a folder; they lie below it, at
            ``<job>/tensorboard-output``.
        container_local_output_path: where the script writes them; default
            ``/opt/ml/output/tensorboard``, which is in the folder of the job.

    Raises:
        ConfigError: there is no place to keep them.
    """

    s3_output_path: str
    container_local_output_path: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.s3_output_path, str) or not self.s3_output_path:
            raise ConfigError(
                "TensorBoardOutputConfig needs s3_output_path, an address or a folder; got "
                f"{describe(self.s3_output_path)}."
            )

    @property
    def local_path(self) -> str:
        """Where the script writes."""
        return self.container_local_output_path or TENSORBOARD_PATH
