"""A job as a manifest for Kubernetes: a ``TrainJob`` of Kubeflow's trainer, which torchrun starts.

Rendered and checked, not submitted: what reaches a cluster, and who may, is the user's.

Source: the API of Kubeflow's trainer, trainer.kubeflow.org/v1alpha1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from smdistributed.modelparallel.common.config.source import LAUNCH_VARIABLE
from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError
from smdistributed.modelparallel.common.launcher import framework, settings

_GROUP = "trainer.kubeflow.org"
_GPU = "nvidia.com/gpu"
#: The container and the job of the trainer's own runtimes that train.
_NODE = "node"
#: Names become parts of host names; those of pods are longer by some 20 characters.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A job, and what it runs on.

    Attributes:
        program: a script of the image, or ``-m`` and a module, and its arguments.
        image: with Python, PyTorch and this library.
        name: of the job; empty for one after the script.
        nodes: how many pods.
        processes: of each.
        gpus: of each; None for one a process.
        runtime: of the cluster, which says how pods are started.
        parameters: of the library.
        environ: further variables.
        volumes: claim of a volume -> where it is mounted.
    """

    program: tuple[str, ...]
    image: str
    name: str = ""
    nodes: int = 1
    processes: int = 1
    gpus: int | None = None
    runtime: str = "torch-distributed"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    volumes: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Returns the manifest.

        Raises:
            ConfigError: a name or a number is wrong, or no job can run with the parameters.
            UnsupportedError: the script needs MPI.
        """
        self._check()
        variables = dict(self.environ)
        if self.parameters:
            variables[LAUNCH_VARIABLE] = json.dumps(dict(self.parameters))
        trainer: dict[str, Any] = {
            "image": self.image,
            "command": ["torchrun"],
            "args": list(self.program),
            "numNodes": self.nodes,
            "numProcPerNode": self.processes,
        }
        if variables:
            trainer["env"] = [{"name": name, "value": text} for name, text in variables.items()]
        gpus = self.processes if self.gpus is None else self.gpus
        if gpus:
            trainer["resourcesPerNode"] = {"limits": {_GPU: str(gpus)}}
        runtime = {"apiGroup": _GROUP, "kind": "ClusterTrainingRuntime", "name": self.runtime}
        spec: dict[str, Any] = {"runtimeRef": runtime, "trainer": trainer}
        if self.volumes:
            spec["runtimePatches"] = [self._volumes()]
        return {
            "apiVersion": f"{_GROUP}/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": self._own_name()},
            "spec": spec,
        }

    def text(self) -> str:
        """Returns the manifest as YAML; see ``document``."""
        return str(yaml.safe_dump(self.document(), sort_keys=False))

    def _own_name(self) -> str:
        word = self.program[1] if self.program[0] == "-m" else Path(self.program[0]).stem
        return self.name or re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-")

    def _volumes(self) -> dict[str, Any]:
        """Returns what adds volumes to the pods that train."""
        names = {claim: f"volume-{number}" for number, claim in enumerate(self.volumes)}
        mounts = [{"name": names[claim], "mountPath": at} for claim, at in self.volumes.items()]
        pod = {
            "volumes": [
                {"name": name, "persistentVolumeClaim": {"claimName": claim}}
                for claim, name in names.items()
            ],
            "containers": [{"name": _NODE, "volumeMounts": mounts}],
        }
        job = {"name": _NODE, "template": {"spec": {"template": {"spec": pod}}}}
        patch = {"template": {"spec": {"replicatedJobs": [job]}}}
        return {"manager": "smp-launch", "trainingRuntimeSpec": patch}

    def _check(self) -> None:
        if not _NAME.fullmatch(self._own_name()):
            raise ConfigError(
                "--name must be 1 to 40 small letters, digits and '-', from a letter to a letter "
                f"or digit; got {self._own_name()!r}: choose one."
            )
        for option, number, least in (
            ("--nodes", self.nodes, 1),
            ("--processes", self.processes, 1),
            ("--gpus", self.processes if self.gpus is None else self.gpus, 0),
        ):
            if number < least:
                raise ConfigError(f"{option} must be at least {least}; got {number}.")
        if self.gpus and self.gpus < self.processes:
            raise ConfigError(
                f"--gpus must be 0 or as many as --processes, since each process takes one; got "
                f"{self.gpus} and {self.processes}: leave --gpus out."
            )
        for name in self.environ:
            if not _VARIABLE.fullmatch(name) or name == LAUNCH_VARIABLE:
                raise ConfigError(
                    f"--env takes NAME=VALUE of a variable of your own; got {name!r}: parameters "
                    "of the library go to --set."
                )
        for place in self.volumes.values():
            if not place.startswith("/"):
                raise ConfigError(f"--volume takes CLAIM:/PLACE; got the place {place!r}.")
        if framework.of_own_import(self.program) == "tensorflow":
            raise UnsupportedError(
                "a script of TensorFlow needs MPI, which this manifest does not start: run it by "
                "smprun on hosts of yours, or under Slurm."
            )
        variables = {LAUNCH_VARIABLE: json.dumps(dict(self.parameters))} if self.parameters else {}
        settings.check("pytorch", variables, self.nodes * self.processes, self.processes)


def pairs(texts: Sequence[str], between: str, option: str) -> dict[str, str]:
    """Reads ``NAME=VALUE`` and its like.

    Raises:
        ConfigError: a text has no such sign, or a name comes twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.partition(between)
        if not (name and sign) or name in found:
            raise ConfigError(f"{option} takes A{between}B, each A once; got {text!r}: correct it.")
        found[name] = value
    return found
