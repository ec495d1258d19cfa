"""A place where cases run jobs of estimators."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance.adapters.base import Adapter

SEES = """
import json, os, sys
place = os.path.join(os.environ["SM_OUTPUT_DATA_DIR"], os.environ["SM_CURRENT_HOST"] + ".json")
json.dump({"argv": sys.argv[1:], "environ": dict(os.environ)}, open(place, "w"))
open(os.path.join(os.environ["SM_MODEL_DIR"], "weights"), "w").write("w")
print("loss: 0.25")
"""


class Bench:
    """A folder with a script, and estimators that run it."""

    def __init__(self, framework: str, root: Path) -> None:
        from smdistributed.modelparallel.launch.session import Session

        self.framework = framework
        self.root = root
        self.session = Session(root=root / "jobs")

    def make(self, script: str = SEES, **given: Any) -> Any:
        """Returns an estimator of the framework, and of a script."""
        from smdistributed.modelparallel.launch.pytorch import PyTorch
        from smdistributed.modelparallel.launch.tensorflow import TensorFlow

        folder = self.root / "code"
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(script)
        base = {"entry_point": "train.py", "source_dir": str(folder), "role": "role"}
        kind: Any = {"torch": PyTorch, "tensorflow": TensorFlow}[self.framework]
        return kind(**{**base, "sagemaker_session": self.session, **given})

    def run(self, script: str = SEES, inputs: Any = None, **given: Any) -> Any:
        """Runs a job to its end; returns its estimator."""
        estimator = self.make(script, **given)
        with contextlib.redirect_stdout(io.StringIO()):
            estimator.fit(inputs)
        return estimator

    def folder(self, estimator: Any) -> Path:
        """Returns the folder of the latest job."""
        return self.session.root / str(estimator.latest_training_job.name)

    def seen(self, estimator: Any, host: str = "algo-1") -> Any:
        """Returns what the script saw on a host."""
        return json.loads((self.folder(estimator) / f"output/data/{host}.json").read_text())

    def log(self, estimator: Any) -> str:
        """Returns what the job printed."""
        return (self.folder(estimator) / "logs/algo-1.log").read_text()

    def data(self) -> Path:
        """Returns a folder with two files."""
        folder = self.root / "data"
        (folder / "deep").mkdir(parents=True)
        (folder / "a.txt").write_text("a")
        (folder / "deep/b.txt").write_text("b")
        return folder


@contextlib.contextmanager
def bench(adapter: Adapter) -> Iterator[Bench]:
    """Makes a place for jobs."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        yield Bench(adapter.name, Path(folder))
