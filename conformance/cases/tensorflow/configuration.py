"""TensorFlow: parameters of its own, and those that it does not have."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest

from conformance.adapters import adapter_of
from conformance.adapters.base import Adapter
from conformance.cases.common.configuration import NEW, refused
from conformance.cases.common.starting import quickly
from conformance.registry import Body, Case, add, tensorflow_case
from smdistributed.modelparallel.common.testing import run_ranks

#: By row: what a configuration would need to break the rule. None of it exists with TensorFlow.
_OF_PYTORCH: dict[str, dict[str, object]] = {
    "config.C04a": {"ddp": True},
    "config.C08": {"active_microbatches": 2},
    "config.C08b": {"prescaled_batch": True},
    "config.C09": {"offload_activations": True},
    "config.C10": {"activation_loading_horizon": 2},
    "config.C11": {"sharded_data_parallel_degree": 2},
    "config.C12": {"sdp_max_live_parameters": 5},
    "config.C13": {"fp16": True, "bf16": True},
    "config.C14": {"shard_optimizer_state": True},
    "config.C15": {"memory_weight": 0.5},
}


def _is_of_pytorch(parameters: dict[str, object]) -> Body:
    def body(adapter: Adapter) -> None:
        refused(adapter, *parameters, "PyTorch", **parameters)

    return body


for _row, _parameters in _OF_PYTORCH.items():
    _name = f"tensorflow_has_no_{'_'.join(_parameters)}"
    _rows = (_row, "config.errors")
    add(Case(_name, _rows, NEW, ("tensorflow",), _is_of_pytorch(_parameters)))


@tensorflow_case("config.C03", "config.C20", "config.errors", worlds=NEW)
def tensors_are_not_split(adapter: Adapter) -> None:
    refused(adapter, "tensor_parallel_degree", "2", tensor_parallel_degree=2)


@tensorflow_case("config.C16", "config.placement_strategy", worlds=NEW)
def placements_by_letters_are_refused(adapter: Adapter) -> None:
    for word in ("DPT", "TPD", "PD"):
        refused(adapter, "placement_strategy", word, "cluster", "spread", placement_strategy=word)


@tensorflow_case("config.horovod", worlds=NEW)
def horovod_that_is_not_installed_is_asked_for(adapter: Adapter) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "horovod"]:
        del sys.modules[name]
    sys.modules["horovod"] = None  # type: ignore[assignment]
    with pytest.raises(Exception, match=r"(?i)horovod.*install|install.*horovod"):
        adapter.smp.init({"pipeline_parallel_degree": 1, "horovod": True})


def warned_without_horovod() -> tuple[int, list[str]]:
    """Starts two replicas without Horovod; returns their number, and the warnings."""
    smp = adapter_of("tensorflow").smp
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        smp.init({"pipeline_parallel_degree": 1, "microbatches": 2})
    return smp.dp_size(), [str(each.message) for each in caught]


@tensorflow_case("config.C04b", "config.horovod", worlds=NEW, starts_jobs=True)
def replicas_without_horovod_are_warned_of(adapter: Adapter) -> None:
    for size, told in run_ranks(2, warned_without_horovod, **quickly(adapter)).results:
        assert size == 2
        assert any("horovod" in each for each in told), told


@tensorflow_case("smp.init", "smp.DistributedModel", "smp.partition", worlds=NEW)
def names_of_this_framework_need_init(adapter: Any) -> None:
    smp = adapter.smp
    with pytest.raises(RuntimeError, match=r"smp\.init"):
        adapter.model()
    with pytest.raises(RuntimeError, match=r"smp\.init"), smp.partition(0):
        pass
    with pytest.raises(RuntimeError, match=r"smp\.init"):
        smp.register_post_partition_hook(lambda: None)
    with pytest.raises(RuntimeError, match=r"smp\.init"):
        smp.step(lambda x: x)(adapter.tensor(adapter.batch(4)))
