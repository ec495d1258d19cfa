"""The arguments of the estimators: what each one does here.

One table makes the check of what is given and the page of the documentation. An argument is *used*;
or *noted*, that is accepted without effect, which one line says; or *refused* with the way out.

Source: estimator interface, sections 1 and 9; the public signatures of the estimators.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from smdistributed.modelparallel.common.config import ConfigWarning
from smdistributed.modelparallel.common.config.schema import describe, unknown_key
from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError

Effect = Literal["used", "noted", "refused"]
_FRAMEWORKS = ("PyTorch", "TensorFlow", "HuggingFace")


@dataclass(frozen=True)
class Argument:
    """An argument.

    Attributes:
        name: its present name.
        effect: what becomes of it.
        meaning: what it does here; for a refused one, the way out.
        old: former names, which are taken too.
        of: the estimators that have it.
        default: in force where it is left out.
    """

    name: str
    effect: Effect
    meaning: str
    old: tuple[str, ...] = ()
    of: tuple[str, ...] = ("Estimator", *_FRAMEWORKS)
    default: Any = None


def _noted(names: str, meaning: str, of: tuple[str, ...] = ("Estimator", *_FRAMEWORKS)) -> Any:
    return [Argument(name, "noted", meaning, of=of) for name in names.split()]


#: In the order of the documentation.
TABLE: tuple[Argument, ...] = (
    Argument("entry_point", "used", "The script, inside `source_dir` if that is given."),
    Argument("source_dir", "used", "Folder with the script and what it imports; or the address of "
             "an archive of it."),
    Argument("dependencies", "used", "Further folders and files, placed beside the script.",
             default=()),
    Argument("hyperparameters", "used", "Arguments of the script, by name."),
    Argument("distribution", "used", "What starts the processes, how many, and the parameters of "
             "model parallelism.",
             old=("distributions",), of=_FRAMEWORKS),
    Argument("instance_count", "used", "Number of hosts. Here they are parts of this machine.",
             old=("train_instance_count",), default=1),
    Argument("instance_type", "used", "`local`, `local_gpu`, or a type of the service, whose "
             "number of GPUs bounds the processes of a host.", old=("train_instance_type",),
             default="local"),
    Argument("role", "used", "Kept with the job; nothing is done with it.", default="local"),
    Argument("framework_version", "used", "Compared with what is installed: a difference is a "
             "remark in the log.", of=("PyTorch", "TensorFlow")),
    Argument("py_version", "used", "Compared with this Python: a difference is a remark in the "
             "log.",
             of=_FRAMEWORKS),
    Argument("transformers_version", "used", "As `framework_version`, of Transformers.",
             of=("HuggingFace",)),
    Argument("pytorch_version", "used", "As `framework_version`, of PyTorch.", of=("HuggingFace",)),
    Argument("tensorflow_version", "used", "As `framework_version`, of TensorFlow.",
             of=("HuggingFace",)),
    Argument("image_uri", "used", "An image of a framework stands for this Python environment. "
             "Others need a container, which is not offered yet.", old=("image_name",)),
    Argument("base_job_name", "used", "What names of jobs begin with."),
    Argument("output_path", "used", "Where results go: a folder or an address. Default: the folder "
             "of the jobs."),
    Argument("code_location", "used", "Where the archive of the code goes: a folder or an address. "
             "Default: the session's bucket; the folder of the job where an object store of your "
             "own is configured."),
    Argument("model_dir", "used", "Handed to the script as `--model_dir`; False for none. Default: "
             "`/opt/ml/model`, which is the job's own.", of=("TensorFlow",)),
    Argument("max_run", "used", "Seconds after which training is ended.", old=("train_max_run",),
             default=86400),
    Argument("input_mode", "used", "`File`, `FastFile` or `Pipe`, for channels that do not say "
             "themselves.",
             default="File"),
    Argument("environment", "used", "Environment variables of the script."),
    Argument("metric_definitions", "used", "Numbers to read from the log, by regular expressions."),
    Argument("checkpoint_s3_uri", "used", "Where checkpoints are kept: restored before the script "
             "starts, copied while it runs."),
    Argument("checkpoint_local_path", "used", "The folder of checkpoints.",
             default="/opt/ml/checkpoints"),
    Argument("tensorboard_output_config", "used", "Where what TensorBoard reads is "
             "kept while the job runs: at `<s3_output_path>/<job>/tensorboard-output`."),
    Argument("container_log_level", "used", "`SM_LOG_LEVEL` of the script.", default=20),
    Argument("sagemaker_session", "used", "A `Session` of this package, which says where jobs are; "
             "any other object is ignored."),
    Argument("tags", "used", "Kept with the job."),
    Argument("use_spot_instances", "used", "A job that loses a process or a host goes on from its "
             "checkpoints, up to 30 times; with `mpi`, on the hosts that are left.",
             old=("train_use_spot_instances",), default=False),
    Argument("max_wait", "used", "Kept with the job.", old=("train_max_wait",)),
    Argument("max_retry_attempts", "used", "The same, so often."),
    Argument("script_mode", "used", "True, the only mode. False is an error.", of=("TensorFlow",)),
    *_noted("volume_size train_volume_size", "Disks are those of this machine."),
    *_noted("output_kms_key volume_kms_key train_volume_kms_key", "Nothing is encrypted here."),
    *_noted("subnets security_group_ids encrypt_inter_container_traffic enable_network_isolation",
            "Networks are those of this machine."),
    Argument("rules", "used", "Kept with the job, and not evaluated: its description says that "
             "each is stopped."),
    Argument("git_config", "used", "A repository, which is cloned by `git` when a job starts: "
             "`repo`, `branch`, `commit`, and `username` with `password`, or `token`. The script, "
             "`source_dir` and `dependencies` are in it."),
    *_noted("debugger_hook_config disable_profiler profiler_config",
            "There is no debugger or profiler of the service."),
    *_noted("keep_alive_period_in_seconds", "There is nothing to keep."),
    *_noted("training_repository_access_mode training_repository_credentials_provider_arn",
            "Images are not fetched."),
    *_noted("enable_sagemaker_metrics enable_infra_check enable_remote_debug "
            "enable_session_tag_chaining training_plan instance_placement_config "
            "enable_cloudwatch_metrics", "A feature of the service."),
    *_noted("disable_output_compression", "Results are archives."),
    *_noted("compiler_config", "The compiler of the service is not used.", of=_FRAMEWORKS),
    Argument("instance_groups", "refused", "use instance_count and instance_type: all hosts are of "
             "one kind"),
    Argument("model_uri", "refused", "give the model as a channel of fit"),
    Argument("model_channel_name", "refused", "give the model as a channel of fit"),
    Argument("container_entry_point", "refused", "use entry_point"),
    Argument("container_arguments", "refused", "use hyperparameters"),
    Argument("training_recipe", "refused", "use entry_point", of=("PyTorch",)),
    Argument("recipe_overrides", "refused", "use entry_point", of=("PyTorch",)),
    Argument("checkpoint_path", "refused", "use model_dir: Legacy Mode is not offered"),
    Argument("training_steps", "refused", "use hyperparameters: Legacy Mode is not offered"),
    Argument("evaluation_steps", "refused", "use hyperparameters: Legacy Mode is not offered"),
    Argument("requirements_file", "refused", "name the file requirements.txt, in source_dir: "
             "Legacy Mode is not offered"),
)  # fmt: skip


def arguments_of(estimator: str) -> dict[str, Argument]:
    """Returns the arguments of an estimator, by their present names."""
    return {argument.name: argument for argument in TABLE if estimator in argument.of}


def settle(estimator: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the value of each used argument of an estimator; says in one line what has no effect.

    Raises:
        ConfigError: a name is unknown, or an old and a new name disagree; lists every problem.
        UnsupportedError: an argument asks for what is not offered.
    """
    known = arguments_of(estimator)
    present = {old: name for name, argument in known.items() for old in argument.old}
    problems, noted = [], []
    settled: dict[str, Any] = {}
    for spelled, value in given.items():
        name = present.get(spelled, spelled)
        if name not in known:
            problems.append(f"{estimator}: {unknown_key(spelled, [*known, *present])}")
        elif value is None or (value is False and known[name].effect != "used"):
            continue
        elif known[name].effect == "refused":
            raise UnsupportedError(f"{estimator}: {spelled} is not offered: {known[name].meaning}.")
        elif known[name].effect == "noted":
            noted.append(spelled)
        elif name in settled and settled[name] != value:
            problems.append(
                f"{estimator}: {name} and {' or '.join(known[name].old)} are one argument; got "
                f"{describe(settled[name])} and {describe(value)}: keep {name}."
            )
        else:
            settled[name] = value
    if problems:
        raise ConfigError("\n".join(problems))
    if noted:
        warnings.warn(f"no effect here: {', '.join(sorted(noted))}.", ConfigWarning, stacklevel=4)
    used = (argument for argument in known.values() if argument.effect == "used")
    return {argument.name: settled.get(argument.name, argument.default) for argument in used}


def page() -> str:
    """Returns the table of the documentation, in Markdown."""
    lines = ["| argument | former names | estimators | here | |", "| --- | --- | --- | --- | --- |"]
    for argument in TABLE:
        names = ", ".join(f"`{old}`" for old in argument.old)
        of = "all" if len(argument.of) > len(_FRAMEWORKS) else ", ".join(argument.of)
        about = argument.meaning
        if argument.effect == "refused":
            about = f"{about[0].upper()}{about[1:]}."
        elif argument.default not in (None, (), False):
            about += f" Default: `{argument.default}`."
        lines.append(f"| `{argument.name}` | {names} | {of} | {argument.effect} | {about} |")
    return "\n".join(lines) + "\n"
