"""What is known of types of hosts: a cloud's type name supplies its number of GPUs, for checks.

Source: estimator interface, section 1 (host type); the public lists of instance types.
"""

from __future__ import annotations

import difflib
import re

from smdistributed.modelparallel.common.errors import ConfigError

LOCAL = "local"
LOCAL_GPU = "local_gpu"
#: A family, such as ``p4d`` or ``trn1n``, and a size of those that there are. The families come and
#: go; their names and the sizes have a form.
_NAME = re.compile(r"ml\.[a-z]+\d+[a-z0-9-]*\.(nano|micro|small|medium|large|metal|\d*xlarge)")
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
    if name in (LOCAL, LOCAL_GPU) or _NAME.fullmatch(name):
        return
    near = difflib.get_close_matches(name, (LOCAL, LOCAL_GPU), n=1)
    hint = f"did you mean {near[0]}?" if near else "use 'local'."
    raise ConfigError(
        f"instance_type must be 'local' (the CPUs of this machine), 'local_gpu' (its GPUs) or a "
        f"type of the service such as 'ml.p3.16xlarge'; got {name!r}: {hint}"
    )


def num_gpus(name: str) -> int | None:
    """Returns the GPUs of a type of host; None where nothing is known of it."""
    if name == LOCAL:
        return 0
    family, _, size = name.removeprefix("ml.").partition(".")
    if family in _GPUS:
        return _GPUS[family].get(size, 1)
    return None
