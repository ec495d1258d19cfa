"""What the modules of a model are called with, as far as that can be told before the first step."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import (
    FakeTensorMode,
    inside_transform,
    pytree,
    quiet_fakes,
)
from smdistributed.modelparallel.torch.compat.transformers_runs import (
    transformers_as_in_a_real_run,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.calls import Call
from smdistributed.modelparallel.torch.tensor_parallel.auto.maps import is_map
from smdistributed.modelparallel.torch.tensor_parallel.auto.template import copied_with
from smdistributed.modelparallel.torch.tensors.reads import Reads
from smdistributed.modelparallel.torch.trial.alone import alone

#: Models of more numbers are not run for real to see how their modules are called.
_MOST_FOR_REAL = 100_000_000
_EXAMPLES, _LENGTH = 2, 6
#: Of sound.
_SAMPLES = 4000


@dataclass
class Trial:
    """What was seen while a model ran.

    Attributes:
        calls: the first call of each module that was asked for.
        called: the modules that were called at all.
        read: the linear maps whose weights code has read by itself.
        transformed: the modules that a transform of torch.func has called.
        failure: what ended the run before its end.
    """

    calls: dict[nn.Module, Call] = field(default_factory=dict)
    called: set[nn.Module] = field(default_factory=set)
    read: set[nn.Module] = field(default_factory=set)
    transformed: set[nn.Module] = field(default_factory=set)
    failure: Exception | None = None


class Running:
    """The calls that are in progress in a trial.

    Args:
        pairs: the modules of the copy that runs, and those of the model.

    Attributes:
        pairs: as given.
        called: the modules of the copy, the innermost last.
    """

    def __init__(self, pairs: Mapping[nn.Module, nn.Module]) -> None:
        self.pairs = pairs
        self.called: list[nn.Module] = []

    def left(self, module: nn.Module, args: Any, result: Any) -> None:
        """Notes the end of a call."""
        self.called.pop()


def calls_within(
    model: nn.Module, modules: Iterable[nn.Module], inputs: Any, *, has_values: bool
) -> Trial:
    """Runs a copy of a model, on fakes, and if it cannot run on them, for real if it is small.

    Args:
        model: to run.
        modules: of it, whose calls are asked for.
        inputs: a dict of keywords, or a tuple of arguments, or one argument.
        has_values: whether its parameters have values.
    """
    args, kwargs = _arguments(inputs)
    trial = Trial()
    ways = [_run_on_fakes]
    if has_values and sum(each.numel() for each in model.parameters()) <= _MOST_FOR_REAL:
        ways.append(_run)
    for run in ways:
        try:
            # What the code keeps in its modules must not outlive the trial.
            copied = copied_with(
                model, _without_memory if run is _run_on_fakes else torch.clone, torch.clone
            )
            pairs = dict(zip(copied.modules(), model.modules(), strict=True))
            with _noting(pairs, set(modules), trial) as running:
                one = functools.partial(run, copied.eval(), args, kwargs, running, trial)
                alone(one, copied.modules())
        except Exception as error:  # whatever the model's code does
            trial.failure = error
        else:
            trial.failure = None
            break
    return trial


def _without_memory(parameter: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


def chosen_by_data(model: nn.Module, called: set[nn.Module]) -> set[nn.Module]:
    """Returns modules that are called or not as data say: siblings of them were not called.

    Ranks bring other data, and would call others.
    """
    found: set[nn.Module] = set()
    for container in model.modules():
        if not isinstance(container, nn.ModuleList | nn.ModuleDict):
            continue
        alike: dict[str, list[nn.Module]] = {}
        for child in container.children():
            for name, module in child.named_modules():
                alike.setdefault(name, []).append(module)
        for modules in alike.values():
            number = sum(each in called for each in modules)
            if 0 < number < len(modules):
                found.update(inner for each in modules for inner in each.modules())
    return found


def inputs_of_transformers(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Returns inputs for a model of Transformers; None for any other, or where none are known."""
    config = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None)
    if config is None or not isinstance(name, str) or "transformers" not in _origins(model):
        return None
    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(vision, "num_channels", 3)
        return {name: torch.zeros(_EXAMPLES, channels, height, width)}
    if name == "input_values":
        return {name: torch.zeros(_EXAMPLES, _SAMPLES)}
    if name != "input_ids":
        return None
    tokens = torch.ones(_EXAMPLES, _LENGTH, dtype=torch.int64)
    found = {"input_ids": tokens}
    takes = inspect.signature(model.forward).parameters
    if "decoder_input_ids" in takes:
        found["decoder_input_ids"] = tokens
    return found


