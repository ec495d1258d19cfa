"""Reads what a page of the documentation says can be run, and runs it.

A remark on a line of its own says what the next fenced block is:

    <!-- file: zen.py -->      a python block that belongs to this file; else it is train.py's
    <!-- run -->               a console block whose commands are run, each in the page's folder
    <!-- run, exit 1 -->       the same, of commands that must end with this code
    <!-- output -->            a text block: every line of it must be in what was printed last;
                               ... stands for anything
    <!-- not run: why -->      a python block that is not part of anything that is run

and, alone, ``<!-- take: ../tutorials/one-process.md -->`` writes the files of another page. Blocks
of one file are joined in their order; of a ``diff`` the new side is the file's. Lines between
``<!-- prepare`` and ``-->`` are Python that is run first: it makes what a reader has, such as a
model. A ``pycon`` block is a doctest; those of a page share names.
"""

from __future__ import annotations

import doctest
import itertools
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from smdistributed.modelparallel.common.launcher import command
from smdistributed.modelparallel.common.launcher.cli import split_arguments
from smdistributed.modelparallel.common.testing import fork_client

DEFAULT_FILE = "train.py"
_REMARK = re.compile(r"<!-- (?P<kind>file|run|output|not run|take)(?:[:,] (?P<words>.*))? -->")
_FENCE = re.compile(r"(?P<ticks>`{3,})(?P<language>[\w{}-]*)")
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")


class SnippetError(AssertionError):
    """What a page shows is not so."""


@dataclass(frozen=True)
class Block:
    """A fenced block, or a remark that stands for itself.

    Attributes:
        line: where it begins in the page, from 1.
        language: of the fence; ``take`` and ``prepare`` for these remarks.
        kind, words: of the remark above it; empty without one.
        text: what is inside.
    """

    line: int
    language: str
    kind: str
    words: str
    text: str


def blocks_of(page: Path) -> Iterator[Block]:
    """Yields the blocks of a page in their order."""
    kind = words = ""
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), 1))
    for place, line in lines:
        if line == "<!-- prepare":
            program = itertools.takewhile(lambda text: text != "-->", (text for _, text in lines))
            yield Block(place, "prepare", "prepare", "", "\n".join(program) + "\n")
        elif remark := _REMARK.fullmatch(line):
            kind, words = remark["kind"], remark["words"] or ""
            if kind == "take":
                yield Block(place, "take", kind, words, "")
                kind = words = ""
        elif fence := _FENCE.match(line):
            inside = []
            for _, text in lines:
                if text.startswith(fence["ticks"]):
                    break
                inside.append(text)
            yield Block(place, fence["language"], kind, words, "\n".join(inside) + "\n")
            kind = words = ""
        elif line.strip() and kind:
            raise SnippetError(f"{page}:{place}: no fenced block follows the remark above.")


def has_runs(page: Path) -> bool:
    """Tells whether a page starts processes."""
    return any(block.kind == "run" for block in blocks_of(page))


def run(page: Path, folder: Path, preload: Sequence[str] = ()) -> None:
    """Runs a page from its first block to its last.

    Args:
        page: to run.
        folder: where its files go.
        preload: modules that its processes have from their beginning, as copies of one that has
            imported them: they end sooner, and print the same. Without any they are started anew.

    Raises:
        SnippetError: a command ends otherwise than it should, or prints something else.
    """
    printed = ""
    for block in blocks_of(page):
        where = f"{page}:{block.line}"
        if block.kind == "take":
            write_files(page.parent / block.words, folder)
        elif block.kind == "prepare":
            (folder / "prepare.py").write_text(block.text, encoding="utf-8")
            run_commands(replace(block, text="$ python prepare.py\n"), folder, where, preload)
        elif block.language in ("python", "diff"):
            add_to_file(block, folder)
        elif block.kind == "run":
            printed = run_commands(block, folder, where, preload)
        elif block.kind == "output":
            check_output(block, printed, where)


