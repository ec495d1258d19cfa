"""What holds while a body computes for the own pieces of its sequences."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from smdistributed.modelparallel.torch.compat.transformers_masks import masks_of_whole_sequences
from smdistributed.modelparallel.torch.context_parallel.checkpoints import repeated_for_pieces
from smdistributed.modelparallel.torch.context_parallel.looking import seeing
from smdistributed.modelparallel.torch.context_parallel.run import PieceRun


@contextlib.contextmanager
def computing(run: PieceRun) -> Iterator[None]:
    """Inside, a body computes for pieces."""
    with (
        torch.compiler.set_stance("force_eager"),  # compiled code shows no calls
        masks_of_whole_sequences(run.own_length, run.length),
        repeated_for_pieces(run),
        seeing(run),
    ):
        yield
