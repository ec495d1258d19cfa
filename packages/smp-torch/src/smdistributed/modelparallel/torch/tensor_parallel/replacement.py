"""Putting distributed modules in the places of those that the user marked.

Each keeps the values of the module that it replaces: those that the first rank of the group has,
of which every rank takes its slices. With delayed parameters it keeps how these values come about.
"""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.building.delayed_parameters import DelayedParameters
from smdistributed.modelparallel.torch.compat.private.compiled import written
from smdistributed.modelparallel.torch.tensor_parallel.additions import additions_to
from smdistributed.modelparallel.torch.tensor_parallel.auto.group import Found, close
from smdistributed.modelparallel.torch.tensor_parallel.auto.plan import cut
from smdistributed.modelparallel.torch.tensor_parallel.auto.planning import (
    check_agreed,
    plan_groups,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.search import AutoPlan
from smdistributed.modelparallel.torch.tensor_parallel.experts.finding import (
    check_stacks_agreed,
    find_stacks,
)
from smdistributed.modelparallel.torch.tensor_parallel.experts.spread import spread
from smdistributed.modelparallel.torch.tensor_parallel.experts.stack import Stack, looks_stacked
from smdistributed.modelparallel.torch.tensor_parallel.group import TensorGroup
from smdistributed.modelparallel.torch.tensor_parallel.marks import Mark
from smdistributed.modelparallel.torch.tensor_parallel.module import (
    DistributedModule,
    without_values,
)
from smdistributed.modelparallel.torch.tensor_parallel.registry import (
    Hook,
    Registration,
    hooked,
    registration_of,
)
from smdistributed.modelparallel.torch.tensor_parallel.values import ValuesOfFirst

logger = logging.getLogger(__name__)

#: Of so many modules that stay whole the log tells, the largest.
_MOST_TOLD = 5

#: Finds how a module is distributed that the user has not registered.
BuiltIn = Callable[[nn.Module], Registration | None]


class Marks(Protocol):
    """What the user asks of modules."""

    def of(self, module: nn.Module) -> Mark | None:
        """Returns what is asked of a module; None if nothing is."""


def replace_marked(
    model: nn.Module,
    marks: Marks,
    built_in: BuiltIn,
    group: TensorGroup,
    delayed: DelayedParameters,
    everyones: Callable[[Any], list[Any]],
    *,
    spreads_experts: bool = False,
) -> nn.Module:
    """Replaces the outermost marked modules that have a distributed version.

    Collective: WORLD.

    Args:
        model: the user's model; changed in place.
        marks: what the user asks for.
        built_in: finds how a module is distributed that the user has not registered.
        group: the ranks that split modules.
        delayed: the parameters that have no values yet.
        everyones: gives the objects of all ranks of the job.
        spreads_experts: stacks of experts are spread over the ranks, marked or not.

    Returns:
        the model, or what stands in its place.

    Raises:
        SMPError: the ranks have different models.
    """
    return _Replacing(
        model, marks, built_in, group, delayed, everyones, spreads_experts=spreads_experts
    ).run()


class _Replacing:
    """One walk through a model."""

    def __init__(
        self,
        model: nn.Module,
        marks: Marks,
        built_in: BuiltIn,
        group: TensorGroup,
        delayed: DelayedParameters,
        everyones: Callable[[Any], list[Any]],
        *,
        spreads_experts: bool,
    ) -> None:
        self._model = model
        self._spreads_experts = spreads_experts
        self._marks = marks
        self._built_in = built_in
        self._group = group
        self._delayed = delayed
        self._values = ValuesOfFirst(group, delayed)
        self._everyones = everyones
        self._auto = AutoPlan()
        self._stacks: dict[nn.Module, Stack] = {}
        self._done: dict[nn.Module, nn.Module] = {}
        self._seen: list[Mark] = []
        self._wrapped = {written(each) for each in model.modules() if written(each) is not each}
        self._holders: dict[int, set[nn.Module]] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._holders.setdefault(id(parameter), set()).add(module)
        #: In how many places each module is.
        self._places = collections.Counter(
            child for module in model.modules() for child in module._modules.values()
        )

    def run(self) -> nn.Module:
        self._stacks = self._find_stacks()
        self._auto = self._find_groups()
        total = sum(each.numel() for each in self._model.parameters())
        replaced = self._visit(self._model, "")
        if any(mark.config.get("auto") for mark in self._seen):
            _tell_what_stays_whole(replaced, total)
        _without_nested_tensors(replaced)
        for mark in self._seen:
            unused = sorted(set(mark.config) - mark.used)
            if unused and not mark.has_told:
                mark.has_told = True
                logger.warning(
                    "no distributed module takes %s, which tensor parallelism was asked for with.",
                    ", ".join(unused),
                )
        return replaced

    def _visit(self, module: nn.Module, name: str) -> nn.Module:
        """Returns what stands in a module's place, and replaces what is inside it."""
        if module in self._done:
            return self._done[module]
        self._done[module] = module
        if isinstance(module, DistributedModule):
            return module
        mark = self._marks.of(module)
        if mark is not None:
            if mark not in self._seen:
                self._seen.append(mark)
                mark.used.add("auto")
            registration = registration_of(module) or self._built_in(module)
            if mark.enabled and registration is not None:
                made = self._replaced(module, name, mark, registration)
                if made is not None:
                    self._done[module] = made
                    return made
        if module in self._auto.groups:
            self._close(module, self._auto.groups[module])
            return module
        if module in self._stacks:
            self._spread(module, self._stacks[module])
            return module
        # Each name, also where two are of one module.
        for child_name, child in list(module._modules.items()):
            if child is None:
                continue
            inside = self._visit(child, f"{name}.{child_name}" if name else child_name)
            if inside is not child:
                module._modules[child_name] = inside
        return module

    def _find_stacks(self) -> dict[nn.Module, Stack]:
        """Returns the stacks of experts that the ranks have between them, and how.

        Collective: WORLD.
        """
        if self._group.size == 1:
            return {}
        wanted = {
            module: name
            for module, name in self._open_modules(self._model, "")
            if looks_stacked(module) and self._spreads(module)
        }
        own = {each: self._kept_with(each) for each in wanted}
        found, reasons = find_stacks(own, self._group.size)
        check_stacks_agreed(found, wanted, self._everyones)
        total = sum(each.numel() for each in self._model.parameters())
        for module, reason in reasons.items():
            part = sum(each.numel() for each in module.parameters())
            logger.warning(
                "%s (%s), %.0f%% of the parameters of the model, stays whole on every rank: %s",
                wanted[module] or "the model",
                type(module).__name__,
                100 * part / total,
                reason,
            )
        if self._spreads_experts and not found:
            logger.warning(
                "expert_parallel_degree is %d, and no stack of experts was found that may be "
                "spread and is not excluded from tensor parallelism: every rank has the whole "
                "model.",
                self._group.size,
            )
        return found

    def _spreads(self, module: nn.Module) -> bool:
        """Whether the experts that a module may be a stack of are to be spread."""
        mark = self._marks.of(module)
        if mark is None:
            return self._spreads_experts
        return mark.enabled and (self._spreads_experts or bool(mark.config.get("auto")))

    def _kept_with(self, module: nn.Module) -> str | None:
        """Returns why a module stays as it is for what else there is in the model."""
        if self._places[module] > 1:
            return "several modules have it"
        return self._shared_weight(module) or self._kept_as_it_is(module)

    def _spread(self, module: nn.Module, stack: Stack) -> None:
        """Gives this rank its share of a stack of experts."""
        whole = self._values.translated(dict(module.state_dict(keep_vars=True)), None)
        before = dict(module.named_parameters())
        spread(module, stack)
        for each, tensor in whole.items():
            self._values.put(module, each, tensor, before[each])

    def _find_groups(self) -> AutoPlan:
        """Returns the modules that are split as they are, and how."""
        if self._group.size == 1:
            return AutoPlan()
        candidates: dict[nn.Module, str] = {}
        inputs = None
        for module, name in self._open_modules(self._model, ""):
            mark = self._marks.of(module)
            if mark is None or not mark.enabled or not mark.config.get("auto"):
                continue
            mark.used.add("sample_inputs")
            inputs = mark.config.get("sample_inputs", inputs)
            candidates[module] = name
        delayed = self._delayed

        def value_of(tensor: torch.Tensor) -> torch.Tensor:
            return delayed.compute(tensor) if delayed.holds(tensor) else tensor

        plan = AutoPlan()
        if candidates:
            plan = plan_groups(
                self._model,
                candidates,
                inputs,
                self._group,
                value_of,
                self._is_free,
                has_values=not any(map(delayed.holds, self._model.parameters())),
            )
        check_agreed(plan, candidates, self._everyones)
        return plan

    def _open_modules(self, module: nn.Module, name: str) -> Iterator[tuple[nn.Module, str]]:
        """Yields the modules that no distributed version takes the place of, outermost first."""
        if not self._is_taken(module):
            yield module, name
            for child_name, child in module.named_children():
                yield from self._open_modules(child, f"{name}.{child_name}" if name else child_name)

    def _is_taken(self, module: nn.Module) -> bool:
        """Whether a distributed version takes the place of a module."""
        registration = registration_of(module) or self._built_in(module)
        mark = self._marks.of(module)
        if mark is None or not mark.enabled or registration is None:
            return False
        if registration.needed is not None or self._kept_as_it_is(module) is not None:
            return False
        return registration.refusal is None or registration.refusal(module) is None

    def _kept_as_it_is(self, module: nn.Module) -> str | None:
        """Returns why nothing can take the place of a module for what the script has done to it."""
        if module in self._wrapped:
            return "torch.compile has made a wrapper of it, which calls it: use module.compile()"
        return additions_to(module)

    def _is_free(self, module: nn.Module) -> bool:
        """Whether a module may be part of a group: not excluded, and its tensors are its own.

        One without any may come from elsewhere, or be an activation that many modules share.
        """
        mark = self._marks.of(module)
        if next(itertools.chain(module.parameters(), module.buffers()), None) is not None and (
            mark is None or self._places[module] > 1 or self._shared_weight(module) is not None
        ):
            return False
        return (
            (mark is None or mark.enabled)
            and module not in self._stacks
            and not isinstance(module, DistributedModule)
            and self._kept_as_it_is(module) is None
            and (type(module) is nn.Linear or registration_of(module) is None)
        )

    def _close(self, module: nn.Module, found: Found) -> None:
        """Splits a module as it is."""

        def fill(inner: str, linear: nn.Module, made: DistributedModule) -> None:
            whole = self._values.translated(dict(linear.state_dict(keep_vars=True)), None)
            for each, tensor in whole.items():
                self._values.put(made, each, tensor, linear.get_parameter(each))

        gate = cut(module, found.plan, self._group.size, fill)
        close(module, found, gate)

    def _replaced(
        self, module: nn.Module, name: str, mark: Mark, registration: Registration
    ) -> DistributedModule | None:
        kind = registration.dist_module
        if registration.in_auto is not None and mark.config.get("auto"):
            kind = registration.in_auto(module, self._group.size)
        if registration.needed is not None:
            mark.used.add(registration.needed)
            if not mark.config.get(registration.needed):
                return None
        reason = self._shared_weight(module) or self._kept_as_it_is(module)
        if reason is None and registration.refusal is not None:
            reason = registration.refusal(module)
        if reason is None:
            reason = self._auto.kept_whole.get(module)
        arguments = None if reason is not None else registration.arguments(module)
        if reason is None and arguments is None:
            reason = "it was made before its class was registered"
        if reason is None and arguments is not None:
            args, kwargs = _overridden(kind, arguments, mark)
            # What is drawn here is not kept, unless there are no values to take over.
            before = torch.get_rng_state()
            try:
                with without_values():
                    made = kind(*args, **kwargs)
            except ValueError as error:
                reason = str(error)
            finally:
                torch.set_rng_state(before)
        if reason is not None:
            logger.warning(
                "%s (%s) stays whole on every rank: %s",
                name or "the model",
                type(module).__name__,
                reason,
            )
            return None
        self._take_values(module, made, name, registration, lambda: kind(*args, **kwargs))
        made.train(module.training)
        made.stands_for = type(module)
        if registration.forward_hook is not None or registration.return_hook is not None:
            vars(made)["forward"] = functools.partial(
                _call_translated, made, registration.forward_hook, registration.return_hook
            )
        if registration.wrap is not None:
            vars(made)["forward"] = registration.wrap(made, module)
        if "forward" in vars(made):  # programs ask what a model takes
            vars(made)["forward"].__signature__ = inspect.signature(module.forward)
        if registration.translate is not None and registration.translate_back is not None:
            made.translations = registration.translate_back(module), registration.translate(module)
        config = getattr(module, "config", None)
        if config is not None and not hasattr(made, "config"):
            vars(made)["config"] = config  # programs ask the model for it
        return made

    def _take_values(
        self,
        module: nn.Module,
        made: DistributedModule,
        name: str,
        registration: Registration,
        make: Callable[[], DistributedModule],
    ) -> None:
        original = dict(module.state_dict(keep_vars=True))
        translation = None if registration.translate is None else registration.translate(module)
        whole = self._values.translated(original, translation)
        wanted = {each: tuple(_whole_shape(made, each)) for each in made.state_dict()}
        given = {each: tuple(tensor.shape) for each, tensor in whole.items()}
        if wanted != given:
            is_raw = registration.is_raw is not None and registration.is_raw(module)
            if translation is not None and not is_raw:
                raise SMPError(
                    f"the translation of {name or 'the model'} must give the state of "
                    f"{type(made).__name__}; it differs in "
                    f"{sorted(set(wanted.items()) ^ set(given.items()))[:4]}: tie what the "
                    "configuration of the model says is tied, or say there that it is not."
                )
            logger.warning(
                "%s (%s) has new initial values: the names or shapes of the parameters of %s are "
                "others.",
                name or "the model",
                type(module).__name__,
                type(made).__name__,
            )
            self._values.draw(made, make)
            return
        for each, tensor in whole.items():
            self._values.put(made, each, tensor, original.get(each))

    def _shared_weight(self, module: nn.Module) -> str | None:
        inside = set(module.modules())
        for each, parameter in module.named_parameters():
            if not self._holders[id(parameter)] <= inside:
                return f"its parameter {each} is shared with another module"
        return None


def _tell_what_stays_whole(model: nn.Module, total: int) -> None:
    """Says how much of a model every rank has, of which modules.

    Args:
        model: of which modules were split.
        total: how many numbers its parameters had before.
    """
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            is_slice = isinstance(module, DistributedModule) and module.slice_of(attribute)
            if parameter is not None and not is_slice and id(parameter) not in seen:
                seen.add(id(parameter))
                sizes[name] = sizes.get(name, 0) + parameter.numel()
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_MOST_TOLD]
    logger.info(
        "%.1f%% of the parameters of the model stay whole on every rank%s%s",
        100 * sum(sizes.values()) / max(total, 1),
        ": " if largest else ".",
        ", ".join(
            f"{name or 'the model'} ({type(model.get_submodule(name)).__name__}) "
            f"{100 * sizes[name] / total:.1f}%"
            for name in largest
        ),
    )


