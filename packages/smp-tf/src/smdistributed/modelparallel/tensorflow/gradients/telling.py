"""Numbers of single variables that a script takes into Python, where nobody can follow them.

A number of one variable is what one process has of it. Those of several, told one after another at
one line, are of the variables of this process; whether the script adds them up is not known.
"""

from __future__ import annotations

import warnings
from typing import Any

from smdistributed.modelparallel.tensorflow.gradients.meeting import frame_of_script
from smdistributed.modelparallel.tensorflow.parameters.shares import Form, Key, Share


class Told:
    """What a script was told of variables, by line and models."""

    def __init__(self) -> None:
        self._variables: dict[tuple[Any, int, frozenset[int]], frozenset[Key]] = {}

    def note(self, share: Share) -> None:
        """Warns, once a line and model, where numbers of several variables are told there.

        Args:
            share: of the value whose numbers are told.
        """
        if share.is_padding or share.form is Form.WHOLE:
            return
        frame = frame_of_script()
        models = frozenset(model for model, _ in share.variables)
        line = (frame.f_code, frame.f_lineno, models)
        before = self._variables.get(line, frozenset())
        if share.variables <= before:
            return
        every = self._variables[line] = before | share.variables
        if len(every) < 2 or len(before) >= 2:
            return
        names = sorted({family.name_of(key) for family in share.families for key in every} - {""})
        warnings.warn_explicit(
            "numbers of several variables or gradients are told to Python here; they are of "
            f"{', '.join(names)} and what else this process has, so a sum, a norm, the greatest or "
            "the least of them by Python or NumPy is of this process alone. Compute it with "
            "TensorFlow (tf.linalg.global_norm, tf.add_n, tf.norm(tf.stack(...))), which gives "
            "that of the whole model, and take that into Python; model.get_weights() returns the "
            "values of all variables.",
            UserWarning,
            frame.f_code.co_filename,
            frame.f_lineno,
        )
