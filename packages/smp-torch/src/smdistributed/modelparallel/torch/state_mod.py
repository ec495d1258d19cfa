"""What ``smp.state`` gives; published scripts also import it from this module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from smdistributed.modelparallel.common.config import Config
from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.api.slot import slot
from smdistributed.modelparallel.torch.model.distributed import models_of


@dataclass(frozen=True)
class ModuleManager:
    """What ``smp.state.module_manager`` gives.

    Attributes:
        translate_functions: pairs of functions, one a model with modules that stand for those of
            Transformers: from its state to theirs, and back.
    """

    translate_functions: tuple[tuple[Any, Any], ...] = ()


class State:
    """The resolved configuration and the runtime's parts, read-only."""

    @property
    def cfg(self) -> Config:
        """The resolved configuration, one attribute a parameter.

        Programs ask it for ``shard_optimizer_state`` to know whether each rank saves a file of the
        optimizer, as with shards.

        Source: model-parallel-extended-features-pytorch-fp16.md.
        """
        config = slot.get().config
        if config.sharded_data_parallel_degree == 1:
            return config
        return config.model_copy(update={"shard_optimizer_state": True})

    @property
    def module_manager(self) -> ModuleManager:
        """Compatibility: what programs ask about the modules of a model."""
        models = models_of(slot.get()) if slot.is_filled else []
        translations = [model.translation for model in models]
        return ModuleManager(tuple((each.to_theirs, each.to_ours) for each in translations if each))

    @property
    def param_index_to_name_tp_group(self) -> NoReturn:
        """Compatibility: numbers of parameters in a flat buffer, which there is none of."""
        raise UnsupportedError("state.param_index_to_name_tp_group is not supported yet.")

    @property
    def param_name_to_index_tp_group(self) -> NoReturn:
        """Compatibility: numbers of parameters in a flat buffer, which there is none of."""
        raise UnsupportedError("state.param_name_to_index_tp_group is not supported yet.")


state = State()
