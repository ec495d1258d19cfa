"""Parameters: their defaults, what they accept, and what they refuse.

Every case starts the library anew, in a process of its own.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from conformance.adapters.base import Adapter
from conformance.cases.common.starting import quickly
from conformance.registry import Body, Case, add, case, torch_case
from conformance.worlds import FRAMEWORKS

NEW = ("new",)
#: Asks for something, so that a configuration is not taken for an oversight.
_PLAIN: dict[str, object] = {"pipeline_parallel_degree": 1}


def start(adapter: Adapter, **parameters: Any) -> Any:
    """Starts the library; returns the configuration in force."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter.smp.init({**_PLAIN, **parameters})
    return adapter.config


def refused(adapter: Adapter, *words: str, **parameters: Any) -> None:
    """Asserts that parameters are refused by an error that has these words."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words follow
        adapter.smp.init({**_PLAIN, **parameters})
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"


_BOTH = FRAMEWORKS
_TORCH = ("torch",)
_TENSORFLOW = ("tensorflow",)

#: name -> frameworks, default, other good values, bad values.
_TABLE: dict[str, tuple[tuple[str, ...], object, list[object], list[object]]] = {
    "microbatches": (_BOTH, 1, [2, 8, 4.0], [0, -1, 1.5, True, "two"]),
    "pipeline": (_BOTH, "interleaved", ["simple"], ["Simple", "gpipe", 1]),
    "optimize": (_BOTH, "memory", ["speed"], ["size", True]),
    "auto_partition": (_BOTH, True, [True], ["yes", 1, 0.0]),
    "default_partition": (_BOTH, 0, [0], [1, -1, True]),
    "contiguous": (_TENSORFLOW, True, [False], ["no", 0]),
    "horovod": (_TENSORFLOW, False, [False], ["no", 1]),
    "memory_weight": (_TORCH, 0.8, [0.0, 1.0, 0.3, 1], [-0.1, 1.1, "half"]),
    "ddp": (_TORCH, False, [True], ["yes", 1]),
    "active_microbatches": (_TORCH, 3, [1, 100], [0, 1.5, False]),
    "deterministic_server": (_TORCH, False, [True], ["yes", 1]),
    "offload_activations": (_TORCH, False, [True], ["yes", 1]),
    "activation_loading_horizon": (_TORCH, 4, [1, 9], [0, -2, True]),
    "tensor_parallel_degree": (_TORCH, 1, [1], [0, "two"]),
    "fp16": (_TORCH, False, [], ["yes", 1]),
    "fp16_params": (_TORCH, False, [], ["yes", 1]),
    "bf16": (_TORCH, False, [], ["yes", 1]),
    "shard_optimizer_state": (_TORCH, False, [], ["yes", 1]),
    "prescaled_batch": (_TORCH, False, [True], ["yes", 1]),
    "skip_tracing": (_TORCH, False, [True], ["yes", 1]),
    "sharded_data_parallel_degree": (_TORCH, 1, [1], [0, True]),
    "sdp_reduce_bucket_size": (_TORCH, 500_000_000, [1, 5e8], [0, "big"]),
    "sdp_param_persistence_threshold": (_TORCH, 1_000_000, [0, 5], [-1, "big"]),
    "sdp_max_live_parameters": (_TORCH, 1_000_000_000, [1], [0, "big"]),
    "sdp_hierarchical_allgather": (_TORCH, True, [False], ["yes", 1]),
    "sdp_gradient_clipping": (_TORCH, 1.0, [0.5, 7, float("inf")], [0.0, -1.0, "one"]),
    "ddp_dist_backend": (_TORCH, "auto", ["nccl", "gloo"], ["mpi", 1]),
    "placement_strategy": (_BOTH, "cluster", ["spread"], ["Cluster", "DDP", "DP", 3]),
}


def _default(name: str, default: object) -> Body:
    def body(adapter: Adapter) -> None:
        value = getattr(start(adapter), name)
        assert value == default
        assert type(value) is type(default)

    return body


def _accepted(name: str, value: object) -> Body:
    def body(adapter: Adapter) -> None:
        assert getattr(start(adapter, **{name: value}), name) == value

    return body


def _refused(name: str, value: object) -> Body:
    def body(adapter: Adapter) -> None:
        refused(adapter, name, str(value), **{name: value})

    return body


for _name, (_frameworks, _value, _good, _bad) in _TABLE.items():
    _rows = (f"config.{_name}",)
    add(Case(f"{_name}_default", _rows, NEW, _frameworks, _default(_name, _value)))
    for _each in _good:
        add(Case(f"{_name}_takes_{_each}", _rows, NEW, _frameworks, _accepted(_name, _each)))
    for _each in _bad:
        _title = f"{_name}_refuses_{type(_each).__name__}_{_each}"
        add(Case(_title, (*_rows, "config.errors"), NEW, _frameworks, _refused(_name, _each)))


@case("config.pipeline_parallel_degree", worlds=NEW)
def degrees_default_to_one(adapter: Adapter) -> None:
    adapter.smp.init({})
    assert adapter.config.pipeline_parallel_degree == 1


@case("config.pipeline_parallel_degree", worlds=NEW)
def a_configuration_that_asks_for_nothing_is_refused(adapter: Adapter) -> None:
    with pytest.raises(ValueError, match="pipeline_parallel_degree"):
        adapter.smp.init({"microbatches": 2})


@case("config.pipeline_parallel_degree", worlds=NEW)
def pipeline_parallel_degree_is_a_positive_integer(adapter: Adapter) -> None:
    for value in (0, -1, 1.5, True, "two"):
        refused(adapter, "pipeline_parallel_degree", pipeline_parallel_degree=value)


@case("config.C01", "config.pipeline_parallel_degree", worlds=NEW)
def partitions_is_another_name(adapter: Adapter) -> None:
    adapter.smp.init({"partitions": 1})
    assert adapter.config.pipeline_parallel_degree == 1


@case("config.C01", worlds=NEW)
def two_values_of_one_degree_are_refused(adapter: Adapter) -> None:
    refused(adapter, "partitions", "pipeline_parallel_degree", "2", partitions=2)


@case("config.C01", worlds=NEW)
def the_launch_s_name_of_a_degree_wins(adapter: Adapter) -> None:
    import os

    os.environ["SM_HP_MP_PARAMETERS"] = '{"partitions": 1}'
    adapter.smp.init({"pipeline_parallel_degree": 4})
    assert adapter.smp.pp_size() == 1


@case("config.C02", worlds=NEW)
def the_processes_must_divide_into_pipelines(adapter: Adapter) -> None:
    refused(adapter, "pipeline_parallel_degree", "3", pipeline_parallel_degree=3)


@torch_case("config.C03", worlds=NEW)
def tensor_parallelism_needs_ddp(adapter: Adapter) -> None:
    refused(adapter, "tensor_parallel_degree", "ddp", tensor_parallel_degree=2)


def replicas_without_ddp(framework: str) -> None:
    """Two replicas, and nothing to reduce their gradients."""
    from conformance.adapters import adapter_of

    adapter_of(framework).smp.init({"pipeline_parallel_degree": 1, "microbatches": 2})


@torch_case("config.C04a", "config.ddp", worlds=NEW, starts_jobs=True)
def replicas_need_ddp(adapter: Adapter) -> None:
    from smdistributed.modelparallel.common.testing import RanksFailedError, run_ranks

    with pytest.raises(RanksFailedError, match=r"2 replicas of the model, which needs ddp"):
        run_ranks(2, replicas_without_ddp, args=[adapter.name], **quickly(adapter))


@case("config.C05", "config.auto_partition", "config.default_partition", worlds=NEW)
def manual_partitions_need_a_default(adapter: Adapter) -> None:
    refused(adapter, "auto_partition", "default_partition", auto_partition=False)
    refused(adapter, "default_partition", "1", auto_partition=False, default_partition=1)


@torch_case("config.C11", worlds=NEW)
def sharding_needs_ddp(adapter: Adapter) -> None:
    refused(adapter, "sharded_data_parallel_degree", "ddp", sharded_data_parallel_degree=2)


@torch_case("config.C12", worlds=NEW)
def parameters_of_sharding_warn_without_it(adapter: Adapter) -> None:
    with pytest.warns(UserWarning, match="sdp_max_live_parameters"):
        adapter.smp.init({**_PLAIN, "sdp_max_live_parameters": 5})


@torch_case("config.C10", worlds=NEW)
def the_horizon_warns_without_offloading(adapter: Adapter) -> None:
    with pytest.warns(UserWarning, match="activation_loading_horizon"):
        adapter.smp.init({**_PLAIN, "activation_loading_horizon": 7})


@torch_case("config.C13", worlds=NEW)
def two_half_precisions_are_refused(adapter: Adapter) -> None:
    refused(adapter, "fp16", "bf16", fp16=True, bf16=True)


@torch_case("config.C14", worlds=NEW)
def sharded_state_needs_ddp(adapter: Adapter) -> None:
    refused(adapter, "shard_optimizer_state", "ddp", shard_optimizer_state=True)


@torch_case("config.C15", "config.memory_weight", worlds=NEW)
def memory_weight_follows_optimize(adapter: Adapter) -> None:
    assert start(adapter, optimize="speed").memory_weight == 0.2


@torch_case("config.C16", "config.placement_strategy", worlds=NEW)
def every_order_of_the_letters_is_a_placement(adapter: Adapter) -> None:
    from smdistributed.modelparallel.common.config import load

    for word in ("DPT", "DTP", "PDT", "PTD", "TDP", "TPD"):
        assert load("pytorch", {**_PLAIN, "placement_strategy": word}).placement_strategy == word
    for word in ("dpt", "DDT", "DP", "DPTD"):
        refused(adapter, "placement_strategy", word, placement_strategy=word)


@torch_case("config.active_microbatches", "config.C08", worlds=NEW)
def active_microbatches_follow_the_degree(adapter: Adapter) -> None:
    from smdistributed.modelparallel.common.config import load

    assert load("pytorch", {"pipeline_parallel_degree": 4}).active_microbatches == 6


@case("config.errors", worlds=NEW)
def one_error_lists_all_problems(adapter: Adapter) -> None:
    refused(adapter, "microbatches", "pipeline", "gpipe", microbatches=0, pipeline="gpipe")


@case("config.errors", worlds=NEW)
def unknown_names_are_refused_with_near_ones(adapter: Adapter) -> None:
    refused(adapter, "microbatch", "microbatches", microbatch=2)


@torch_case("config.errors", worlds=NEW)
def names_of_the_other_framework_say_so(adapter: Adapter) -> None:
    refused(adapter, "horovod", "TensorFlow", horovod=True)
    refused(adapter, "contiguous", "TensorFlow", contiguous=False)


@case("config.errors", worlds=NEW)
def none_means_not_set(adapter: Adapter) -> None:
    assert start(adapter, microbatches=None, pipeline=None).pipeline == "interleaved"


@case("compat.undocumented_parameters", worlds=NEW)
def parameters_that_scripts_use_are_accepted(adapter: Adapter) -> None:
    start(
        adapter,
        static_mode=True,
        fast_mode=False,
        checkpoint_attentions=False,
        delayed_parameter_initialization=True,
        _match_weights=True,
        _fp32_grad_accumulation=False,
        _prescaled_batch=False,
    )
    assert adapter.smp.is_initialized()


@case("compat.command_line_form", worlds=NEW)
def the_comma_form_of_a_command_line_is_read(adapter: Adapter) -> None:
    import os

    os.environ["SM_HP_MP_PARAMETERS"] = "partitions=1,microbatches=5,pipeline=simple"
    adapter.smp.init()
    cfg = adapter.config
    assert (cfg.microbatches, cfg.pipeline) == (5, "simple")
