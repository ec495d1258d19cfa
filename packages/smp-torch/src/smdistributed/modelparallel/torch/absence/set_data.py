"""What ``tensor.data = data`` makes of a tensor that no model has: it is where its data is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from smdistributed.modelparallel.torch.absence.notes import Origin, Source
from smdistributed.modelparallel.torch.absence.owned import Owned, is_owned, own_up, wake
from smdistributed.modelparallel.torch.absence.tensors import (
    AbsentTensor,
    become_absent,
    make_present,
)


def set_data(tensor: torch.Tensor, data: Any, origin: Origin) -> None:
    """Gives a tensor other data, of which one is not here.

    Args:
        tensor: no model's own, and no gradient.
        data: it gets the memory of this.
        origin: of the call.
    """
    if isinstance(data, AbsentTensor):
        about = data.absent
        source = Source() if about.source.is_own else about.source_now
        with about.keeper.fake_mode:
            # It has the versions of the data, whose memory it shares.
            fake = about.fake.detach()
        wake(tensor)
        known = replace(about.origin, digest=origin.digest)
        become_absent(tensor, about.keeper, fake, known, source)
        return
    assert isinstance(tensor, AbsentTensor)
    if not is_owned(data):  # the rank that has the tensor has it as before
        about = tensor.absent
        with about.keeper.fake_mode:
            fake = torch.empty(data.shape, dtype=data.dtype, device=about.fake.device)
        become_absent(tensor, about.keeper, fake, origin, Source())
        return
    own: Any = data
    known_of_data: Owned = own.owned
    wake(data)
    make_present(tensor, data)
    own_up(data, known_of_data)
    made = replace(known_of_data.origin, digest=origin.digest)
    own_up(tensor, replace(known_of_data, origin=made, is_own=False))
