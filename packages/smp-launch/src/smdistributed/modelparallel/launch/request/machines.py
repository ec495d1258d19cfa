"""What is known of types of hosts: a cloud's type name supplies its number of GPUs, for checks.

Source: estimator interface, section 1 (host type); the public lists of instance types.
"""

from __future__ import annotations

import difflib
import re

from smdistributed.modelparallel.common.errors import ConfigError

LOCAL = "local"
LOCAL_GPU = "local_gpu"
#: The first one, as version 3 of the SDK calls it.
_LOCAL_CPU = "local_cpu"
#: A class of hosts, its generation with letters for what is special, and a size: ``p4d.24xlarge``,
#: ``trn1n.32xlarge``. Generations come every year; classes and sizes seldom.
_CLASSES = "a|c|d|dl|f|g|h|hpc|i|im|inf|is|m|p|r|t|trn|u|vt|x|z"
_LARGE = ("large", "xlarge", "2xlarge", "4xlarge", "8xlarge", "12xlarge", "16xlarge", "24xlarge")
_NAME = re.compile(
    rf"ml\.({_CLASSES})\d+[a-z0-9-]*\.(nano|micro|small|medium|large|metal|\d*xlarge)"
)
#: GPUs of a host, where its type has another number than one.
_GPUS = {
    "p2": {"8xlarge": 8, "16xlarge": 16},
    "p3": {"8xlarge": 4, "16xlarge": 8},
    "p3dn": {"24xlarge": 8},
    "p4d": {"24xlarge": 8},
    "p4de": {"24xlarge": 8},
    "p5": {"48xlarge": 8},
    "g4dn": {"12xlarge": 4},
    "g5": {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8},
    "g6": {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8},
}


def check(name: str) -> None:
    """Checks a type of host.

    Raises:
        ConfigError: nobody knows it.
    """
    if name in (LOCAL, _LOCAL_CPU, LOCAL_GPU) or _NAME.fullmatch(name):
        return
    near = difflib.get_close_matches(name, _names_near(name), n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "use 'local'."
    raise ConfigError(
        f"instance_type must be 'local' (the CPUs of this machine), 'local_gpu' (its GPUs) or a "
        f"type of the service such as 'ml.p3.16xlarge'; got {name!r}: {hint}"
    )


def _names_near(name: str) -> list[str]:
    """Returns names that may be meant: those known, and the sizes of what looks like a family."""
    family = name.removeprefix("ml.").partition(".")[0]
    known = [f"ml.{each}.{size}" for each, sizes in _GPUS.items() for size in sizes]
    sizes = [f"ml.{family}.{size}" for size in _LARGE]
    others = [] if family in _GPUS else filter(_NAME.fullmatch, sizes)
    return [LOCAL, LOCAL_GPU, *known, *others]


def num_gpus(name: str) -> int | None:
    """Returns the GPUs of a type of host; None where nothing is known of it."""
    if name in (LOCAL, _LOCAL_CPU):
        return 0
    family, _, size = name.removeprefix("ml.").partition(".")
    if family in _GPUS:
        return _GPUS[family].get(size, 1)
    return None
