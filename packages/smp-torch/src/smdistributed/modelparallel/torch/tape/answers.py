"""What Python will ask of the numbers that a pass is given, found ahead of it.

A tape says what is done for some answers. Whether a mini-batch gives the same ones is known before
its first pass, so that nobody waits for the device in between.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from smdistributed.modelparallel.torch.tape.running import Keyed, Running, take
from smdistributed.modelparallel.torch.tape.tape import Call, Earlier, Made, Own, Tape, filled

logger = logging.getLogger(__name__)


def answers(
    tape: Tape, given: Sequence[torch.Tensor], random: Keyed, devices: tuple[str, ...]
) -> Mapping[int, bool]:
    """Returns what the questions of a tape are answered for other tensors, by their positions.

    Args:
        tape: of the pass.
        given: the tensors that the pass will be given, which look like those of the tape.
        random: of the step.
        devices: the types of those that autocast may be on for.

    Returns:
        the answers; one is not there if finding it failed, as it then will where it is asked for.
    """
    found: dict[int, bool] = {}
    if not tape.ahead:
        return found
    made = dict(enumerate(given))

    def value(reference: Made | Earlier | Own) -> torch.Tensor:
        assert isinstance(reference, Made), "what is asked ahead is made from what is given alone"
        return made[reference.number]

    try:
        with Running(random, devices) as running:
            for position in sorted(tape.ahead):
                call = tape.events[position]
                assert isinstance(call, Call)
                if call.is_asked_ahead:
                    running.hold(call.settings)
                    args, kwargs = filled((call.args, call.kwargs), value)
                    found[position] = call.function(*args, **kwargs)
                else:
                    take(call.result, running.go(call, value), made)
    except Exception:
        logger.debug("what Python will ask cannot be found ahead", exc_info=True)
    return found


def are_answers(tape: Tape, found: Mapping[int, bool]) -> bool:
    """Whether answers are those for which a tape says what is done.

    Args:
        tape: of the pass.
        found: the answers, see ``answers``.
    """
    asked = ((position, tape.events[position]) for position in tape.ahead)
    return all(
        found.get(position) is call.result
        for position, call in asked
        if isinstance(call, Call) and call.is_asked_ahead
    )
