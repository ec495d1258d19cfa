"""What Python will ask of the numbers that a pass is given, found ahead of it.

A tape says what is done for some answers. Whether a mini-batch gives the same ones is known before
its first pass, so that nobody waits for the device in between.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from smdistributed.modelparallel.torch.tape.running import Keyed, Running, take
from smdistributed.modelparallel.torch.tape.tape import Call, Earlier, Made, Own, Tape, filled

logger = logging.getLogger(__name__)


def is_answered(
    tape: Tape, given: Sequence[torch.Tensor], random: Keyed, devices: tuple[str, ...]
) -> bool:
    """Whether the questions of a tape have the same answers for other tensors.

    Args:
        tape: of the pass.
        given: the tensors that the pass will be given, which look like those of the tape.
        random: of the step.
        devices: the types of those that autocast may be on for.
    """
    if not tape.ahead:
        return True
    made = dict(enumerate(given))

    def value(reference: Made | Earlier | Own) -> torch.Tensor:
        assert isinstance(reference, Made), "what is asked ahead is made from what is given alone"
        return made[reference.number]

    try:
        with Running(random, devices) as running:
            for position in sorted(tape.ahead):
                call = tape.events[position]
                assert isinstance(call, Call)
                if not call.is_asked_ahead:
                    take(call.result, running.go(call, value), made)
                    continue
                running.hold(call.settings)
                args, kwargs = filled((call.args, call.kwargs), value)
                if call.function(*args, **kwargs) is not call.result:
                    return False
    except Exception:  # which Python meets itself, if it comes to ask that
        logger.debug("what Python will ask cannot be found ahead", exc_info=True)
        return False
    return True
