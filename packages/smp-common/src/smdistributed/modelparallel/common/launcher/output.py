"""mpirun's output, taken apart by rank and shown line by line.

mpirun writes each piece of a rank's output with a tag before it, in one call of ``write``; what
has no tag is its own. The sockets between keep the calls apart, so a piece that spans lines, or
holds half of one, is never taken for another rank's, and nothing that a rank prints is mistaken
for a tag.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

from smdistributed.modelparallel.common.config.announced import announced
from smdistributed.modelparallel.common.failure import FailureRecord
from smdistributed.modelparallel.common.launcher.ending import ENDED, HEARD
from smdistributed.modelparallel.common.launcher.first_failure import (
    Banner,
    parse_banner,
    parse_lost_host,
)
from smdistributed.modelparallel.common.whereabouts import Whereabouts

_TAG = re.compile(rb"\[\d+,(\d+)\]<(?:stdout|stderr)>: ")
_RULE = re.compile(r"-{60,}$")
#: mpirun's remarks on an end that smprun asked for.
_NOISE = re.compile(r"Abort is in progress\.\.\.hit ctrl-c again|^$")
_LINE_END = re.compile(rb"\r?\n|\r(?!\Z)")
_COLOURS = (36, 32, 33, 35, 34, 31)


class LineAssembler:
    r"""Puts the pieces of one stream together into lines.

    A progress bar returns to the start of its line with ``\r`` instead of ending it. Each such
    state is passed on, ended by ``\r``.
    """

    def __init__(self) -> None:
        self._pending = bytearray()
        self._searched = 0
        self._redrawn = False
        self._shown = b""

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        r"""Yields each complete line and its end, ``\n`` or ``\r``."""
        self._pending += data
        while match := _LINE_END.search(self._pending, self._searched):
            line, end = bytes(self._pending[: match.start()]), match.group()[-1:]
            del self._pending[: match.end()]
            self._searched = 0
            self._redrawn = end == b"\r"
            if end == b"\n" or line not in (b"", self._shown):
                yield line, end
            self._shown = b""
        # A return at the very end may be the first half of "\r\n".
        self._searched = max(0, len(self._pending) - 1)

    def preview(self) -> bytes:
        """Returns the present state of a progress bar, once; it stays part of the line."""
        state = bytes(self._pending).strip(b"\r")
        if not self._redrawn or state == self._shown:
            return b""
        self._shown = state
        return state

    def rest(self) -> bytes:
        """Returns what is left after the last line, at the end of the stream."""
        rest = bytes(self._pending).strip(b"\r\0")
        self._pending.clear()
        return rest


class Screen:
    """Writes lines to the user's two streams, prefixed by their rank."""

    def __init__(self, out: BinaryIO, err: BinaryIO, num_ranks: int) -> None:
        self._streams = (out, err)
        self._terminal = tuple(stream.isatty() for stream in self._streams)
        self._colour = "NO_COLOR" not in os.environ
        self._width = len(str(num_ranks - 1))
        self._over_bar = False

    def show(self, rank: int | None, is_err: bool, line: bytes, end: bytes = b"\n") -> None:
        """Writes one line at once; ``rank`` None is mpirun or smprun itself."""
        terminal = self._terminal[is_err]
        # A bar leaves the cursor on its own line, with its text still there.
        erase = b"\x1b[K" if terminal and self._over_bar else b""
        if terminal:
            self._over_bar = end == b"\r"
        stream = self._streams[is_err]
        stream.write(erase + self._prefix(rank, terminal) + line + end)
        stream.flush()

    def _prefix(self, rank: int | None, terminal: bool) -> bytes:
        if rank is None:
            return b""
        prefix = f"[{rank:>{self._width}}]"
        if terminal and self._colour:
            prefix = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\x1b[0m"
        return prefix.encode() + b" "


class Relay:
    """Takes what mpirun writes, shows it, and keeps what tells of failures.

    Attributes:
        records: the failure records of the ranks; not shown.
        banners: what mpirun says of failures; not shown.
        lost_host: the first to which mpirun has lost its connection; empty without one.
        ended: the ranks that have said that they came to their end.
        is_ending: whether a rank was asked to end and wants time for it.
        on_whereabouts: is called with what a rank says of where it is; not shown.
        on_configuration: is called with the parameters that rank 0 tells; not shown.
    """

    def __init__(self, screen: Screen) -> None:
        self.records: list[FailureRecord] = []
        self.banners: list[Banner] = []
        self.lost_host = ""
        self.ended: set[int] = set()
        self.is_ending = False
        self.on_whereabouts: Callable[[Whereabouts], object] = lambda _: None
        self.on_configuration: Callable[[Mapping[str, Any]], object] = lambda _: None
        self._screen = screen
        self._streams: dict[tuple[int | None, bool], LineAssembler] = {}
        self._last_words: defaultdict[int, list[bytes]] = defaultdict(list)
        self._num_to_come: defaultdict[int, int] = defaultdict(int)
        self._blocks: dict[bool, list[str]] = {}
        self._has_own_words = False

    @property
    def has_refused(self) -> bool:
        """Whether mpirun has said something, other than who failed, and no rank has."""
        return self._has_own_words and self._is_mpirun_alone

    @property
    def _is_mpirun_alone(self) -> bool:
        return all(rank is None for rank, _ in self._streams)

    def feed(self, is_err: bool, data: bytes) -> None:
        """Takes one piece, as mpirun wrote it to its standard output or error."""
        match = _TAG.match(data)
        rank = int(match[1]) if match else None
        stream = self._streams.setdefault((rank, is_err), LineAssembler())
        for line, end in stream.feed(data[match.end() :] if match else data):
            self._line(rank, is_err, line, end)

    def idle(self) -> None:
        """Shows progress bars as they stand; to be called when nothing came for a while."""
        for (rank, is_err), stream in self._streams.items():
            if line := stream.preview():
                self._screen.show(rank, is_err, line, b"\r")

    def finish(self) -> None:
        """Shows what is left when the output has ended."""
        for (rank, is_err), stream in self._streams.items():
            if line := stream.rest():
                self._line(rank, is_err, line, b"\n")
        for is_err in list(self._blocks):
            self._close_block(is_err)

    def show_last_words(self, origin: int | None) -> None:
        """Shows the tracebacks of the ranks, those that are equal once, and the origin's last.

        Args:
            origin: the rank whose failure explains the job's end, or None.
        """
        shown: dict[tuple[bytes, ...], int] = {}
        for rank in sorted(self._last_words, key=lambda rank: (rank == origin, rank)):
            words = tuple(self._last_words[rank])
            first = shown.pop(words, rank)
            shown[words] = rank if rank == origin else first
        for words, rank in shown.items():
            for line in words:
                self._screen.show(rank, True, line)
        self._last_words.clear()

    def _line(self, rank: int | None, is_err: bool, line: bytes, end: bytes) -> None:
        line = line.rstrip(b"\0")
        text = line.decode(errors="replace")
        if rank is None:
            self._own_line(is_err, text)
            return
        if is_err and text == HEARD:
            self.is_ending = True
            return
        if is_err and text == ENDED:
            self.ended.add(rank)
            return
        if is_err and (told := Whereabouts.parse(text)):
            self.on_whereabouts(told)
            return
        if is_err and (given := announced(text)) is not None:
            self.on_configuration(given)
            return
        if is_err and (record := _record(text)):
            self.records.append(record)
            return
        if is_err and (count := FailureRecord.num_last_words(text)) is not None:
            self._num_to_come[rank] = count
            return
        if is_err and end == b"\n" and self._num_to_come[rank]:
            self._num_to_come[rank] -= 1
            self._last_words[rank].append(line)
            return
        self._screen.show(rank, is_err, line, end)

    def _own_line(self, is_err: bool, text: str) -> None:
        """Gathers mpirun's messages, which stand between two rules, on either stream."""
        if (block := self._blocks.get(is_err)) is not None:
            block.append(text)
            if _RULE.match(text):
                self._close_block(is_err)
        elif _RULE.match(text):
            self._blocks[is_err] = [text]
        elif not _NOISE.search(text):
            self._own_words(is_err, text)

    def _close_block(self, is_err: bool) -> None:
        block = self._blocks.pop(is_err)
        text = "\n".join(block)
        if banner := parse_banner(text):
            self.banners.append(banner)
            return
        if host := parse_lost_host(text):
            self.lost_host = self.lost_host or host
        # A host that no rank was started on may be in order but for what mpirun needs there.
        if not host or self._is_mpirun_alone:
            for line in block:
                self._own_words(is_err, line)

    def _own_words(self, is_err: bool, text: str) -> None:
        self._has_own_words |= is_err
        self._screen.show(None, is_err, text.encode())


def _record(text: str) -> FailureRecord | None:
    try:
        return FailureRecord.parse(text)
    except (KeyError, TypeError):
        # The program printed something that only begins as a record does.
        return None
