"""Names with the time in them."""

from __future__ import annotations

import re

from smdistributed.modelparallel.launch import utils


def test_names_end_with_the_time_and_are_short_enough() -> None:
    assert re.fullmatch(r"(\d\d){2}(-\d\d){5}-\d{3}", utils.sagemaker_timestamp())
    assert re.fullmatch(r"\d{6}-\d{4}", utils.sagemaker_short_timestamp())
    for make in (utils.name_from_base, utils.unique_name_from_base):
        assert make("my_base").startswith("my_base-")
        assert len(make("b" * 99)) == 63
    assert len(utils.name_from_base("b", 10, short=True)) <= 12
    image = "host:80/x/pytorch-training:1.12-cpu"
    assert utils.base_name_from_image(image) == "pytorch-training"
    assert utils.base_from_name(utils.name_from_image(image)) == "pytorch-training"
    assert utils.base_from_name(utils.name_from_base("b", short=True)) == "b"
