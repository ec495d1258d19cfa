"""The order of a script that has chosen none, for models and devices that were measured."""

from __future__ import annotations

import pytest

from smdistributed.modelparallel.common.planning.pass_costs import PassCosts
from smdistributed.modelparallel.torch.planning.usual_order import usual_order

#: Two sequences of a microbatch: what both passes take an H200 in one second's products, and the
#: kernels of the forward pass.
_GPT2_XL, _LLAMA, _GPT2 = (0.076, 1200), (0.09, 1000), (0.002, 300)


@pytest.mark.parametrize(
    ("model", "order"), [(_GPT2_XL, "auto"), (_LLAMA, "auto"), (_GPT2, "interleaved")]
)
@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_who_waits_decides(model: tuple[float, int], order: str, device: str) -> None:
    seconds, kernels = model
    both = 742e12 * seconds
    assert usual_order(PassCosts(both / 3, both * 2 / 3), kernels, 2, device) == order


def test_more_partitions_leave_each_device_less_to_do() -> None:
    seconds, kernels = _GPT2_XL
    costs = PassCosts(742e12 * seconds)
    orders = [usual_order(costs, kernels, each, "NVIDIA H200") for each in (2, 4, 16)]
    assert orders == ["auto", "auto", "interleaved"]


def test_devices_without_figures_have_an_order() -> None:
    assert usual_order(PassCosts(1e15), 10, 2, "Some GPU 9000") == "auto"
    assert usual_order(PassCosts(1e9), 1000, 2, "Some GPU 9000") == "interleaved"
