"""Names of jobs, and what the name of an image says.

Source: estimator interface, section 1 (framework, Python, image, name).
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from smdistributed.modelparallel.common.config import Framework
from smdistributed.modelparallel.common.errors import ConfigError

MOST_LETTERS = 63
#: The one account that there is here.
ACCOUNT = "123456789012"
SHORT_STAMP = "%y%m%d-%H%M"
_STAMP = re.compile(r"-(\d{4}-\d{2}-\d{2}-\d{2}-\d{2}-\d{2}-\d{3}|\d{6}-\d{4})$")
#: Repositories of framework images -> the framework whose script runs in them.
_FRAMEWORKS = {
    "pytorch-training": "pytorch",
    "tensorflow-training": "tensorflow",
    "tensorflow-scriptmode": "tensorflow",
    "huggingface-pytorch-training": "pytorch",
    "huggingface-tensorflow-training": "tensorflow",
}


#: The same of images that serve.
_SERVING = {
    "pytorch-inference": "pytorch",
    "tensorflow-inference": "tensorflow",
    "tensorflow-serving": "tensorflow",
    "huggingface-pytorch-inference": "pytorch",
    "huggingface-tensorflow-inference": "tensorflow",
}


@dataclass(frozen=True)
class Image:
    """The name of an image.

    Attributes:
        repository: the last part of its path, such as ``pytorch-training``.
        tag: such as ``1.12.0-gpu-py38``; may be empty.
    """

    repository: str
    tag: str

    @property
    def framework(self) -> str | None:
        """``pytorch`` or ``tensorflow`` for an image of a framework, None for any other."""
        return _FRAMEWORKS.get(self.repository.removeprefix("sagemaker-"))

    @property
    def script_framework(self) -> Framework:
        """The framework that a script is taken to use: PyTorch, where nothing names another."""
        return "tensorflow" if self.framework == "tensorflow" else "pytorch"

    @property
    def served_framework(self) -> str | None:
        """The same for images that serve; models are also served by images that train."""
        return _SERVING.get(self.repository.removeprefix("sagemaker-"), self.framework)

    @property
    def framework_version(self) -> str | None:
        """The version of the framework in the tag."""
        found = re.search(r"\d+\.\d+(?:\.\d+)?", self.tag)
        return found[0] if found else None

    @property
    def py_version(self) -> str | None:
        """The Python in the tag, such as ``py38``."""
        found = re.search(r"\bpy\d+\b", self.tag)
        return found[0] if found else None


def parse_image(name: str) -> Image:
    """Takes the name of an image apart."""
    last = name.partition("@")[0].rpartition("/")[2]
    repository, _, tag = last.partition(":")
    return Image(repository, tag)


def framework_image(
    repository: str, version: str | None, py_version: str | None, *, is_gpu: bool
) -> str:
    """Returns the name of a framework's image; what is not said is left out of its tag."""
    parts = (version, "gpu" if is_gpu else "cpu", py_version)
    return f"{repository}:{'-'.join(filter(None, parts))}"


def check_version(name: str, version: str | None) -> str | None:
    """Returns a version of a framework as it is.

    Raises:
        ConfigError: it is none.
    """
    if version is not None and not re.fullmatch(r"\d+(\.\d+){0,2}", str(version)):
        raise ConfigError(f"{name} must be a version such as '2.11.0'; got {version!r}.")
    return version


def job_name(base: str, now_seconds: float | None = None) -> str:
    """Returns a new name for a job: what it begins with, and the time.

    Raises:
        ConfigError: names cannot begin so.
    """
    if not re.fullmatch(r"[A-Za-z0-9](-*[A-Za-z0-9])*", base):
        raise ConfigError(
            f"base_job_name must have letters and digits, with dashes between them; got {base!r}: "
            f"use {re.sub('[^A-Za-z0-9]+', '-', base).strip('-') or 'job'!r}."
        )
    now = time.time() if now_seconds is None else now_seconds
    stamp = f"-{timestamp(now)}"
    return base[: MOST_LETTERS - len(stamp)].rstrip("-") + stamp


def arn(resource: str, name: str) -> str:
    """Returns the address that the service would give to what is called so."""
    return f"arn:aws:sagemaker:us-east-1:{ACCOUNT}:{resource}/{name}"


def timestamp(seconds: float) -> str:
    """Returns a time in milliseconds, as names end with it."""
    whole = time.strftime("%Y-%m-%d-%H-%M-%S", time.gmtime(seconds))
    return f"{whole}-{int(seconds * 1000) % 1000:03}"


def base_of(name: str) -> str:
    """Returns what the name of a job begins with, without the time."""
    return _STAMP.sub("", name)
