"""What may be tried of a module: plans to split it, the likeliest and cheapest first.

Linear maps that read what every rank has whole are split along their outputs, those that read what
these made along their inputs. What these give are shares of sums. Where such sums leave the module,
alone or added to what every rank has, nothing is exchanged before; where code goes on with one, it
is summed there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import torch

from smdistributed.modelparallel.torch.tensor_parallel.auto.calls import Call
from smdistributed.modelparallel.torch.tensor_parallel.auto.draws import NotedDraws
from smdistributed.modelparallel.torch.tensor_parallel.auto.maps import is_linear, is_map, sizes_of
from smdistributed.modelparallel.torch.tensor_parallel.auto.outputs import RefutedError
from smdistributed.modelparallel.torch.tensor_parallel.auto.part_linear import Section
from smdistributed.modelparallel.torch.tensor_parallel.auto.plan import Plan
from smdistributed.modelparallel.torch.tensor_parallel.auto.roles import Origins
from smdistributed.modelparallel.torch.tensor_parallel.auto.template import Template
from smdistributed.modelparallel.torch.trial.alone import alone

#: Of what was seen as several dims, as many as this may be fused: query, key and value.
_MOST_FUSED = 3
#: Maps may stay whole in a group if others in it have so many times as many numbers.
_LEAST_SPLIT = 2
#: The same of maps whose weights alone stay whole.
_LEAST_PARTLY = 2 / 3
_COUNTS_HEADS = re.compile(r"head")
_NOT_COUNTS = re.compile(r"dim|size|mask|hidden|layer")
_OF_ONE_HEAD = re.compile(r"head_(dim|size)$|kv_channels$")

Names = tuple[str, ...]


class OtherKindError(RefutedError):
    """A module is looked at for what another attempt looks for; says what it lacks."""


@dataclass(frozen=True)
class _Roles:
    """What the linear maps and attentions of a module do, in the order of their calls.

    Attributes:
        columns: read what every rank has whole.
        rows: read what columns made, and give shares of sums.
        attentions: those of torch, which do both.
        gone_on_with: of rows and attentions, those whose sums others read.
    """

    columns: Names
    rows: Names
    attentions: Names
    gone_on_with: Names

    def ends(self, *, goes_on: bool) -> Iterator[tuple[Names, bool]]:
        """Yields what is summed in the module, and whether the rest leaves in a mean.

        Args:
            goes_on: other things may be computed with sums in it.

        Raises:
            RefutedError: that must be.
        """
        summing = (*self.rows, *self.attentions)
        if not self.gone_on_with:
            yield (), False
        elif not goes_on:
            raise RefutedError(
                f"it goes on with the sum that {self.gone_on_with[0]} makes, and is the model, or "
                "mostly tables and kernels, or has hooks or results of modules in it that others "
                "look at, or was not seen to call all of its linear maps"
            )
        if goes_on:
            if len(self.gone_on_with) < len(summing):
                yield self.gone_on_with, True
            yield summing, False


def plans_of(
    template: Template, call: Call, size: int, *, closes: bool, goes_on: bool
) -> Iterator[Plan]:
    """Yields what may be proven.

    Args:
        template: of the module.
        call: of it.
        size: how many ranks there are.
        closes: look for sums alone; else for results that leave split.
        goes_on: a module may go on with sums in it, or add them to what every rank has.

    Raises:
        RefutedError: there is nothing.
    """
    for name in template.attentions:
        _check_divides(size, "num_heads", template.attentions[name].num_heads, name or "it")
    if "" in template.attentions:  # it is one
        yield Plan(attentions=("",))
        return
    origins = alone(lambda: _origins(template, call), template.module.modules())
    # A call with a part that this one leaves out, as cross attention, may go on with other sums.
    goes_on &= origins.read_by.keys() == {*template.linears, *template.attentions}
    reason: RefutedError | None = None
    for whole in _kept_whole(origins, template):
        try:
            roles = _roles(origins, template, whole)
            yield from _plans_with(
                *(roles, origins, template, size), closes=closes, goes_on=goes_on
            )
        except RefutedError as error:
            reason = reason or error
    if reason is not None:
        raise reason


def _plans_with(
    roles: _Roles, origins: Origins, template: Template, size: int, *, closes: bool, goes_on: bool
) -> Iterator[Plan]:
    """Yields what may be proven where it is known what each linear map does."""
    if bool(roles.rows or roles.attentions) is not closes:
        raise OtherKindError("none of its linear maps sums what others have split")
    widths = set()
    for name in roles.columns:
        widths.add(sizes_of(template.linears[name])[1])
        _check_divides(size, "out_features", sizes_of(template.linears[name])[1], name)
    for name in roles.rows:
        widths.add(sizes_of(template.linears[name])[0])
        _check_divides(size, "in_features", sizes_of(template.linears[name])[0], name)
    of_rows = {sizes_of(template.linears[name])[0] for name in roles.rows}
    for fused, partly in _fusions(origins, roles.columns, of_rows, template, size):
        more = {length for lengths in fused.values() for length in lengths}
        for divided in _divisions(template, widths | more, size):
            for sums, is_mean in roles.ends(goes_on=goes_on) if closes else [((), False)]:
                yield Plan(
                    *(roles.columns, roles.rows, divided, tuple(fused.items())),
                    partly=tuple(partly.items()),
                    attentions=roles.attentions,
                    sums=sums,
                    is_mean=is_mean,
                )


def _check_divides(size: int, what: str, number: int, name: str) -> None:
    if number % size:
        raise RefutedError(
            f"tensor_parallel_degree ({size}) must divide {what} ({number}) of {name}"
        )


def _fusions(
    origins: Origins, columns: Sequence[str], of_rows: Set[int], template: Template, size: int
) -> Iterator[tuple[dict[str, tuple[int, ...]], dict[str, tuple[Section, ...]]]]:
    """Yields what may be fused in the outputs of linear maps, and what of that stays whole.

    That is: nothing, then what was cut apart, then with less than the maps that follow read whole.
    """
    cuts = {name: origins.cuts[name] for name in columns if name in origins.cuts}
    folds = {
        name: origins.folds[name]
        for name in columns
        if name in origins.folds and len(origins.folds[name]) <= _MOST_FUSED
    }
    seen: list[dict[str, tuple[int, ...]]] = []
    for found in ({}, cuts, {**folds, **cuts}):
        divides = all(length % size == 0 for lengths in found.values() for length in lengths)
        if found not in seen and divides:
            seen.append(found)
            yield found, {}
    partly = {}
    for name in columns:
        outputs = sizes_of(template.linears[name])[1]
        first = max((each for each in of_rows if each < outputs), default=0)
        lengths = cuts.get(name, (first, outputs - first))
        sections = tuple(Section(each, each >= min(of_rows, default=0)) for each in lengths)
        if (
            first
            and len({each.is_split for each in sections}) > 1
            and is_linear(template.linears[name])
        ):
            partly[name] = sections
    is_shared = all(not each.length % size for s in partly.values() for each in s if each.is_split)
    if partly and is_shared and _is_small(frozenset(partly), template, _LEAST_PARTLY):
        yield {name: each for name, each in cuts.items() if name not in partly}, partly


def _origins(template: Template, call: Call) -> Origins:
    """Follows tensors through a call."""
    draws = torch.Generator().manual_seed(2)
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)  # of what code makes
    module = template.made(draws, dtype)
    args, kwargs = call.sample(call.forms, draws, dtype)
    origins = Origins(module)
    try:
        with torch.no_grad(), NotedDraws(), origins:
            module(*args, **kwargs)
    except Exception as error:  # any code may run here
        first = (str(error).splitlines() or [""])[0]
        raise RefutedError(f"a trial call failed: {type(error).__name__}: {first}") from error
    return origins


def _kept_whole(origins: Origins, template: Template) -> Iterator[frozenset[str]]:
    """Yields linear maps that every rank may have whole: none, then small ones.

    They are maps of keys for few heads, or those whose results other maps make heads of. Each rank
    computes them for the calls of all.
    """
    first = [
        name for name, read in origins.read_by.items() if not read and name in template.linears
    ]
    widest = max((sizes_of(template.linears[name])[1] for name in first), default=0)
    narrow = {name for name in first if sizes_of(template.linears[name])[1] < widest}
    seen: list[frozenset[str]] = []
    for names in ((), narrow, first):
        whole = frozenset(names)
        if whole not in seen and (not whole or _is_small(whole, template)):
            seen.append(whole)
            yield whole


def _is_small(names: frozenset[str], template: Template, least: float = _LEAST_SPLIT) -> bool:
    """Whether some linear maps are small beside the others, which have so many times as much."""
    sizes = {name: each.weight.numel() for name, each in template.linears.items()}
    kept = sum(sizes[name] for name in names)
    return bool(least * kept <= sum(sizes.values()) - kept)


def _roles(origins: Origins, template: Template, whole: frozenset[str]) -> _Roles:
    """Returns what linear maps do, as they were seen to read each other's results.

    Args:
        origins: what each reads.
        template: of the module.
        whole: those that are not split.

    Raises:
        RefutedError: there is nothing to split so.
    """
    columns: dict[str, None] = {}
    rows: dict[str, None] = {}
    attentions: dict[str, None] = {}
    for name, read in origins.read_by.items():
        if name in whole:
            continue
        reads_slices = not columns.keys().isdisjoint(read)
        if name not in template.attentions:
            (rows if reads_slices else columns)[name] = None
        elif reads_slices:
            raise RefutedError(f"{name} reads what others have split")
        else:
            attentions[name] = None
    if not columns and not attentions:
        raise RefutedError("none of its linear maps reads its arguments alone")
    read_of_all = frozenset[str]().union(*origins.read_by.values())
    summing = (*rows, *attentions)
    gone_on_with = tuple(name for name in summing if name in read_of_all)
    return _Roles(tuple(columns), tuple(rows), tuple(attentions), gone_on_with)


def _divisions(
    template: Template, widths: set[int], size: int
) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yields sets of attributes to divide, but for those that other modules read too.

    They are: none, those that count heads, these and widths, and these and what counts heads in a
    configuration.
    """
    heads, more, configured = [], [], []
    for owner, inner in template.module.named_modules():
        if is_map(inner) or owner in template.shared or owner in template.attentions:
            continue
        for name, value in vars(inner).items():
            if _counts_heads(name, value, size):
                heads.append((owner, name))
            elif _divides(value, size) and value in widths and not _OF_ONE_HEAD.search(name):
                more.append((owner, name))
        config = vars(inner).get("config")
        if type(config).__name__.endswith("Config"):
            configured += [
                (owner, f"config.{name}")
                for name, value in vars(config).items()
                if _counts_heads(name, value, size)
            ]
    yield ()
    if heads:
        yield tuple(heads)
    if more:
        yield (*heads, *more)
    if configured:
        yield (*heads, *configured)


def _divides(value: object, size: int) -> bool:
    return type(value) is int and value > 1 and value % size == 0


def _counts_heads(name: str, value: object, size: int) -> bool:
    is_count = _COUNTS_HEADS.search(name) and not _NOT_COUNTS.search(name)
    return bool(is_count) and _divides(value, size)
