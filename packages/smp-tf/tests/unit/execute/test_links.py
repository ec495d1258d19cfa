"""Which tensors go through mailboxes, and what that puts into a graph."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from smdistributed.modelparallel.tensorflow.execute.links import Links
from smdistributed.modelparallel.tensorflow.execute.mailboxes import (
    Mailbox,
    Mailboxes,
    OpenMailbox,
)

NUM_LARGE = 2**19  # of four bytes each


def _links() -> Links:
    """Returns those of rank 0 of three, of which 1 is on the same host."""
    own = Mailbox()
    others = {1: OpenMailbox(own.address("here"))}
    return Links(0, 3, False, Mailboxes(own, frozenset({1}), others))


def _graph(links: Links, shape: list[int | None], peer: int) -> Any:
    """Returns the graph of a function that sends two tensors to a peer, and gets two."""

    def exchange(x: Any) -> list[Any]:
        found = []
        for _ in range(2):
            there, back = links.new_key(x), links.new_key(x)
            links.send(x, peer, there)
            found.append(links.receive(x, peer, back)[0])
        return found

    function = tf.function(exchange, input_signature=[tf.TensorSpec(shape, tf.float32)])
    return function.get_concrete_function().graph


def _kinds(graph: Any) -> list[str]:
    return [each.type for each in graph.get_operations()]


@pytest.mark.parametrize("shape", [[NUM_LARGE], [None], [4, None]])
def test_what_is_large_or_of_unknown_size_is_laid(shape: list[int | None]) -> None:
    graph = _graph(_links(), shape, 1)
    assert _kinds(graph).count("PyFunc") == 4
    # Only a place is sent.
    sent = [each for each in graph.get_operations() if each.type == "CollectiveBcastSendV2"]
    assert [each.inputs[0].dtype for each in sent] == [tf.int64] * 2


@pytest.mark.parametrize(("shape", "peer"), [([NUM_LARGE - 1], 1), ([NUM_LARGE], 2), ([None], 2)])
def test_what_is_small_or_goes_to_another_host_is_not(shape: list[int | None], peer: int) -> None:
    kinds = _kinds(_graph(_links(), shape, peer))
    assert "PyFunc" not in kinds
    assert "CollectiveBcastSendV2" in kinds


def test_transfers_wait_for_no_others() -> None:
    """TensorFlow would have Python run in the order in which a body has it: passes have another."""
    for operation in _graph(_links(), [None], 1).get_operations():
        if operation.type == "PyFunc":
            assert "PyFunc" not in [each.type for each in operation.control_inputs]
