"""The names of the service's SDK, answered by this package: for notebooks that stay as they are.

``install`` puts a finder before all others, in this process alone; no file is called ``sagemaker``,
and an SDK that is installed is not touched. ``smp-launch run`` and ``%load_ext
smdistributed.modelparallel.launch`` call it.

Source: estimator interface; the public names of the service's SDK.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.launch import (
    analytics,
    debugger,
    deserializers,
    estimator,
    exceptions,
    huggingface,
    image_uris,
    inputs,
    model,
    predictor,
    pytorch,
    s3,
    serializers,
    session,
    tensorflow,
    tracking,
    utils,
)
from smdistributed.modelparallel.launch.exceptions import LaunchError
from smdistributed.modelparallel.launch.tracking import records
from smdistributed.modelparallel.launch.trainer import (
    configs,
    distributed,
    model_trainer,
    resources,
)

__all__ = ["install"]

_ROOT = "sagemaker"
#: A library of its own, from before the SDK had experiments.
_EXPERIMENTS = "smexperiments"


class _Settings:
    """Settings of a service that is not here: they can be made, and have no effect."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self.arguments = arguments
        vars(self).update(settings)


def _refused(name: str, way_out: str) -> type:
    """Returns a class that can be imported, and says what to do where it is used."""

    def refuse(self: object, *_: object, **__: object) -> None:
        raise UnsupportedError(f"{name} is not offered: {way_out}.")

    return type(name.rpartition(".")[2], (), {"__init__": refuse, "__module__": __name__})