def _without_nested_tensors(model: nn.Module) -> None:
    """Has torch's encoders keep padding, where their modules are split and would not take it cut.

    Without gradients they cut it, for a kernel that reads the weights of their layers.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(
            isinstance(each, DistributedModule) for each in module.modules()
        ):
            module.use_nested_tensor = False


def _overridden(
    kind: type[DistributedModule], arguments: tuple[Any, Any], mark: Mark
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments with those that the context gives in place of the class's own."""
    args, kwargs = arguments
    signature = inspect.signature(kind)
    names = set(signature.parameters) | set(getattr(kind, "option_names", ()))
    chosen = {key: value for key, value in mark.config.items() if key in names}
    mark.used.update(chosen)
    positions = list(signature.parameters)
    by_name = dict(zip(positions, args, strict=False))
    if set(chosen) & set(by_name):
        return (), {**by_name, **kwargs, **chosen}
    return tuple(args), {**kwargs, **chosen}


def _whole_shape(module: nn.Module, name: str) -> tuple[int, ...]:
    owner, _, attribute = name.rpartition(".")
    inner = module.get_submodule(owner)
    sliced = inner.slice_of(attribute) if isinstance(inner, DistributedModule) else None
    if sliced is not None:
        return sliced.shape
    tensor: torch.Tensor = getattr(inner, attribute)
    return tuple(tensor.shape)


def _call_translated(
    module: DistributedModule,
    forward_hook: Hook | None,
    return_hook: Hook | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls a distributed module as the one that it stands for is called."""
    if forward_hook is not None:
        args, kwargs = hooked("forward_hook", forward_hook, args, kwargs)
    result = type(module).forward(module, *args, **kwargs)
    return result if return_hook is None else return_hook(result)


def unify_drawn(model: nn.Module, group: TensorGroup, delayed: DelayedParameters) -> None:
    """Has the slices that ranks drew from different generators drawn from that of the first rank.

    Collective: TP_GROUP.
    """
    ValuesOfFirst(group, delayed).unify(model)
