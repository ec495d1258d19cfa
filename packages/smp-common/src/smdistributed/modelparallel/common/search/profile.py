"""What a step of a model costs, as it was recorded: plain data, which a process writes for another.

Figures are of one microbatch, and follow its number of examples; those of parameters do not.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from smdistributed.modelparallel.common.config import Framework
from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.planning.pass_costs import PassCosts
from smdistributed.modelparallel.common.planning.pass_tape import PassTape, Span

#: What most products of the model compute in.
Precision = Literal["half", "tf32", "single"]

#: Whether passes may be captured as CUDA graphs: ``smp.step(cuda_graphs=...)``.
Graphs = bool | Literal["auto"]

#: Names the file that a process writes the profile of its first training step to; it then ends.
PROFILE_VARIABLE = "SMP_PROFILE"
#: Names the kind of device that is planned for, if that is known. Where it is one of the process,
#: operations are timed on it.
PROFILE_DEVICE_VARIABLE = "SMP_PROFILE_DEVICE"

_VERSION = 4
_COMPUTATIONS = ("computation", "recomputed")


@dataclass(frozen=True)
class Computation:
    """What a forward pass does; a backward pass follows from that.

    Attributes:
        of_weights: floating-point operations of products with weights.
        of_others: those of other products.
        moved_bytes: that all else reads and writes.
        num_kernels: operations that compute something.
        num_modules: modules that are called.
    """

    of_weights: float = 0.0
    of_others: float = 0.0
    moved_bytes: float = 0.0
    num_kernels: float = 0.0
    num_modules: float = 0.0

    def __add__(self, other: Computation) -> Computation:
        names = [each.name for each in dataclasses.fields(self)]
        return Computation(*(getattr(self, name) + getattr(other, name) for name in names))

    def times(self, factor: float) -> Computation:
        """Returns that for ``factor`` times as many examples: no more kernels, but longer ones."""
        return dataclasses.replace(
            self,
            of_weights=factor * self.of_weights,
            of_others=factor * self.of_others,
            moved_bytes=factor * self.moved_bytes,
        )


@dataclass(frozen=True)
class Figures:
    """What a part of a model costs.

    Attributes:
        computation: of its forward pass.
        recomputed: of it, what the backward pass computes again.
        parameter_bytes: of parameters and buffers; a shared one counts at one of its units only.
        gradient_bytes: of the gradients of those that train.
        trained_elements: how many numbers of them train.
        small_elements: of these, those of parameters that stay whole where others are in shards.
        optimizer_bytes: what the optimizer keeps for them, masters included.
        made_bytes: of all tensors that its forward pass makes.
        kept_bytes: of those that it keeps for the backward pass, where the profile has no tape.
        sliced_elements: of the numbers that train, those that ranks of a tensor-parallel group
            share out.
        exchanged_bytes: what a forward pass gathers from such ranks, and sums over them, of one.
        update_bytes: what the optimizer's update reads and writes, where that was counted.
        update_made_bytes: of the tensors that are there besides in an update.
        timed: seconds of the passes on a device, for so many times as many examples; ascending.
            Empty where they were not timed.
    """

    computation: Computation = Computation()
    recomputed: Computation = Computation()
    parameter_bytes: float = 0.0
    gradient_bytes: float = 0.0
    trained_elements: float = 0.0
    small_elements: float = 0.0
    optimizer_bytes: float = 0.0
    made_bytes: float = 0.0
    kept_bytes: float = 0.0
    sliced_elements: float = 0.0
    exchanged_bytes: float = 0.0
    update_bytes: float = 0.0
    update_made_bytes: float = 0.0
    timed: tuple[tuple[float, PassCosts], ...] = ()

    def __add__(self, other: Figures) -> Figures:
        names = [each.name for each in dataclasses.fields(self) if each.name != "timed"]
        sums = (getattr(self, name) + getattr(other, name) for name in names)
        timed = self.timed or other.timed
        if self.timed and other.timed:
            pairs = zip(self.timed, other.timed, strict=True)
            timed = tuple((factor, one + another) for (factor, one), (_, another) in pairs)
        return dataclasses.replace(Figures(*sums), timed=timed)

    @property
    def seconds(self) -> PassCosts | None:
        """What the passes take on the device that they were timed on; None if they were not.

        Between numbers of examples that were timed a pass takes what lies between.
        """
        if not self.timed:
            return None
        if len(self.timed) == 1:
            [(factor, costs)] = self.timed
            return costs.times(1 / factor)
        pairs = list(itertools.pairwise(self.timed))
        (low, less), (high, more) = next((pair for pair in pairs if pair[1][0] >= 1), pairs[-1])
        share = max(0.0, (1 - low) / (high - low))
        return less + (more - less).times(share)

    @property
    def share_in_shards(self) -> float:
        """The share of parameters that can be cut into shards."""
        if not self.trained_elements:
            return 0.0
        return 1.0 - self.small_elements / self.trained_elements

    def times(self, factor: float) -> Figures:
        """Returns that for ``factor`` times as many examples."""
        return dataclasses.replace(
            self,
            computation=self.computation.times(factor),
            recomputed=self.recomputed.times(factor),
            made_bytes=factor * self.made_bytes,
            kept_bytes=factor * self.kept_bytes,
            exchanged_bytes=factor * self.exchanged_bytes,
            timed=tuple((other / factor, costs) for other, costs in self.timed),
        )

    def in_slices(self, slices: int) -> Figures:
        """Returns that of one of the ranks of a tensor-parallel group.

        Each computes its part for the examples of all, which is as much as all for its own.
        """
        if slices == 1 or not self.trained_elements:
            return self
        cut = self.sliced_elements / self.trained_elements
        left = 1.0 - cut + cut / slices
        return dataclasses.replace(
            self,
            parameter_bytes=left * self.parameter_bytes,
            gradient_bytes=left * self.gradient_bytes,
            trained_elements=left * self.trained_elements,
            small_elements=min(self.small_elements, left * self.trained_elements),
            optimizer_bytes=left * self.optimizer_bytes,
            sliced_elements=cut * self.trained_elements / slices,
        )


@dataclass(frozen=True)
class UnitProfile:
    """A module of a model, as ``planning.cost_tree.Unit`` has it.

    Attributes:
        name: unique in the model.
        order: position of its first call.
        splittable: whether its children may lie apart.
        own: its figures, without its children's.
        output_bytes: what crosses a cut behind it.
        shared: keys of its own parameters that other units hold too.
        children: in order of execution.
        spans: its own operations on the tape of the profile.
        is_again: it is the outermost module of a call that the backward pass computes again.
        balanced: where jobs of its framework do not count as a plan does, computation and memory of
            its own by which they balance partitions, for each word of ``optimize``.
    """

    name: str
    order: int
    splittable: bool
    own: Figures
    output_bytes: float = 0.0
    shared: tuple[str, ...] = ()
    children: tuple[UnitProfile, ...] = ()
    spans: tuple[Span, ...] = ()
    is_again: bool = False
    balanced: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def walk(self) -> Iterator[UnitProfile]:
        """Yields this unit and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class ModelProfile:
    """A step of a script, recorded in one process.

    Attributes:
        framework: that the script is for.
        step: name of the step function.
        optimizer: name of the class of the optimizer; "" where there was none yet.
        batch: examples of a call, in one process: of all replicas together.
        examples: of the microbatch that was recorded.
        precision: that most products are in.
        root: the model.
        beside: figures of what the step function computes outside of all modules, such as a loss.
        tape: what the passes of the microbatch hold; None where the figures are to say it.
        given_bytes: of the batch of a call.
        timed_on: the kind of device that passes were timed on; "" where they were not.
        settings: the parameters that the script, or its launcher, gave, by their main names.
        memory_weight: of the partition.
        memory_weights: the same, for each word of ``optimize`` by which jobs balance it otherwise.
        most_gathered: elements of sharded parameters that are whole at a time.
        has_buckets: whether replicas keep gradients in buckets besides.
        adds_gradients: whether the gradients of a microbatch are there beside the sum of those
            before, to which they are added.
        graphs: whether the step function asks for CUDA graphs.
        stacks: the names of the units that are blocks, for each stack of them.
        notes: what a reader of the plan should know.
    """

    framework: Framework
    step: str
    optimizer: str
    batch: int
    examples: int
    precision: Precision
    root: UnitProfile
    beside: Figures = Figures()
    tape: PassTape | None = None
    given_bytes: float = 0.0
    timed_on: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    memory_weight: float = 0.8
    memory_weights: Mapping[str, float] = field(default_factory=dict)
    most_gathered: int = 1_000_000_000
    has_buckets: bool = True
    adds_gradients: bool = False
    graphs: Graphs = "auto"
    stacks: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Returns the profile as text."""
        return json.dumps({"version": _VERSION, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ModelProfile:
        """Reads what ``to_json`` has written.

        Raises:
            ConfigError: it is of another version.
        """
        document = json.loads(text)
        version = document.pop("version", None)
        if version != _VERSION:
            raise ConfigError(
                f"a profile is read by the version of the library that wrote it (format "
                f"{_VERSION}); received format {version!r}: record the step again."
            )
        root = _unit(document.pop("root"))
        beside = _figures(document.pop("beside"))
        tape = document.pop("tape")
        notes = tuple(document.pop("notes"))
        stacks = tuple(map(tuple, document.pop("stacks")))
        return cls(
            **document,
            root=root,
            beside=beside,
            tape=tape and PassTape.from_document(tape),
            notes=notes,
            stacks=stacks,
        )

    @property
    def is_sliced(self) -> bool:
        """Whether the script has modules that tensor-parallel ranks would share."""
        return any(unit.own.sliced_elements for unit in self.root.walk())

    @property
    def recomputes(self) -> bool:
        """Whether the script has modules computed again itself."""
        return any(unit.own.recomputed != Computation() for unit in self.root.walk())

    def with_checkpoints(self, every: int) -> ModelProfile:
        """Returns the profile if every so manieth block of a stack is computed again; 0 for none.

        A block then keeps what it is given, which is as large as what it gives.
        """
        chosen = {name for stack in self.stacks for name in stack[::every]} if every else set()
        return dataclasses.replace(self, root=_again(self.root, chosen))


def _again(unit: UnitProfile, chosen: Container[str]) -> UnitProfile:
    if unit.name not in chosen:
        children = tuple(_again(child, chosen) for child in unit.children)
        return dataclasses.replace(unit, children=children)

    def repeated(each: UnitProfile) -> UnitProfile:
        own = dataclasses.replace(each.own, recomputed=each.own.computation)
        children = tuple(map(repeated, each.children))
        return dataclasses.replace(each, own=own, is_again=each is unit, children=children)

    return repeated(unit)


def _unit(document: dict[str, Any]) -> UnitProfile:
    own = _figures(document.pop("own"))
    children = tuple(_unit(child) for child in document.pop("children"))
    shared, balanced = tuple(document.pop("shared")), document.pop("balanced")
    spans = tuple((start, end) for start, end in document.pop("spans"))
    return UnitProfile(
        **document,
        own=own,
        shared=shared,
        children=children,
        spans=spans,
        balanced={word: tuple(costs) for word, costs in balanced.items()},
    )


def _figures(document: dict[str, Any]) -> Figures:
    computation, recomputed = (Computation(**document.pop(name)) for name in _COMPUTATIONS)
    timed = tuple((factor, PassCosts(**costs)) for factor, costs in document.pop("timed"))
    return Figures(computation, recomputed, **document, timed=timed)
