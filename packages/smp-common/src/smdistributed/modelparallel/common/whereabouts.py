"""Where a process is: the line of the user's Python that runs, and what the library does in it.

``smprun`` asks for it while a job runs, see ``launcher.status``. What parts of the library do, and
whom they wait for, they tell, each for itself; see ``telling``.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any

from smdistributed.modelparallel.common import first_stderr

_MARK = "\x1esmp-whereabouts "
#: Keeps an answer within one atomic write to a pipe.
_MOST_CHARACTERS = 300
_MOST_ACTIVITIES = 4
#: Of what is not the user's: Python's own, what is installed, and this library where it is not.
_INSTALLED = tuple(
    f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_OWN = f"{os.sep}smdistributed{os.sep}modelparallel{os.sep}"


@dataclass(frozen=True)
class Exchange:
    """An exchange that a process is in, as others that take part know it, too.

    Attributes:
        name: of what is exchanged; the same on all.
        ranks: global ranks that take part, this one among them, ascending.
        number: how many of this name there were among them, with this one; 0 where nobody counts.
        sends: of two ranks, whether this one sends to the other; None where all do the same.
    """

    name: str
    ranks: tuple[int, ...]
    number: int = 0
    sends: bool | None = None


@dataclass(frozen=True)
class Activity:
    """What the library does in a process: it waits, or computes an action of a step.

    Attributes:
        what: the action; or the call, transfer or collective, and whom it waits for.
        seconds: since when.
        exchange: that it is in; None where it is in none, or who takes part is not known.
    """

    what: str
    seconds: float
    exchange: Exchange | None = None

    @staticmethod
    def since(began: float, what: str, exchange: Exchange | None = None) -> Activity:
        """Returns one that began at a time of the monotonic clock."""
        return Activity(what, max(0.0, time.monotonic() - began), exchange)


@dataclass(frozen=True)
class Whereabouts:
    """One process's account of where it is.

    Attributes:
        rank: global rank.
        host: name of its host.
        line: of the user's Python.
        activities: what the library does; empty where it does nothing that takes long.
    """

    rank: int
    host: str
    line: str
    activities: tuple[Activity, ...] = ()

    def text(self) -> str:
        """Returns it as one line of text, without the newline."""
        fields = asdict(self)
        for each in fields["activities"]:
            if exchange := each["exchange"]:
                # As bits: a line holds a thousand ranks so.
                exchange["ranks"] = f"{sum(1 << rank for rank in exchange['ranks']):x}"
        return _MARK + json.dumps(fields)

    @staticmethod
    def parse(line: str) -> Whereabouts | None:
        """Returns what a line of output carries, or None for any other line."""
        _, mark, text = line.partition(_MARK)
        if not mark:
            return None
        try:
            fields = json.loads(text)
            activities = tuple(map(_activity, fields.pop("activities")))
            return Whereabouts(**fields, activities=activities)
        except (ValueError, TypeError, KeyError):
            return None  # a line of the program that looks like one of ours


def _activity(fields: dict[str, Any]) -> Activity:
    exchange = fields.pop("exchange")
    if exchange:
        bits = int(exchange.pop("ranks"), 16)
        ranks = tuple(rank for rank in range(bits.bit_length()) if bits >> rank & 1)
        exchange = Exchange(ranks=ranks, **exchange)
    return Activity(**fields, exchange=exchange)


#: What parts of the library do, see ``telling``.
_tellers: list[Callable[[], Sequence[Activity]]] = []


@contextlib.contextmanager
def telling(teller: Callable[[], Sequence[Activity]]) -> Iterator[None]:
    """Within, an answer of this process has what a function returns, called in any thread."""
    _tellers.append(teller)
    try:
        yield
    finally:
        _tellers.remove(teller)


def activities() -> list[Activity]:
    """Returns what the library does in this process at present; for any thread."""
    return [each for teller in list(_tellers) for each in teller()]


def answer(rank: int) -> None:
    """Tells ``smprun`` where this process is; for any thread."""
    told = activities()[:_MOST_ACTIVITIES]
    shortened = tuple(replace(each, what=_shortened(each.what)) for each in told)
    here = Whereabouts(rank, socket.gethostname(), _shortened(_line_of_the_user()), shortened)
    first_stderr.write(f"{here.text()}\n")


def _line_of_the_user() -> str:
    """Returns the line of the main thread that runs, the innermost that is the user's."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    frame = _innermost_of_the_user(innermost) or innermost
    if frame is None:
        return "no line of Python"
    path, number = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(path, number).strip()
    place = f"{os.path.relpath(path) if _is_below_here(path) else path}:{number}"
    return f"{place} in {frame.f_code.co_name}" + (source and f": {source}")


def _innermost_of_the_user(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        path = frame.f_code.co_filename
        if not (path.startswith((*_INSTALLED, "<frozen ")) or _OWN in path):
            return frame
        frame = frame.f_back
    return None


def _is_below_here(path: str) -> bool:
    return os.path.abspath(path).startswith(os.getcwd() + os.sep)


def _shortened(text: str) -> str:
    half = _MOST_CHARACTERS // 2
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:half]} ... {text[-half:]}"
