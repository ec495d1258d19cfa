"""A process that stands for a whole job which is being planned."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from smdistributed.modelparallel.common.config import Config
from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.search.profile import (
    PROFILE_DEVICE_VARIABLE,
    PROFILE_VARIABLE,
    ModelProfile,
)


@dataclass(frozen=True)
class Planning:
    """What is asked of the process.

    Attributes:
        file: where the profile of the first training step goes, which then is not run.
        config: of the job that the script asks for.
        device: the kind that is planned for; "" where it is not known.
    """

    file: str
    config: Config
    device: str = ""

    @classmethod
    def asked(cls, config: Config, environ: Mapping[str, str] = os.environ) -> Planning | None:
        """Returns what is asked; None where the job itself runs."""
        file = environ.get(PROFILE_VARIABLE)
        return cls(file, config, environ.get(PROFILE_DEVICE_VARIABLE, "")) if file else None

    @property
    def config_alone(self) -> Config:
        """That of one process, which stands for all: without any degree."""
        return self.config.model_copy(
            update={
                "pipeline_parallel_degree": 1,
                "tensor_parallel_degree": 1,
                "sharded_data_parallel_degree": 1,
                "shard_optimizer_state": False,
                "checkpointed_blocks": 0,
                "auto_partition": True,
                "default_partition": 0,
                "horovod": False,
                "auto": False,
            }
        )

    def check_alone(self, num_processes: int) -> None:
        """Raises unless this process is the only one.

        Raises:
            ConfigError: it is not.
        """
        if num_processes > 1:
            raise ConfigError(
                f"one process records a step for a plan ({PROFILE_VARIABLE} names the file); "
                f"received {num_processes}: start the script without a launcher, or unset "
                f"{PROFILE_VARIABLE}."
            )

    def end(self, profile: ModelProfile) -> NoReturn:
        """Writes the profile and ends the process: what follows in the script would train."""
        Path(self.file).write_text(profile.to_json(), encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
