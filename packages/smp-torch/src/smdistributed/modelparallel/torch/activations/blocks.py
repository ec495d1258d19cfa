"""The blocks of a model: what it is a stack of, found where nobody has named them.

Blocks are modules of one class that follow each other in an ``nn.ModuleList`` or an
``nn.Sequential`` and have modules of their own, as the layers of a transformer do.
"""

from __future__ import annotations

import itertools

from torch import nn

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.torch.activations import checkpointing

_LISTS = (nn.ModuleList, nn.Sequential)


def stacks_of(model: nn.Module) -> list[list[nn.Module]]:
    """Returns the runs of blocks of a model, the outermost, in the order of its modules."""
    found: list[list[nn.Module]] = []
    seen: set[nn.Module] = set()

    def look(module: nn.Module) -> None:
        for kind, run in itertools.groupby(module.children(), type):
            children = [each for each in run if each not in seen]
            seen.update(children)
            is_stack = isinstance(module, _LISTS) and not issubclass(kind, _LISTS)
            if is_stack and len(children) > 1 and any(True for _ in children[0].children()):
                found.append(children)
            else:
                for child in children:
                    look(child)

    look(model)
    return found


def checkpoint_blocks(model: nn.Module, every: int) -> None:
    """Has every so manieth block of each stack compute its activations again in its backward pass.

    Args:
        model: the user's, finished.
        every: 1 for all blocks, 2 for every second one, the first among them; 0 for none.

    Raises:
        ConfigError: the model has no blocks.
    """
    if not every:
        return
    stacks = stacks_of(model)
    if not stacks:
        raise ConfigError(
            "checkpointed_blocks is for models that are stacks of modules of one class, in an "
            f"nn.ModuleList or nn.Sequential; {type(model).__name__} has none: call "
            "smp.set_activation_checkpointing for the modules that are to be computed again."
        )
    for stack in stacks:
        for block in stack[::every]:
            if not checkpointing.is_marked(block):
                checkpointing.mark(block, True, False, "each", lambda module: None)
