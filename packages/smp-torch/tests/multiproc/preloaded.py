"""What processes of tests are forked with: all that ``smp.init`` and a first step import.

What compiles, too, and Transformers where it is installed: each process would take seconds for it.

Nothing may be computed here, for what has computed must not fork.
"""

from __future__ import annotations

import contextlib

import numpy as np  # noqa: F401
import pytest  # noqa: F401

import smdistributed.modelparallel.torch as smp  # noqa: F401
from smdistributed.modelparallel.torch.runtime.preload import prepare

__all__ = ["prepare"]

with contextlib.suppress(ImportError, AttributeError):
    import transformers.generation.utils
    import transformers.modeling_layers
    import transformers.modeling_utils  # noqa: F401
    from transformers.utils import import_utils

    # Tables of its files, which it has no more use for: each recording would look through them.
    import_utils.create_import_structure_from_path.cache_clear()
    import_utils.define_import_structure.cache_clear()
