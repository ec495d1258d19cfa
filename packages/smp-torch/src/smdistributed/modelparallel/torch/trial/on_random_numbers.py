"""Running one module for real where fakes do not suffice.

What a module does may depend on values (which expert gets a token), or use an operation that has no
fake. Its outputs still have shapes of their own, and a run on random numbers shows them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private.modes import (
    FakeTensorMode,
    past_dispatch_modes,
    past_recording,
)
from smdistributed.modelparallel.torch.state.snapshot import Change, Snapshot
from smdistributed.modelparallel.torch.tensors.contents import contents_kept, copy_of, is_equal
from smdistributed.modelparallel.torch.tensors.nested import map_tensors, tensors_in
from smdistributed.modelparallel.torch.tensors.writes import note_writes, writes_of

_SEED = 0


def run_on_random_numbers(
    call: Callable[..., Any],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: FakeTensorMode,
) -> tuple[Any, list[Change]]:
    """Calls a module on random numbers.

    Args:
        call: the real call of a module.
        module: its parameters and buffers are fakes at present.
        args, kwargs: on fakes.
        mode: of the fakes.

    Returns:
        its result as fakes, and the Python state that it changes for other numbers: put back. What
        it has set attributes to stays there, as fakes: code outside may read it.
    """
    given: dict[int, torch.Tensor] = {}
    before = [(inner, dict(vars(inner))) for inner in module.modules()]

    def real(fake: torch.Tensor) -> torch.Tensor:
        tensor = random_like(fake)
        given[id(tensor)] = fake
        kept.append(tensor)
        return tensor

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in given:
            return given[id(tensor)]
        with mode:
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
            made = made + _flow(made, taking_part) if tensor.requires_grad else made
        given[id(tensor)] = made
        kept.append(tensor)
        return made

    taking_part = [
        each for each in (*tensors_in((args, kwargs)), *module.parameters()) if each.requires_grad
    ]
    kept: list[torch.Tensor] = []
    devices = [each.device for each in module.parameters() if each.is_cuda][:1]
    with (
        past_recording(),
        past_dispatch_modes(),
        same_numbers_everywhere(devices),
        # First: of a module with real parameters it would put those back too.
        contents_kept(
            Snapshot(module.modules()).tensors(),
            f"{type(module).__name__} writes to a tensor of layout {{}} while it is tried out on "
            "random numbers",
        ),
        _real_tensors(module),
    ):
        on_real = map_tensors((args, kwargs), real)
        result = call(module, *on_real[0], **on_real[1])
        changes = [
            change
            for other in _OTHERS
            for change in _changes_for(call, module, map_tensors((args, kwargs), other))
        ]
        own = {id(each) for each in (*module.parameters(), *module.buffers())}
    for inner, former in before:
        for name, value in vars(inner).items():
            if value is not former.get(name) and _is_of_call(value, own):
                vars(inner)[name] = map_tensors(value, fake)
    return map_tensors(result, fake), changes


def _is_of_call(value: Any, own: Container[int]) -> bool:
    """Whether an attribute has tensors that a call has made, as ``attribute_taps`` finds them."""
    found = list(tensors_in(value)) if isinstance(value, torch.Tensor | tuple) else []
    return bool(found) and not any(id(each) in own for each in found)


def _flow(made: torch.Tensor, taking_part: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns what a result depends on for autograd, whose gradients can be differentiated too."""
    total = torch.zeros((), dtype=made.dtype, device=made.device, requires_grad=True)
    for each in taking_part:
        total = total + each.abs().sum().to(made.device, made.dtype)
    return total * total * total


@contextlib.contextmanager
def same_numbers_everywhere(devices: list[torch.device]) -> Iterator[None]:
    """Draws the same on every rank: what a trial shows decides about the order of the step."""
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(_SEED)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(_SEED)
        yield


def _changes_for(call: Callable[..., Any], module: nn.Module, arguments: Any) -> list[Change]:
    # What it writes to parameters and buffers is found in the end.
    own = {id(each) for each in (*module.parameters(), *module.buffers())}
    snapshot = Snapshot(module.modules(), moved=own)
    # It may not be made for such numbers; what it has changed until then counts.
    with contextlib.suppress(Exception):
        call(module, *arguments[0], **arguments[1])
    changes = snapshot.note_changes()
    for growth in snapshot.put_back():
        growth.remove()
    return changes


def _other(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    def make(fake: torch.Tensor) -> torch.Tensor:
        tensor = random_like(fake)
        return change(tensor) if tensor.is_floating_point() else tensor

    return make


#: Numbers for which a module may decide otherwise: large ones of either sign, zeros, none.
_OTHERS = [
    _other(lambda tensor: 100 * tensor.abs()),
    _other(lambda tensor: -100 * tensor.abs()),
    _other(lambda tensor: 0 * tensor),
    _other(lambda tensor: tensor * float("nan")),
]


def works_for_real(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a torch function that fails on fakes does not on random numbers.

    Args:
        function: the function.
        args, kwargs: on fakes.
    """
    with past_recording(), torch.random.fork_rng(devices=[]):
        try:
            given, named = map_tensors((tuple(args), dict(kwargs)), random_like)
            function(*given, **named)
        except Exception:
            return False
    return True


@contextlib.contextmanager
def _real_tensors(module: nn.Module) -> Iterator[None]:
    """Gives a module and those in it parameters and buffers with random numbers.

    What the module writes to them counts as written to what they stand for.
    """
    made: dict[int, torch.Tensor] = {}
    replaced = []
    written = []
    for inner in module.modules():
        for tensors in (inner._parameters, inner._buffers):
            for name, fake in tensors.items():
                if fake is None:
                    continue
                if id(fake) not in made:
                    tensor = random_like(fake)
                    if isinstance(fake, nn.Parameter):
                        tensor = nn.Parameter(tensor.detach(), fake.requires_grad)
                    made[id(fake)] = tensor
                    # The very one that the module has: it may be given other memory.
                    written.append((fake, tensor, copy_of(tensor), writes_of(tensor)))
                replaced.append((tensors, name, fake))
                tensors[name] = made[id(fake)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for tensors, name, fake in replaced:
            tensors[name] = fake  # type: ignore[assignment]
        note_writes(
            fake
            for fake, tensor, copy, before in written
            # NumPy may have been given a copy of a large one.
            if writes_of(tensor) != before or not is_equal(tensor, copy)
        )


def random_like(fake: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of random numbers that looks like a fake."""
    tensor = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    with torch.no_grad():
        if fake.is_floating_point() or fake.is_complex():
            tensor.normal_(std=0.1)
        else:
            # Zero is a valid index everywhere; True keeps masks from being empty.
            tensor.fill_(fake.dtype is torch.bool)
    if not fake.requires_grad:
        return tensor
    # The result of a computation, as what it stands for: it may be changed in place.
    return tensor.requires_grad_().clone()
