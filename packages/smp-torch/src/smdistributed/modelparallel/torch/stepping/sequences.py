"""Which arguments of a step have a sequence, and where."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.common.errors import ConfigError, SMPError
from smdistributed.modelparallel.common.microbatch import SplitRules, bind_arguments
from smdistributed.modelparallel.torch.context_parallel.group import ContextGroup
from smdistributed.modelparallel.torch.context_parallel.layout import BLOCKS, Layout, sequence_of
from smdistributed.modelparallel.torch.tensors.nested import take_apart

#: Where models of Transformers have the sequence, by the names of their arguments.
_OF_TRANSFORMERS = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "attention_mask": 1,
    "position_ids": -1,
    "token_type_ids": 1,
    "labels": 1,
    "shift_labels": 1,
}
#: Of these, those that say how long the sequence is.
_MAIN = ("input_ids", "inputs_embeds")
_REMEDY = (
    "Say by smp.step(sequence_dims={{{name!r}: 1}}) along which dim of it the sequence lies, or "
    "None in place of 1 if it has none."
)


class Argument(NamedTuple):
    """A tensor that a step function is called with.

    Attributes:
        label: what messages call it.
        names: of the argument that it is in, and of its place there.
        tensor: itself.
    """

    label: str
    names: tuple[str, ...]
    tensor: torch.Tensor


def check_dims(dims: Mapping[str, int | None]) -> None:
    """Checks the option of ``smp.step``.

    Raises:
        ConfigError: it is no dict from names to dims.
    """
    if isinstance(dims, Mapping) and all(
        isinstance(name, str) and (dim is None or type(dim) is int) for name, dim in dims.items()
    ):
        return
    raise ConfigError(
        "sequence_dims must be a dict from names of arguments to the dims along which their "
        f"sequences lie, such as {{'tokens': 1, 'weights': None}}; received {dims!r}."
    )


class SequenceDims:
    """Tells where the arguments of a step function have their sequences.

    Args:
        rules: of the step function.
        dims: the dims that were given, by name; None for what has no sequence.
        num_ranks: over which a sequence is split.
    """

    def __init__(self, rules: SplitRules, dims: Mapping[str, int | None], num_ranks: int) -> None:
        self._rules = rules
        self._dims = dims
        self._num_ranks = num_ranks

    def of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[tuple[torch.Tensor, Layout | None]], int]:
        """Returns the tensors of a call, each once, with their sequences, and how long these are.

        Raises:
            ConfigError: it cannot be told, lengths differ, or they do not divide.
        """
        found = arguments_of(self._rules, args, kwargs)
        dims = {each.label: self._dim(each) for each in found}
        lengths = {
            each.label: each.tensor.shape[dim]
            for each in found
            if (dim := dims[each.label]) is not None and self._is_sure(each)
        }
        if not lengths:
            raise ConfigError(
                "context_parallel_degree splits the sequence of the arguments of a step function; "
                f"none of {', '.join(each.label for each in found) or 'no tensors'} is known to "
                "have one: name it in smp.step(sequence_dims={'tokens': 1})."
            )
        length = next(iter(lengths.values()))
        if any(each != length for each in lengths.values()):
            listed = ", ".join(f"{label} has {size}" for label, size in lengths.items())
            raise ConfigError(
                f"all sequences of a step function must be equally long; received: {listed}. Pad "
                "them, or give None in sequence_dims for one that is to stay whole."
            )
        parts = BLOCKS * self._num_ranks
        if length < parts:
            raise ConfigError(
                f"a sequence must have at least {parts} tokens, since each of the "
                f"{self._num_ranks} ranks (context_parallel_degree) has {BLOCKS} blocks of it; "
                f"received {length}: pad it to {parts}."
            )
        layouts: dict[int, tuple[torch.Tensor, Layout | None]] = {}
        for each in found:
            dim = dims[each.label]
            layout = None
            if dim is not None and each.tensor.shape[dim] == length:
                layout = sequence_of(dim, length, self._num_ranks)
            layouts.setdefault(id(each.tensor), (each.tensor, layout))
        return list(layouts.values()), length

    def _is_sure(self, argument: Argument) -> bool:
        return any(name in self._dims or name in _MAIN for name in argument.names)

    def _dim(self, argument: Argument) -> int | None:
        tensor = argument.tensor
        for name in argument.names:
            if name in self._dims:
                dim = self._dims[name]
                if dim is None:
                    return None
                if not -tensor.dim() <= dim < tensor.dim():
                    raise ConfigError(
                        f"sequence_dims has dim {dim} for {name}, which must be one of "
                        f"{argument.label}; received a tensor of shape {tuple(tensor.shape)}."
                    )
                return dim % tensor.dim()
        if not tensor.dim() or isinstance(tensor, torch.nn.Parameter):
            return None
        for name in argument.names:
            if name in _OF_TRANSFORMERS:
                dim = _OF_TRANSFORMERS[name]
                return dim % tensor.dim() if -tensor.dim() <= dim < tensor.dim() else None
        raise ConfigError(
            f"where the sequence of step argument {argument.label} is, of shape "
            f"{tuple(tensor.shape)}, cannot be told by its name. "
            + _REMEDY.format(name=argument.names[0])
        )


def arguments_of(
    rules: SplitRules, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Argument]:
    """Returns the tensors that a step function is called with."""
    found: list[Argument] = []
    for name, value in bind_arguments(rules.signature, args, kwargs).arguments.items():
        kind = rules.signature.parameters[name].kind
        if kind is kind.VAR_KEYWORD:
            for key, item in value.items():
                found += _tensors(item, key, (key, name))
        else:
            found += _tensors(value, name, (name,))
    return found


def _tensors(value: Any, label: str, names: tuple[str, ...]) -> Iterator[Argument]:
    if isinstance(value, torch.Tensor):
        yield Argument(label, names, value)
        return
    parts = take_apart(value)
    if parts is None:
        return
    for key, item in parts.items.items():
        inner = (key, *names) if isinstance(key, str) else names
        yield from _tensors(item, f"{label}[{key!r}]", inner)


def agreed_seed(group: ContextGroup, seed: int, arguments: Sequence[Argument]) -> int:
    """Returns the seed of a step, the same on all ranks of a group. Collective: CP_GROUP.

    Args:
        group: the ranks that share sequences.
        seed: of this rank.
        arguments: of the step function.

    Raises:
        SMPError: they were called with different batches.
    """
    every = group.collectives.compare([seed, _digest_of(arguments)])
    if len({digest for _, digest in every}) > 1:
        raise SMPError(
            "the ranks that share sequences (CP_GROUP) must call a step function with the same "
            f"batch; received different ones on the {group.size} of them: choose batches "
            "by smp.dp_rank() and smp.dp_size(), which leave these ranks out, and shuffle with "
            "one seed."
        )
    return every[0][0]


def _digest_of(arguments: Sequence[Argument]) -> int:
    """Returns a number by which ranks know that they were called with the same."""
    digest = hashlib.blake2b(digest_size=7)
    for label, _, tensor in arguments:
        digest.update(f"{label}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        digest.update(data.to("cpu").numpy().data)
    return int.from_bytes(digest.digest(), "little")
