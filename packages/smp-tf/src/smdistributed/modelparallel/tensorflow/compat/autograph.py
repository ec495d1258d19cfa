"""What decides whether AutoGraph rewrites a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.autograph.impl import api as autograph

not_converted = tf.autograph.experimental.do_not_convert


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with AutoGraph applied, as ``tf.function`` does to what it wraps.

    Errors keep their types; AutoGraph turns most into a ``StagingError``.
    """
    status = ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED, None)
    result: Callable[..., Any] = autograph.tf_convert(
        function, status, convert_by_default=True, user_requested=True
    )

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return result(*args, **kwargs)
        except autograph.StagingError as error:
            raise (error.__context__ or error) from None

    return call


def pass_through(error: Exception) -> None:
    """Makes an error leave converted code as it is, not as a ``StagingError`` about that code."""
    error.ag_pass_through = True  # type: ignore[attr-defined]
    vars(error).pop("ag_error_metadata", None)


def leave_unconverted(package: str) -> None:
    """Makes AutoGraph leave the code of a package as it is."""
    rule = autograph_config.DoNotConvert(package)
    if not any(getattr(each, "_prefix", None) == package for each in _conversion_rules()):
        autograph_config.CONVERSION_RULES = (rule, *_conversion_rules())


def _conversion_rules() -> tuple[Any, ...]:
    return tuple(autograph_config.CONVERSION_RULES)
