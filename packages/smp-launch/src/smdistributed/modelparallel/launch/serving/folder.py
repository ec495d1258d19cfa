"""The folder of an endpoint: what is served, how it stands, and the socket that answers."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_pascal

from smdistributed.modelparallel.launch.job.detached import take_lock
from smdistributed.modelparallel.launch.request.document import validated
from smdistributed.modelparallel.launch.request.serving import Container
from smdistributed.modelparallel.launch.storage.transfer import write_whole

State = Literal["Creating", "InService", "Failed"]
_GONE = (
    "the server of the endpoint is gone: it was killed, or the machine was restarted. The last "
    "lines of {log} may say more."
)


class EndpointStatus(BaseModel):
    """How an endpoint stands; times are seconds since 1970.

    Source: the public schema of ``DescribeEndpoint``.
    """

    model_config = ConfigDict(alias_generator=to_pascal, populate_by_name=True, frozen=True)

    endpoint_name: str
    endpoint_config_name: str
    endpoint_status: State = "Creating"
    failure_reason: str | None = None
    creation_time: float
    last_modified_time: float

    def turned(self, state: State, reason: str | None = None) -> EndpointStatus:
        """Returns the status after a change."""
        changes = {
            "endpoint_status": state,
            "failure_reason": reason,
            "last_modified_time": time.time(),
        }
        return self.model_copy(update=changes)


@dataclass(frozen=True)
class EndpointFolder:
    """The folder of an endpoint, for this user alone.

    Attributes:
        path: of the folder.
        root: the folder of all jobs, which addresses may lie below.
    """

    path: Path
    root: Path

    @property
    def model(self) -> Path:
        """What is in the model's archive."""
        return self.path / "model"

    @property
    def code(self) -> Path:
        """The script of a model that has one elsewhere than in its archive."""
        return self.path / "code"

    @property
    def socket(self) -> Path:
        """Where requests go."""
        return self.path / "http"

    @property
    def log(self) -> Path:
        """What the server prints."""
        return self.path / "server.log"

    def container(self) -> Container:
        """Returns the document of what is served."""
        text = (self.path / "container.json").read_text(encoding="utf-8")
        return validated(Container, json.loads(text))

    def status(self) -> EndpointStatus:
        """Returns how the endpoint stood when somebody last wrote it down."""
        text = (self.path / "status.json").read_text(encoding="utf-8")
        return EndpointStatus.model_validate_json(text)

    def write_status(self, status: EndpointStatus) -> None:
        """Replaces the status; readers see the old or the new one, whole."""
        write_whole(self.path / "status.json", status.model_dump_json(by_alias=True, indent=1))

    def observe(self) -> EndpointStatus:
        """Returns how the endpoint stands; one whose server is gone has failed."""
        status = self.status()
        if status.endpoint_status == "Failed" or self.is_alive:
            return self.status()
        # It may have ended between the two looks, with a reason of its own.
        status = self.status()
        if status.endpoint_status != "Failed":
            status = status.turned("Failed", _GONE.format(log=self.log))
            self.write_status(status)
        return status

    def lock(self) -> int | None:
        """Takes the lock of the server; returns its descriptor, or None if it is taken."""
        return take_lock(self.path / "server.lock")

    @property
    def is_alive(self) -> bool:
        """Whether the server runs."""
        descriptor = self.lock()
        if descriptor is None:
            return True
        os.close(descriptor)
        return False

    def ask_to_stop(self) -> None:
        """Leaves word for the server."""
        (self.path / "stop").touch()

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether somebody left that word, or the folder is gone."""
        return (self.path / "stop").exists() or not self.path.exists()
