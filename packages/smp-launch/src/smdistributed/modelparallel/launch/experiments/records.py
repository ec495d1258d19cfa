"""A file of JSON for each experiment, trial and component, beside the folders of jobs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.launch.exceptions import UnknownExperimentError
from smdistributed.modelparallel.launch.request import experiments as forms
from smdistributed.modelparallel.launch.request.document import Part
from smdistributed.modelparallel.launch.storage.places import make_private
from smdistributed.modelparallel.launch.storage.transfer import write_whole

#: Names of jobs do not begin so.
_FOLDER = ".experiments"
Record = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """What is kept under a name.

    Attributes:
        form: of what it is made from.
        word: for people.
        resource: what addresses call it.
    """

    form: type[Part]
    word: str
    resource: str

    @property
    def name(self) -> str:
        """What operations call it."""
        return self.form.__name__

    @property
    def key(self) -> str:
        """The member of documents that names one."""
        return f"{self.name}Name"


EXPERIMENT = Kind(forms.Experiment, "experiment", "experiment")
TRIAL = Kind(forms.Trial, "trial", "experiment-trial")
COMPONENT = Kind(forms.TrialComponent, "trial component", "experiment-trial-component")
KINDS = (EXPERIMENT, TRIAL, COMPONENT)


class Records:
    """The records of a folder of jobs."""

    def __init__(self, root: Path) -> None:
        self._place = root / _FOLDER

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Keeps all others from changes while the body reads and writes; readers need no lock."""
        make_private(self._place)
        descriptor = os.open(self._place / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def has(self, kind: Kind, name: str) -> bool:
        """Returns whether there is such a record."""
        return name in self._names(kind)

    def read(self, kind: Kind, name: str) -> Record:
        """Returns a record.

        Raises:
            UnknownExperimentError: there is none of this name.
        """
        # The name may be anything, and lead anywhere: it is compared before it is a path.
        with contextlib.suppress(FileNotFoundError):
            if self.has(kind, name):
                found: Record = json.loads(self._path(kind, name).read_text(encoding="utf-8"))
                return found
        known = ", ".join(self._names(kind)) or "none"
        raise UnknownExperimentError(f"there is no {kind.word} {name!r}; those there are: {known}.")

    def all(self, kind: Kind) -> Iterator[Record]:
        """Yields all records of a kind."""
        for name in self._names(kind):
            with contextlib.suppress(UnknownExperimentError):  # it went in between
                yield self.read(kind, name)

    def write(self, kind: Kind, record: Record) -> None:
        """Replaces a record; readers see the old or the new one, whole."""
        path = self._path(kind, record[kind.key])
        make_private(path.parent)
        write_whole(path, json.dumps(record, indent=1))

    def remove(self, kind: Kind, name: str) -> None:
        """Forgets a record, with its numbers."""
        self._path(kind, name).unlink()
        if kind is COMPONENT:
            self.numbers(name).unlink(missing_ok=True)

    def numbers(self, component: str) -> Path:
        """Returns where the numbers of a component are, one a line."""
        return self._place / "numbers" / f"{component}.jsonl"

    def _path(self, kind: Kind, name: str) -> Path:
        return self._place / kind.name / f"{name}.json"

    def _names(self, kind: Kind) -> list[str]:
        return sorted(path.stem for path in (self._place / kind.name).glob("*.json"))
