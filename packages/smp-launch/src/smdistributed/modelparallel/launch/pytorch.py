"""The estimator of PyTorch."""

from __future__ import annotations

from typing import Any, ClassVar

from smdistributed.modelparallel.launch.estimator import Framework

__all__ = ["PyTorch"]


class PyTorch(Framework):
    """Runs a PyTorch script as a job.

    Raises:
        ConfigError: an argument breaks a rule; see the table of arguments.
        UnsupportedError: an argument asks for what is not offered.

    Source: estimator interface, section 1; model-parallel-sm-sdk.md.
    """

    _kind: ClassVar[str] = "PyTorch"
    _repository: ClassVar[str] = "pytorch-training"

    def __init__(
        self,
        entry_point: str | None = None,
        framework_version: str | None = None,
        py_version: str | None = None,
        source_dir: str | None = None,
        hyperparameters: dict[str, Any] | None = None,
        image_uri: str | None = None,
        distribution: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        given = {
            "entry_point": entry_point,
            "framework_version": framework_version,
            "py_version": py_version,
            "source_dir": source_dir,
            "hyperparameters": hyperparameters,
            "image_uri": image_uri,
            "distribution": distribution,
        }
        super().__init__({**given, **others})
