"""Kinds of memory: what lies where, that they add up, and what is said of them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smdistributed.modelparallel.common.topology import Topology
from smdistributed.modelparallel.torch.device_memory.advice import (
    changes,
    explanation,
    is_out_of_memory,
)
from smdistributed.modelparallel.torch.device_memory.measured import Region, by_kind, on_gpu
from smdistributed.modelparallel.torch.device_memory.report import MemoryReport, text_of

GIB = 2**30


def test_memory_that_several_lie_in_counts_once_for_the_first() -> None:
    found = by_kind(
        [
            ("gradients", 100, 200),
            ("buckets", 150, 400),  # ends behind it
            ("buckets", 50, 120),  # begins before it
            ("optimizer", 0, 1000),  # around all
            ("optimizer", 100, 200),
        ]
    )
    assert found == {
        "gradients": [(100, 200)],
        "buckets": [(200, 400), (50, 100)],
        "optimizer": [(0, 50), (400, 1000)],
    }


def test_kinds_of_a_gpu_are_all_that_is_in_use() -> None:
    known = {"parameters": [(0, 100), (5000, 5300)], "gradients": [(1010, 1030)]}
    regions = [Region(0, 1000, 700, False), Region(1000, 2000, 20, True)]
    kinds = on_gpu(known, regions, in_use=2900)
    assert kinds == {
        "parameters": 400,
        "gradients": 20,
        "other tensors": 600,
        "captured passes": 980,
        "unused": 300,
        "outside PyTorch": 600,
    }
    assert sum(kinds.values()) == 2900


def report_of(**kinds: float) -> MemoryReport:
    sizes = {name.replace("_", " "): round(size * GIB) for name, size in kinds.items()}
    usual = {"parameters": 0, "gradients": 0, "optimizer": 0, "other tensors": 0}
    return MemoryReport(1, "cuda:1", 80 * GIB, usual | sizes, 70 * GIB, {"optimizer": 12 * GIB})


def test_a_report_reads_as_a_table() -> None:
    report = report_of(parameters=3, gradients=3, other_tensors=40.25)
    assert str(report).splitlines() == [
        "memory of rank 1 on cuda:1, 80.0 GiB",
        "  parameters       3.0 GiB",
        "  gradients        3.0 GiB",
        "  optimizer            0 B  12.0 GiB in training",
        "  other tensors   40.2 GiB",
        "  in all          46.2 GiB  58.2 GiB in training, and activations",
        "  at most so far  70.0 GiB",
    ]
    known = dataclasses.replace(report, expected={**report.expected, "activations": 50 * GIB})
    assert str(known).splitlines()[5:7] == [
        "  activations               50.0 GiB in training",
        "  in all          46.2 GiB  108.2 GiB in training",
    ]
    assert [text_of(size) for size in (0, 1023, 1536, 5 * 2**20)] == [
        *("0 B", "1023 B", "1.5 KiB", "5.0 MiB")
    ]


def runtime_of(ranks: int = 8, partitions: int = 2, **given: Any) -> Any:
    usual = {"microbatches": 4, "active_microbatches": 4, "checkpointed_blocks": 0}
    usual |= dict.fromkeys(("bf16", "fp16", "offload_activations", "shard_optimizer_state"), False)
    settings = {**usual, "sharded_data_parallel_degree": 1, **given}
    return SimpleNamespace(
        config=SimpleNamespace(**settings), topology=Topology(ranks, partitions, 1, "cluster")
    )


def advised(report: MemoryReport, runtime: Any) -> list[str]:
    found = sorted(changes(report, runtime), reverse=True)
    return [each.words.partition(":")[0] for each in found if each.num_bytes > 0]


@pytest.mark.parametrize(
    ("kinds", "given", "first"),
    [
        ({"other_tensors": 60.0}, {}, "activation checkpointing"),
        ({"other_tensors": 60.0}, {"checkpointed_blocks": 1, "bf16": True}, "offload_activations"),
        ({"parameters": 30.0, "gradients": 30.0}, {}, "shards"),
        ({"parameters": 30.0}, {"sharded_data_parallel_degree": 4}, "pipeline_parallel_degree"),
        ({"outside_PyTorch": 70.0}, {}, "other processes that use this device"),
        ({"unused": 70.0}, {}, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments"),
    ],
)
def test_the_kind_that_is_large_says_what_to_change(
    kinds: dict[str, float], given: dict[str, Any], first: str
) -> None:
    assert advised(report_of(**kinds), runtime_of(**given))[0] == first


def test_what_passes_will_hold_counts_before_it_is_there() -> None:
    report = dataclasses.replace(report_of(parameters=1), expected={"activations": 60 * GIB})
    assert advised(report, runtime_of())[0] == "activation checkpointing"


def test_an_explanation_names_what_frees_most() -> None:
    text = explanation(report_of(other_tensors=60), runtime_of())
    assert "memory of rank 1 on cuda:1" in text
    assert "checkpointed_blocks: 1" in text
    assert "(about 36.0 GiB)" in text
    assert "expandable" not in text


def test_errors_of_missing_memory_are_told_from_others() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("a memory of better times"))
