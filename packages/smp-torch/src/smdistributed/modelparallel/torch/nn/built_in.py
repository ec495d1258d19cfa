"""The classes that have a distributed version without anybody's registration."""

from __future__ import annotations

from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.nn.embedding import DistributedEmbedding
from smdistributed.modelparallel.torch.nn.huggingface.built_in import family_of
from smdistributed.modelparallel.torch.nn.linear import DistributedLinear, WideningLinear
from smdistributed.modelparallel.torch.tensor_parallel.auto.maps import is_linear
from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule
from smdistributed.modelparallel.torch.tensor_parallel.registry import Arguments, Registration


def built_in(module: nn.Module) -> Registration | None:
    """Returns how a module is distributed; None if it is not.

    Subclasses stay as they are, but for those of ``nn.Linear`` that compute what it does.
    """
    family = family_of(module)
    if family is not None:
        return family.registration()
    return _TORCH.get(nn.Linear if is_linear(module) else type(module))


def _of_linear(module: Any) -> Arguments:
    return (module.in_features, module.out_features, module.bias is not None), {}


def _of_linear_in_auto(module: Any, size: int) -> type[DistributedModule]:
    """Returns what exchanges least; a script that names no class rests on no shape of slices."""
    widens = module.out_features > module.in_features and module.out_features % size == 0
    return WideningLinear if widens else DistributedLinear


def _of_embedding(module: Any) -> Arguments:
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    sizes = (module.num_embeddings, module.embedding_dim)
    return sizes, {name: getattr(module, name) for name in names}


_TORCH: dict[type[nn.Module], Registration] = {
    nn.Linear: Registration(DistributedLinear, arguments_of=_of_linear, in_auto=_of_linear_in_auto),
    nn.Embedding: Registration(
        DistributedEmbedding, arguments_of=_of_embedding, needed="distribute_embedding"
    ),
}
