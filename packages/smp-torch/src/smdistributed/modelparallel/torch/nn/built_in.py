"""The classes that have a distributed version without anybody's registration."""

from __future__ import annotations

from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.nn.embedding import DistributedEmbedding
from smdistributed.modelparallel.torch.nn.huggingface.built_in import family_of
from smdistributed.modelparallel.torch.nn.linear import DistributedLinear
from smdistributed.modelparallel.torch.tensor_parallel.registry import Arguments, Registration


def built_in(module: nn.Module) -> Registration | None:
    """Returns how a module is distributed; None if it is not. Subclasses stay as they are."""
    family = family_of(module)
    return _TORCH.get(type(module)) if family is None else family.registration()


def _of_linear(module: Any) -> Arguments:
    return (module.in_features, module.out_features, module.bias is not None), {}


def _of_embedding(module: Any) -> Arguments:
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    sizes = (module.num_embeddings, module.embedding_dim)
    return sizes, {name: getattr(module, name) for name in names}


_TORCH: dict[type[nn.Module], Registration] = {
    nn.Linear: Registration(DistributedLinear, arguments_of=_of_linear),
    nn.Embedding: Registration(
        DistributedEmbedding, arguments_of=_of_embedding, needed="distribute_embedding"
    ),
}