def with_padding(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns inputs for a model of Transformers with padding; none where it takes none.

    Modules may be called with masks then, in another form.
    """
    if (
        "input_ids" not in inputs
        or "attention_mask" not in inspect.signature(model.forward).parameters
    ):
        return {}
    mask = torch.ones_like(inputs["input_ids"])
    mask[-1, -1] = 0
    return {**inputs, "attention_mask": mask}


def guesses(module: nn.Module, width: int) -> Iterator[Call]:
    """Yields calls that a module may take: tensors of its first linear map's width."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return
    positional = [
        each
        for each in parameters
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        and each.default is each.empty
    ]
    number = max(1, len(positional))
    for shape in ((_EXAMPLES, _LENGTH, width), (_EXAMPLES, width)):
        yield Call(((torch.empty(shape), *[None] * (number - 1)), {}))
        if number > 1:
            yield Call((tuple(torch.empty(shape) for _ in range(number)), {}))


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def _origins(model: nn.Module) -> set[str]:
    return {kind.__module__.partition(".")[0] for kind in type(model).__mro__}


def _run(model: nn.Module, args: Any, kwargs: Any, running: Running, trial: Trial) -> None:
    reads = _reads(model, dict(model.named_parameters()), running)
    with torch.no_grad(), reads:
        model(*args, **kwargs)
    trial.read.update(running.pairs[each] for each in reads.found)


def _reads(
    model: nn.Module, given: Mapping[str, torch.Tensor], running: Running
) -> Reads[nn.Module]:
    """Returns what notes reads of the parameters that linear maps are given."""
    whose = {}
    for owner, inner in model.named_modules():
        for name, _ in inner.named_parameters(owner, recurse=False) if is_map(inner) else ():
            if name in given:  # what is shared stays whole anyway
                whose[id(given[name])] = inner
    return Reads(whose, running.called.__contains__)


def _run_on_fakes(model: nn.Module, args: Any, kwargs: Any, running: Running, trial: Trial) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), quiet_fakes(), transformers_as_in_a_real_run(), mode:

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

        given = {name: fake(each) for name, each in model.named_parameters()}
        given |= {name: fake(each) for name, each in model.named_buffers()}
        args, kwargs = pytree.tree_map_only(torch.Tensor, fake, (args, kwargs))
        reads = _reads(model, given, running)
        with reads:
            torch.func.functional_call(model, given, args, kwargs)
    trial.read.update(running.pairs[each] for each in reads.found)


@contextlib.contextmanager
def _noting(
    pairs: Mapping[nn.Module, nn.Module], asked: set[nn.Module], trial: Trial
) -> Iterator[Running]:
    running = Running(pairs)

    def note(module: nn.Module, args: Any, kwargs: Any) -> Any:
        original = pairs[module]
        trial.called.add(original)
        if inside_transform():
            trial.transformed.add(original)
        running.called.append(module)
        if original not in asked:
            return None
        try:
            call = Call((args, kwargs))
        except UnsupportedError:
            return None
        trial.calls.setdefault(original, call)
        return call.filled(call.tensors)  # as a group would be called: caches stay empty

    with contextlib.ExitStack() as stack:
        for module in pairs:
            stack.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(running.left, always_call=True).remove)
        yield running
