"""What becomes of a script on a rank of a job, and in the job."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from small_scripts import is_split

import scripts.all
import smdistributed.modelparallel.torch as smp
from scripts.kit import SCRIPTS, Entry, Kit, PlainKit, seed
from smdistributed.modelparallel.common.errors import CommError, SMPError

assert scripts.all
#: Ends, the worst first; "lost": an error that tells of another rank.
ENDS = ("hung", "wrong", "unclear", "refused", "lost", "no script", "whole", "exact")
Numbers = tuple[list[Any], list[dict[str, torch.Tensor]]]


def _numbers(entry: Entry, kit: Kit) -> Numbers:
    """Runs a script; returns what it noted, and parameters and buffers in the end."""
    seed()
    torch.set_default_dtype(entry.dtype)
    try:
        entry.run(kit)
        return kit.notes, kit.states()
    finally:
        torch.set_default_dtype(torch.float32)


def numbers_of(name: str, folder: str) -> Numbers:
    """Returns the numbers of a script with the library in this job."""
    return _numbers(SCRIPTS[name], Kit(Path(folder)))


def outcome_of(name: str, folder: str, drawn: Sequence[Numbers] | None) -> str:
    """Runs a script in this job; returns what became of it on this rank.

    Args:
        name: of the script.
        folder: an empty one, that all ranks have.
        drawn: its numbers by tensor-parallel rank; without them plain PyTorch tells.
    """
    entry = SCRIPTS[name]
    expected = None if drawn is None else drawn[smp.tp_rank()]
    if expected is None:
        try:
            with tempfile.TemporaryDirectory() as own:
                expected = _numbers(entry, PlainKit(Path(own)))
        except Exception:
            return f"no script: {traceback.format_exc()}"
    kit = Kit(Path(folder))
    try:
        found = _numbers(entry, kit)
        split = all(is_split(each) for each in kit.models)
    except CommError as error:
        return f"lost: {_told(error)}"
    except SMPError as error:
        return f"refused: {_told(error)}"
    except Exception:
        return f"unclear: {traceback.format_exc()}"
    if wrong := _difference(expected, found, entry.tolerance):
        return f"wrong: {wrong}"
    return "exact" if split or smp.pp_size() == 1 else "whole"


def _told(error: Exception) -> str:
    return "\n".join((f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())))


def _difference(expected: Numbers, found: Numbers, tolerance: float) -> str:
    """Says where numbers differ first, or nothing."""
    (notes, states), (own_notes, own_states) = expected, found
    if len(notes) != len(own_notes):
        return f"{len(own_notes)} numbers noted instead of {len(notes)}"
    for number, (want, got) in enumerate(zip(notes, own_notes, strict=True)):
        if not _is_close(want, got, tolerance):
            return f"note {number} is {got} instead of {want}"
    for number, (wanted, own) in enumerate(zip(states, own_states, strict=True)):
        if wanted.keys() != own.keys():
            return f"model {number} has other names: {sorted(wanted.keys() ^ own.keys())}"
        for name, want in wanted.items():
            if not _is_close(want, own[name], tolerance):
                most = float((want - own[name]).abs().max()) if want.shape == own[name].shape else 0
                return f"{name} of model {number} is {own[name]}, not {want} (off by {most:.1e})"
    return ""


def _is_close(want: torch.Tensor, got: torch.Tensor, tolerance: float) -> bool:
    if want.shape != got.shape:
        return False
    kind = torch.complex128 if want.is_complex() else torch.float64
    want, got = want.to(kind), got.to(kind)
    most = tolerance * max(1.0, float(want.abs().max()) if want.numel() else 0.0)
    return torch.allclose(got, want, rtol=0.0, atol=most, equal_nan=True)


def in_all(outcomes: Sequence[str]) -> str:
    """Returns the outcome of a job of those of its ranks: the worst, an error before a loss."""
    worst = min(outcomes, key=lambda each: ENDS.index(each.partition(":")[0]))
    return worst.replace("lost:", "unclear:", 1)
