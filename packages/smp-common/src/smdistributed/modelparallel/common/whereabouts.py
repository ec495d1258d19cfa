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
from dataclasses import asdict, dataclass
from types import FrameType

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
class Activity:
    """What the library does in a process: it waits, or computes an action of a step.

    Attributes:
        what: the action; or the call, transfer or collective, and whom it waits for.
        seconds: since when.
    """

    what: str
    seconds: float

    @staticmethod
    def since(began: float, what: str) -> Activity:
        """Returns one that began at a time of the monotonic clock."""
        return Activity(what, max(0.0, time.monotonic() - began))


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
        return _MARK + json.dumps(asdict(self))

    @staticmethod
    def parse(line: str) -> Whereabouts | None:
        """Returns what a line of output carries, or None for any other line."""
        _, mark, text = line.partition(_MARK)
        if not mark:
            return None
        try:
            fields = json.loads(text)
            activities = tuple(Activity(**each) for each in fields.pop("activities"))
            return Whereabouts(**fields, activities=activities)
        except (ValueError, TypeError, KeyError):
            return None  # a line of the program that looks like one of ours


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
    """Writes where this process is to its real stderr, for ``smprun``; for any thread."""
    told = activities()[:_MOST_ACTIVITIES]
    shortened = tuple(Activity(_shortened(each.what), each.seconds) for each in told)
    here = Whereabouts(rank, socket.gethostname(), _shortened(_line_of_the_user()), shortened)
    with contextlib.suppress(OSError):
        os.write(2, f"{here.text()}\n".encode())


def listed(ranks: Sequence[int]) -> str:
    """Returns ascending ranks as in "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    names = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


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