def write_files(page: Path, folder: Path) -> None:
    """Writes the files that a page shows, and those of the pages that it takes from."""
    for block in blocks_of(page):
        if block.kind == "take":
            write_files(page.parent / block.words, folder)
        elif block.language in ("python", "diff") and block.kind == "file":
            add_to_file(block, folder)


def add_to_file(block: Block, folder: Path) -> None:
    """Appends a block to the file that it belongs to."""
    if block.kind == "not run":
        return
    name = block.words if block.kind == "file" else DEFAULT_FILE
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a", encoding="utf-8") as file:
        file.write(block.text if block.language == "python" else sides_of(block)[1])


def sides_of(block: Block) -> tuple[str, str]:
    """Returns what a diff was and what it becomes, as programs."""
    lines = [line or " " for line in block.text.splitlines()]
    was, becomes = (
        "".join(f"{line[1:]}\n" for line in lines if line[0] in (" ", mark)) for mark in "-+"
    )
    return was, becomes


def run_commands(block: Block, folder: Path, where: str, preload: Sequence[str]) -> str:
    """Runs the commands of a console block; returns what they printed."""
    expected = int(block.words.removeprefix("exit ") or 0)
    beside = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    printed = ""
    for line in block.text.replace("\\\n", "").splitlines():
        if not line.startswith("$ "):
            raise SnippetError(f"{where}: a line of a console block begins with '$ ': {line!r}")
        words = shlex.split(line[2:])
        done = subprocess.run(
            by_copies(words, preload) if preload else words,
            cwd=folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=240,
            check=False,
        )
        printed += done.stdout
        if done.returncode != expected:
            raise SnippetError(
                f"{where}: {line[2:]!r} ended with {done.returncode}, not {expected}:\n{printed}"
            )
    return printed


def by_copies(words: list[str], preload: Sequence[str]) -> list[str]:
    """Returns what runs a program of ``python`` or ``smprun`` in copies of a process."""
    address = fork_client.server_with(tuple(preload)).address
    if words[0] == "python":
        return [sys.executable, *command.STAND_IN, address, *words[1:]]
    own, program = split_arguments(words[1:])
    return [words[0], *own, f"--fork-from={address}", *program]


def check_output(block: Block, printed: str, where: str) -> None:
    """Compares shown lines with printed ones, which may come in another order between ranks."""
    present = [shape_of(line) for line in printed.splitlines()]
    for line in block.text.splitlines():
        if line.strip() in ("", "..."):
            continue
        words, numbers = shape_of(line)
        if " ... " in line:
            parts = map(re.escape, line.split(" ... "))
            found = re.search(".*".join(parts), printed) is not None
        else:
            found = any(words == there and near(numbers, theirs) for there, theirs in present)
        if not found:
            raise SnippetError(f"{where}: this line was not printed: {line!r}; but:\n{printed}")


def shape_of(line: str) -> tuple[str, list[str]]:
    """Returns a line without its numbers and spaces, and its numbers."""
    return "".join(_NUMBER.sub("#", line).split()), _NUMBER.findall(line)


def near(shown: list[str], printed: list[str]) -> bool:
    """Tells whether numbers agree: whole ones exactly, others up to the rounding of machines."""
    return all(
        math.isclose(float(one), float(other), rel_tol=5e-3, abs_tol=5e-4)
        if "." in one
        else one == other
        for one, other in zip(
            (text.replace(",", "") for text in shown),
            (text.replace(",", "") for text in printed),
            strict=True,
        )
    )


def run_doctests(page: Path) -> None:
    """Runs the ``pycon`` blocks of a page as one doctest.

    Raises:
        SnippetError: an example gives something else.
    """
    names: dict[str, object] = {}
    report: list[str] = []
    for block in blocks_of(page):
        if block.language == "pycon":
            parsed = doctest.DocTestParser().get_doctest(
                block.text, names, page.name, str(page), block.line
            )
            flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
            runner = doctest.DocTestRunner(verbose=False, optionflags=flags)
            runner.run(parsed, out=report.append, clear_globs=False)
            names = parsed.globs
    if report:
        raise SnippetError("".join(report))
