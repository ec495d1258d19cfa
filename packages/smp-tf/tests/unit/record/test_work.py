"""What operations compute is counted by their types and shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from smdistributed.modelparallel.tensorflow.record.work import (
    Work,
    values_of_variables,
    work_of,
)

B, H, W, C, D = 3, 8, 6, 4, 5
IMAGE = (B, H, W, C)


def counted(call: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = "float32") -> Work:
    specs = [tf.TensorSpec(shape, dtype) for shape in shapes]
    graph = tf.function(call, autograph=False).get_concrete_function(*specs).graph
    ops = graph.get_operations()
    weights = values_of_variables(ops)
    return sum((work_of(graph, op, weights) for op in ops), Work())


PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int]] = {
    "matrix": (tf.matmul, ((B, C), (C, D)), B * C * D),
    "transposed": (lambda a, b: tf.matmul(a, b, transpose_a=True), ((C, B), (C, D)), B * C * D),
    "batch": (
        lambda a, b: tf.matmul(a, b, transpose_b=True),
        ((B, H, C), (B, D, C)),
        B * H * C * D,
    ),
    "letters": (
        lambda a, b: tf.einsum("bhc,cdw->bhdw", a, b),
        ((B, H, C), (C, D, W)),
        B * H * C * D * W,
    ),
    "dots": (
        lambda a, b: tf.raw_ops.Einsum(inputs=[a, b], equation="...c,cd->...d"),
        ((B, H, W, C), (C, D)),
        B * H * W * C * D,
    ),
    "convolution": (
        lambda x, k: tf.nn.conv2d(x, k, 2, "SAME"),
        (IMAGE, (3, 3, C, D)),
        B * (H // 2) * (W // 2) * D * 9 * C,
    ),
    "groups": (
        lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"),
        (IMAGE, (3, 3, C // 2, 6)),
        B * H * W * 6 * 9 * C // 2,
    ),
    "depthwise": (
        lambda x, k: tf.nn.depthwise_conv2d(x, k, [1, 1, 1, 1], "SAME"),
        (IMAGE, (3, 3, C, 2)),
        B * H * W * C * 2 * 9,
    ),
    "upward": (
        lambda x, k: tf.nn.conv2d_transpose(x, k, [B, 2 * H, 2 * W, D], 2, "SAME"),
        (IMAGE, (3, 3, D, C)),
        B * H * W * C * 9 * D,
    ),
    "volume": (
        lambda x, k: tf.nn.conv3d(x, k, [1, 1, 1, 1, 1], "SAME"),
        ((B, 4, H, W, C), (3, 3, 3, C, D)),
        B * 4 * H * W * D * 27 * C,
    ),
    "function": (tf.function(tf.matmul), ((B, C), (C, D)), B * C * D),
    "loop": (
        lambda a, b: tf.while_loop(
            lambda i, x: i < 7, lambda i, x: (i + 1, x @ b), (0, a), maximum_iterations=7
        ),
        ((C, C), (C, C)),
        7 * C * C * C,
    ),
    "branch": (
        lambda a, b: tf.cond(a[0, 0] > 0, lambda: a @ b @ b, lambda: a @ b),
        ((C, C), (C, C)),
        2 * C * C * C,
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_counted(name: str) -> None:
    call, shapes, pairs = PRODUCTS[name]
    assert counted(call, *shapes).products == 2 * pairs


def test_products_with_weights_are_told_from_others() -> None:
    weight = tf.Variable(tf.ones([C, D]))

    def call(x: Any, y: Any) -> Any:
        half = tf.cast(weight, tf.float16)
        return tf.cast(x, tf.float16) @ half, y @ y

    work = counted(call, (B, C), (C, C))
    assert (work.of_weights, work.products) == (2 * B * C * D, 2 * (B * C * D + C**3))
    assert work.half_products == 2 * B * C * D


def test_what_has_the_memory_of_another_moves_nothing() -> None:
    def views(x: Any) -> Any:
        return tf.reshape(tf.stop_gradient(tf.identity(x[tf.newaxis])), [-1, C])

    expected = counted(lambda x: x[tf.newaxis], (64, C)).moved_bytes
    assert counted(views, (64, C)).moved_bytes == expected


def test_a_part_of_a_table_is_not_all_of_it() -> None:
    table = tf.Variable(tf.ones([1000, 64]))
    work = counted(lambda at: tf.gather(table, at), (B,), dtype="int32")
    assert work.moved_bytes == 2 * 4 * B * 64
    assert work.kernels == 1
