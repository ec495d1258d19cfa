"""A plain model of the class that a distributed module stands for, with the values of the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule

#: Methods that leave a model as it is, and so can run on a copy.
READING = frozenset(("generate", "save_pretrained"))


def method_of_original(module: DistributedModule, name: str) -> Callable[..., Any]:
    """Returns a method of what a distributed module stands for, which makes that to run on.

    Each rank has memory for the whole model while it runs. Collective: WORLD, without a
    ``state_dict`` to save.

    Args:
        module: the model of a DistributedModel.
        name: one of ``READING``.
    """

    def method(*args: Any, state_dict: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        return getattr(as_original(module, state_dict), name)(*args, **kwargs)

    return method


def as_original(module: Any, state: Mapping[str, Any] | None = None) -> Any:
    """Returns a plain model with the values of a distributed one.

    Collective: WORLD, where no state is given.

    Args:
        module: the distributed one.
        state: its values, in its form or that of what it stands for; None: those that it has.

    Raises:
        UnsupportedError: the module is no whole model, which a DistributedModel gathers.
    """
    kind, to_theirs = module.stands_for, module.translations[0]
    state = module.state_dict() if state is None else state
    with torch.device("meta"):
        needed = kind(module.config).state_dict().keys()
    if needed - state.keys():
        state = to_theirs(state)
    if lacking := needed - state.keys():
        raise UnsupportedError(
            f"a whole {kind.__name__} is made of the state of a DistributedModel of one, and this "
            f"module is a part of another model, or of none: {min(lacking)} is not in its state. "
            "Call the method of that model, or save its state_dict()."
        )
    like = next(each for each in state.values() if torch.is_tensor(each))
    with torch.random.fork_rng():
        made = kind(module.config).to(like.dtype)
    made.load_state_dict(state)
    if (settings := vars(module).get("generation_config")) is not None:
        made.generation_config = settings
    return made.to(next(module.parameters()).device).train(module.training)
