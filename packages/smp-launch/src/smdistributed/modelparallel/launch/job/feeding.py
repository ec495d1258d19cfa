"""Feeds the pipes of a host while its script runs: ``python -m ... FOLDER HOST``.

A process of its own, whose end with an error ends the job.
"""

from __future__ import annotations

import sys
from pathlib import Path

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.launch.channels import pipe
from smdistributed.modelparallel.launch.channels.file import Share
from smdistributed.modelparallel.launch.job import contract
from smdistributed.modelparallel.launch.job.folder import JobFolder
from smdistributed.modelparallel.launch.request.document import Channel, TrainingJob

#: What ``python -m`` runs.
MODULE = "smdistributed.modelparallel.launch.job.feeding"


def piped(request: TrainingJob) -> list[Channel]:
    """Returns the channels of a job that are streams."""
    return [
        channel
        for channel in request.input_data_config
        if contract.mode_of(channel, request) == "Pipe"
    ]


def main(words: list[str]) -> int:
    """Feeds all pipes of a host, until somebody ends it."""
    folder, host = JobFolder(Path(words[0])), words[1]
    request = folder.request()
    names = contract.host_names(request.resource_config.instance_count)
    share = Share(names.index(host), len(names))
    try:
        pipe.feed(
            [
                pipe.Feeder(
                    channel,
                    contract.channel_base(folder, request, channel, host),
                    folder.root,
                    share,
                )
                for channel in piped(request)
            ]
        )
    except (SMPError, OSError) as error:
        # The last line is what the job says of its failure.
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
