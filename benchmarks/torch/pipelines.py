"""The table of pipelines: this library beside PyTorch's own, on the GPUs of a host.

    python benchmarks/torch/pipelines.py --write docs/reference/performance.md

Each program is started by ``torchrun`` with a process a GPU, one after the other, and ended where
it takes longer than its limit; what it did not come to is missing in the table. Without ``--write``
the table is printed. ``--tiny`` takes models that two processes without GPUs train in seconds, for
a look at the code paths.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
BEGIN, END = "<!-- pipelines.py: begin -->", "<!-- pipelines.py: end -->"
Row = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """One row of the table.

    Attributes:
        name: of it.
        peer: what the peer is.
        programs: the words after ``torchrun``; of their runs one is the peer's.
    """

    name: str
    peer: str
    programs: tuple[tuple[str, ...], ...]


def works(*, tiny: bool) -> list[Work]:
    """Returns what is trained: three models, by the best orders of this library."""
    gpt, xl, llama = ("tiny",) * 3 if tiny else ("1.3b", "gpt2_xl", "llama_1.3b")
    chain = ("gpt_step.py", "--size", gpt)
    whole = ("transformers_step.py", "--trace", "--memory-weight", "0", "--model")
    v_shaped = ("--pipeline", "zero_bubble_v")
    ours = (*chain, "--trace", *v_shaped, "--partition", "auto", "smp:compile:loss")
    return [
        Work("GPT, blocks compiled", "Schedule1F1B", ((*chain, "1f1b:compile"), ours)),
        Work("the same", "Schedule1F1B, its loss compiled", ((*chain, "1f1b:compile:loss"), ours)),
        Work(
            "GPT-2 XL as it is",
            "half of one GPU",
            ((*whole, xl, "--pipeline", "zero_bubble", "one", "smp:loss"),),
        ),
        Work(
            "Llama as it is",
            "half of one GPU",
            ((*whole, llama, *v_shaped, "one", "smp:loss"),),
        ),
    ]


class Programs:
    """Runs programs, each once.

    Args:
        ranks: processes of each.
        seconds: that one may take.
    """

    def __init__(self, ranks: int, seconds: float) -> None:
        self._ranks = ranks
        self._seconds = seconds
        self._known: dict[tuple[str, ...], list[Row]] = {}

    def rows(self, words: tuple[str, ...]) -> list[Row]:
        """Returns what a program has measured, a row a run."""
        if words not in self._known:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
            command += [str(self._ranks), str(HERE / words[0]), *words[1:]]
            print(" ".join(words), file=sys.stderr, flush=True)
            self._known[words] = _measured(command, self._seconds)
        return self._known[words]


def _measured(command: Sequence[str], seconds: float) -> list[Row]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its processes
        output, _ = process.communicate()
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"run"')]


def line(work: Work, programs: Programs) -> str:
    """Measures a row of the table, and returns it."""
    rows = [row for words in work.programs for row in programs.rows(words)]
    ours = next((row for row in rows if row["run"].startswith("smp")), None)
    peer = next((row for row in rows if not row["run"].startswith("smp")), None)
    peer_ms = peer and (peer.get("no_bubble_ms") or peer["ms"])
    cells = [
        work.name,
        work.peer,
        f"{peer_ms:.1f}" if peer_ms else "",
        f"{ours['ms']:.1f}" if ours else "",
        f"{ours['ms'] / peer_ms:.3f}" if ours and peer_ms else "",
        f"{ours['predicted_ms']:.1f}" if ours and ours.get("predicted_ms") else "",
        " and ".join(f"{row['gib']:.1f}" for row in (ours, peer) if row is not None),
    ]
    return f"| {' | '.join(cells)} |"


def table(tiny: bool, programs: Programs, ranks: int) -> str:
    """Measures all rows, and returns the table."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "processes on CPUs"
    return "\n".join(
        [
            f"{ranks} {device}, PyTorch {torch.__version__}, {datetime.date.today()}; a row's runs "
            "follow each other on one machine:",
            "",
            "| work | peer | its ms | this library's ms | ratio | predicted | GiB, ours and its |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *(line(work, programs) for work in works(tiny=tiny)),
        ]
    )


def replaced(text: str, made: str) -> str:
    """Returns a text with what is between the two marks replaced.

    Raises:
        ValueError: it has no such marks.
    """
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"a table is written between {BEGIN} and {END}; the file has none.")
    return pattern.sub(lambda found: f"{BEGIN}\n{made}\n{END}", text)


def main() -> None:
    """Measures, and writes or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="the file that has the marks")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--seconds", type=float, default=180, help="that a program may take")
    parser.add_argument("--tiny", action="store_true", help="models for CPUs")
    options = parser.parse_args()
    text = options.write.read_text() if options.write else f"{BEGIN}\n{END}"
    replaced(text, "")  # before minutes have gone
    made = table(options.tiny, Programs(options.ranks, options.seconds), options.ranks)
    if options.write:
        options.write.write_text(replaced(text, made))
    else:
        print(made)


if __name__ == "__main__":
    main()
