"""What ranks wait for, as files of PyTorch's flight recorder.

Its analyzer, ``torch.distributed.flight_recorder.fr_trace``, says of each exchange which ranks have
not come to it. PyTorch's own recorder costs time in each one, knows no transfers of gloo, and no
exchange of objects. These files are made of what ranks answer when they are asked: the exchanges
that they are in, and none that are over.
"""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.launcher.status import Told
from smdistributed.modelparallel.common.names_of_ranks import listed
from smdistributed.modelparallel.common.whereabouts import Activity, Exchange

#: Of the format; PyTorch 2.11 to 2.13 write it.
_VERSION = "2.10"
_PREFIX = "rank_"


def write(told: Told, folder: Path) -> None:
    """Writes a file for each rank, ``rank_0`` and so on.

    A rank that has not answered is in no exchange, as one that computes.

    Args:
        told: where the ranks are.
        folder: is made where it is not there.

    Raises:
        ConfigError: it has other files, which the analyzer would read, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = {f"{_PREFIX}{rank}" for rank in range(told.size)}
    if others := sorted({path.name for path in folder.iterdir()} - own):
        raise ConfigError(
            f"the folder of --flight-recorder must have no other files; {folder} has {others[0]}: "
            "name a new one."
        )
    in_exchange = {
        rank: [each for each in answer.activities if each.exchange is not None]
        for rank, answer in told.answers.items()
    }
    exchanges = {
        _name(each.exchange): each.exchange.ranks
        for activities in in_exchange.values()
        for each in activities
        if each.exchange is not None
    }
    for rank in range(told.size):
        dump = {
            "version": _VERSION,
            "pg_config": {
                name: {"name": name, "desc": "undefined", "ranks": str(list(ranks))}
                for name, ranks in exchanges.items()
                if rank in ranks
            },
            "entries": [
                _entry(number, each, each.exchange, rank)
                for number, each in enumerate(in_exchange.get(rank, ()))
                if each.exchange is not None
            ],
        }
        (folder / f"{_PREFIX}{rank}").write_bytes(pickle.dumps(dump))


def _name(exchange: Exchange) -> str:
    return f"{exchange.name} [{listed(exchange.ranks)}]"


def _entry(number: int, activity: Activity, exchange: Exchange, rank: int) -> dict[str, Any]:
    """Returns an exchange of a rank as the recorder would note it."""
    operation = "barrier"
    if exchange.sends is not None:
        own = exchange.ranks.index(rank)
        operation = f"send {own}->{1 - own}" if exchange.sends else f"recv {own}<-{1 - own}"
    return {
        # The analyzer leaves out what is older than the first record of any rank.
        "record_id": 0,
        "pg_id": number,
        "process_group": (_name(exchange), "undefined"),
        "collective_seq_id": exchange.number,
        "p2p_seq_id": 0,
        "op_id": number,
        # A barrier has no sizes that could differ.
        "profiling_name": f"gloo:{operation}",
        "time_created_ns": time.time_ns() - int(activity.seconds * 1e9),
        "input_sizes": [[]],
        "input_dtypes": [""],
        "output_sizes": [[]],
        "output_dtypes": [""],
        "state": "started",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": False,
        "is_p2p": exchange.sends is not None,
        "frames": [],
    }
