"""What ``tensor.data = data`` makes of a tensor that no model has: it is where its data is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from smdistributed.modelparallel.torch.absence.notes import Source
from smdistributed.modelparallel.torch.absence.owned import Owned, is_owned, own_up, wake
from smdistributed.modelparallel.torch.absence.tensors import (
    AbsentTensor,
    become_absent,
    make_present,
)


def set_data(tensor: torch.Tensor, data: Any, digest: str) -> None:
    """Gives a tensor other data, of which one is not here.

    Args:
        tensor: no model's own, and no gradient.
        data: it gets the memory of this.
        digest: of the call.
    """
    if isinstance(data, AbsentTensor):
        about = data.absent
        source = Source() if about.source.is_own else about.source_now
        wake(tensor)
        with about.keeper.fake_mode:
            # It has the versions of the data, whose memory it shares.
            fake = about.fake.detach()
        become_absent(tensor, about.keeper, fake, replace(about.origin, digest=digest), source)
        return
    own: Any = data
    known: Owned | None = own.owned if is_owned(data) else None
    wake(data)
    make_present(tensor, data)
    if known is not None:
        own_up(data, known)
        own_up(tensor, replace(known, origin=replace(known.origin, digest=digest), is_own=False))
