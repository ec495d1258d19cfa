"""Measuring steps of a job, and what plans of the same model learn from it.

A job that is measured writes down when each step begins, and ends after some of them. What steps
take of what was planned is one factor of a model on a kind of device; it is kept in the user's
cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from smdistributed.modelparallel.common.search.profile import ModelProfile

#: Tells the ranks of a job that it is measured: a ``Wanted`` as JSON.
MEASURE_VARIABLE = "SMP_MEASURE"

#: Steps that are not counted: recording, kernels chosen, passes captured and their times taken.
_WARM_UP = 5


@dataclass(frozen=True)
class Wanted:
    """What is measured of a job.

    Attributes:
        file: of rank 0: the kind of its device, and the seconds at which steps begin, a line each.
        step: name of the step function.
        steps: that count.
    """

    file: str
    step: str
    steps: int = 10

    @classmethod
    def asked(cls, environ: Mapping[str, str] = os.environ) -> Wanted | None:
        """Returns what a launcher asks of this job; None for nothing."""
        text = environ.get(MEASURE_VARIABLE)
        return cls(**json.loads(text)) if text else None

    def to_variable(self) -> str:
        """Returns the value of the variable."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def calls(self) -> int:
        """How many calls of the step function begin before the job may end."""
        return _WARM_UP + self.steps + 1


@dataclass(frozen=True)
class Measured:
    """What steps of a job have taken.

    Attributes:
        device: as its driver names it.
        seconds: from the beginning of a step to that of the next one, the median.
        steps: that counted.
    """

    device: str
    seconds: float
    steps: int

    @classmethod
    def read(cls, file: Path) -> Measured | None:
        """Reads what rank 0 has written; None if too few steps have begun."""
        device, *lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else [""]
        begun = [float(line) for line in lines[_WARM_UP:]]
        taken = [later - earlier for earlier, later in itertools.pairwise(begun)]
        return cls(device, statistics.median(taken), len(taken)) if taken else None


class Calibrations:
    """By which factor steps of a model on a device take longer than planned, as was measured.

    Args:
        file: that keeps them; None for that of the user's cache.
    """

    def __init__(self, file: Path | None = None) -> None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.file = file or Path(cache) / "smdistributed-modelparallel" / "plans.json"

    def factor(self, profile: ModelProfile, device: str) -> float | None:
        """Returns the factor; None where nothing was measured."""
        found = self._read().get(_key(profile, device))
        return None if found is None else float(found)

    def keep(self, profile: ModelProfile, device: str, factor: float) -> None:
        """Keeps a factor for later plans of this user."""
        known = {**self._read(), _key(profile, device): factor}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        new.replace(self.file)

    def _read(self) -> dict[str, float]:
        try:
            found = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not there, or cut off: to be measured anew
            return {}
        return found if isinstance(found, dict) else {}


def _key(profile: ModelProfile, device: str) -> str:
    """Returns what stands for a model on a device, whatever the batch and the degrees are."""
    text = json.dumps(dataclasses.asdict(profile.root), sort_keys=True)
    return f"{device} {profile.precision} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
