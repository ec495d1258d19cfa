"""What ``smp.state`` gives; published scripts also import it from this module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from smdistributed.modelparallel.common.config import Config
from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.api.slot import slot


@dataclass(frozen=True)
class ModuleManager:
    """What ``smp.state.module_manager`` gives.

    Attributes:
        translate_functions: pairs of functions between the state of a model and that of the
            unpartitioned one. There are none: without tensor parallelism they are the same.
    """

    translate_functions: tuple[tuple[Any, Any], ...] = ()


class State:
    """The resolved configuration and the runtime's parts, read-only."""

    @property
    def cfg(self) -> Config:
        """The resolved configuration, one attribute a parameter.

        Source: model-parallel-extended-features-pytorch-fp16.md.
        """
        return slot.get().config

    @property
    def module_manager(self) -> ModuleManager:
        """Compatibility: what programs ask about the modules of a model."""
        return ModuleManager()

    @property
    def param_index_to_name_tp_group(self) -> NoReturn:
        """Compatibility: of half precision, which is not there yet."""
        raise UnsupportedError("state.param_index_to_name_tp_group is not supported yet.")

    @property
    def param_name_to_index_tp_group(self) -> NoReturn:
        """Compatibility: of half precision, which is not there yet."""
        raise UnsupportedError("state.param_name_to_index_tp_group is not supported yet.")


state = State()