def _own(module: ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


_INPUTS = _own(inputs)
_SETTINGS = (
    *("DebuggerHookConfig", "CollectionConfig", "ProfilerConfig", "FrameworkProfile"),
    *("DetailedProfilingConfig", "DataloaderProfilingConfig", "PythonProfilingConfig"),
    *("HorovodProfilingConfig", "SMDataParallelProfilingConfig"),
)
#: Estimators of other frameworks.
_OTHERS = {"mxnet": "MXNet", "chainer": "Chainer", "sklearn": "SKLearn", "xgboost": "XGBoost"}
_SESSION = {name: vars(session)[name] for name in ("Session", "get_execution_role")}
#: Trainers of the service's own models, of version 3.
_RECIPES = ("SFTTrainer", "DPOTrainer", "RLVRTrainer", "RLAIFTrainer", "CPTTrainer")
_TUNING = ("HyperparameterTuner", "IntegerParameter", "ContinuousParameter", "CategoricalParameter")
_FRAMEWORKS = {"pytorch": pytorch, "tensorflow": tensorflow, "huggingface": huggingface}
_RUNS = {name: vars(tracking)[name] for name in ("Experiment", "Run", "list_runs", "load_run")}
#: Module -> its names.
TABLE: dict[str, dict[str, Any]] = {
    _ROOT: {
        "Session": session.Session,
        "LocalSession": session.LocalSession,
        "get_execution_role": session.get_execution_role,
        "TrainingInput": inputs.TrainingInput,
        "s3_input": inputs.s3_input,
        **_own(analytics),
        "Model": model.Model,
        "Predictor": predictor.Predictor,
        "__version__": "2.257.0",
    },
    f"{_ROOT}.session": {**_own(session), **_INPUTS},
    f"{_ROOT}.local": {"LocalSession": session.LocalSession},
    f"{_ROOT}.inputs": _INPUTS,
    f"{_ROOT}.estimator": _own(estimator),
    **{
        f"{_ROOT}.{framework}{inner}": _own(module)
        for framework, module in _FRAMEWORKS.items()
        for inner in ("", ".estimator", ".model")
    },
    f"{_ROOT}.s3": _own(s3),
    f"{_ROOT}.model": _own(model),
    f"{_ROOT}.predictor": {
        **_own(predictor),
        # Where the SDK had them first.
        **_own(serializers),
        **_own(deserializers),
    },
    f"{_ROOT}.serializers": _own(serializers),
    f"{_ROOT}.deserializers": _own(deserializers),
    f"{_ROOT}.analytics": _own(analytics),
    f"{_ROOT}.experiments": _RUNS,
    f"{_ROOT}.experiments.run": _RUNS,
    f"{_ROOT}.experiments.experiment": {"Experiment": tracking.Experiment},
    _EXPERIMENTS: {},
    f"{_EXPERIMENTS}.experiment": {"Experiment": tracking.Experiment},
    f"{_EXPERIMENTS}.trial": {"Trial": tracking.Trial},
    f"{_EXPERIMENTS}.trial_component": {"TrialComponent": tracking.TrialComponent},
    f"{_EXPERIMENTS}.tracker": {"Tracker": tracking.Tracker},
    f"{_EXPERIMENTS}.api_types": {"TrialComponentArtifact": records.TrialComponentArtifact},
    f"{_ROOT}.exceptions": {
        "UnexpectedStatusException": exceptions.UnexpectedStatusException,
    },
    f"{_ROOT}.utils": _own(utils),
    f"{_ROOT}.debugger": {
        **{name: type(name, (_Settings,), {}) for name in _SETTINGS},
        **_own(debugger),
    },
    f"{_ROOT}.image_uris": _own(image_uris),
    # Version 3.
    f"{_ROOT}.train": {
        **_SESSION,
        "ModelTrainer": model_trainer.ModelTrainer,
        **{name: _refused(f"{_ROOT}.train.{name}", "use ModelTrainer") for name in _RECIPES},
    },
    f"{_ROOT}.train.model_trainer": _own(model_trainer),
    f"{_ROOT}.train.configs": _own(configs),
    f"{_ROOT}.train.distributed": _own(distributed),
    f"{_ROOT}.core": {},
    f"{_ROOT}.core.helper": {},
    f"{_ROOT}.core.helper.session_helper": _SESSION,
    f"{_ROOT}.core.image_uris": _own(image_uris),
    f"{_ROOT}.core.resources": {"TrainingJob": resources.TrainingJob},
    f"{_ROOT}.core.training": {},
    f"{_ROOT}.core.training.configs": _own(configs),
    f"{_ROOT}.core.utils": {},
    f"{_ROOT}.core.utils.exceptions": {
        "FailedStatusError": resources.FailedStatusError,
        "TimeoutExceededError": resources.TimeoutExceededError,
    },
    f"{_ROOT}.tuner": {
        name: _refused(f"{_ROOT}.tuner.{name}", "call fit in a loop") for name in _TUNING
    },
    **{
        f"{_ROOT}.{module}": {
            name: _refused(f"{_ROOT}.{module}.{name}", "use PyTorch, whatever its script imports")
        }
        for module, name in _OTHERS.items()
    },
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for the modules of the table."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in TABLE:
            is_package = any(other.startswith(f"{name}.") for other in TABLE)
            return importlib.machinery.ModuleSpec(name, self, is_package=is_package)
        root = name.partition(".")[0]
        if root in (_ROOT, _EXPERIMENTS):
            known = sorted(each for each in TABLE if each.partition(".")[0] == root)
            raise ModuleNotFoundError(
                f"smp-launch has no {name}; it has {', '.join(known)}: leave out what needs it, "
                "or run this on the service.",
                name=name,
            )
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(TABLE[module.__name__])
        # As with the SDK, "import sagemaker" is enough for sagemaker.pytorch.PyTorch.
        if module.__name__ == _ROOT:
            for name in TABLE:
                if name.startswith(f"{_ROOT}."):
                    importlib.import_module(name)


def install() -> None:
    """Lets ``import sagemaker`` mean this package, in this process; says so in one line.

    Raises:
        LaunchError: another ``sagemaker`` is imported already.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if _ROOT in sys.modules:
        raise LaunchError(
            f"{_ROOT} is imported already, from {getattr(sys.modules[_ROOT], '__file__', None)}: "
            "start a new process, and do this first."
        )
    sys.meta_path.insert(0, _Finder())
    print(f"smp-launch: {_ROOT} names this machine in this process", file=sys.stderr)
