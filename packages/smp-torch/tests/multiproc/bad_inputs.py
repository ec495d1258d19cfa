"""A population of bad input to the API and to checkpoints, for a job of two partitions.

An input is a call; what must come of it is said by words of the message. ``outcome`` makes it and
judges: the error is one of the library's, or of Python's for a wrong type or value, and says what
is wrong with what was received. Every rank must come to the same. Long, since it is one list.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import CommError, SMPError

WIDTH = 4
#: Kinds of errors that may tell of an input.
KINDS = (SMPError, TypeError, ValueError)


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, width), nn.BatchNorm1d(width)
        self.second, self.third = nn.Linear(width, width), nn.Linear(width, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.third(self.second(self.norm(self.first(x))))
        return out


@smp.step
def train_step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    model.backward(loss)
    return loss


def trained(width: int = WIDTH) -> tuple[Any, Any]:
    """Returns a model and its optimizer after a step."""
    torch.manual_seed(0)
    model = smp.DistributedModel(Net(width))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    train_step(model, torch.ones(4, WIDTH))
    optimizer.step()
    return model, optimizer


def _stepping(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """Runs a body as a step function over a new model."""

    def call() -> Any:
        model = smp.DistributedModel(Net())
        given = args or (torch.ones(4, WIDTH),)
        return smp.step(body)(model, *given, **kwargs)

    return call


def _backward(loss_of: Callable[[Any], Any]) -> Callable[[], Any]:
    return _stepping(lambda model, x: model.backward(loss_of(model(x))))


def _generates(model: Any, x: Any) -> Iterator[Any]:
    yield model(x)


async def _awaits(model: Any, x: Any) -> Any:
    return model(x)


ONES = torch.ones(4, WIDTH)
MODEL: list[tuple[Any, Any]] = []


def _model() -> Any:
    """Returns a model that all inputs share: none may change it."""
    if not MODEL:
        MODEL.append(trained())
    return MODEL[0][0]


def _optimizer() -> Any:
    _model()
    return MODEL[0][1]


Input = tuple[Callable[[], Any], str]

API: dict[str, Input] = {
    # Step functions.
    **{
        f"step({name})": (lambda value=value: smp.step()(value), text)  # type: ignore[misc]
        for name, value, text in (
            ("number", 3, "must be a function"),
            ("tensor", ONES, "must be a function"),
            ("list", [print], "must be a function"),
            ("text", "body", "must be a function"),
            ("generator", _generates, "a generator"),
            ("coroutine", _awaits, "a coroutine"),
        )
    },
    **{
        f"step(input_split_axes={value!r})": (
            lambda value=value: smp.step(input_split_axes=value)(lambda model, x: x),  # type: ignore[misc]
            text,
        )
        for value, text in (
            (["x"], "must be a dict"),
            ("x", "must be a dict"),
            (1, "must be a dict"),
            ({"z": 1}, "no argument"),
            ({"x": 1.5}, "must be an int"),
            ({"x": None}, "must be an int"),
            ({"x": True}, "must be an int"),
            ({1: 1}, "no argument"),
        )
    },
    **{
        f"step(non_split_inputs={value!r})": (
            lambda value=value: smp.step(non_split_inputs=value)(lambda model, x: x),  # type: ignore[misc]
            text,
        )
        for value, text in (
            ("x", "must be a list"),
            (5, "must be a list"),
            ([1], "must be a list"),
            (["z"], "no argument"),
            ([None], "must be a list"),
        )
    },
    "step: axis beyond the tensor": (
        lambda: smp.step(input_split_axes={"x": 7})(lambda model, x: model(x))(_model(), ONES),
        "has no axis 7",
    ),
    "step: argument in both": (
        lambda: smp.step(non_split_inputs=["x"], input_split_axes={"x": 1})(lambda model, x: x),
        "is both in",
    ),
    "step: too few arguments": (_stepping(lambda model, x, y: x), "missing|required"),
    "step: unknown keyword": (_stepping(lambda model, x: x, z=1), "unexpected|got"),
    "step: scalar input": (_stepping(lambda model, x: x, torch.tensor(1.0)), "no axis 0"),
    "step: empty batch": (_stepping(lambda model, x: x, torch.ones(0, 4)), "is empty"),
    "step: batches differ": (
        _stepping(lambda model, x, y: x, ONES, torch.ones(3, 4)),
        "same batch size",
    ),
    "step: inputs of a wrong width": (_stepping(lambda model, x: model(x), torch.ones(4, 9)), ""),
    "step: text for a tensor": (_stepping(lambda model, x: model(x), "words"), ""),
    "step: None for a tensor": (_stepping(lambda model, x: model(x), None), ""),
    "step: the model is None": (lambda: train_step(None, ONES), "callable"),
    "step: a plain module": (lambda: train_step(Net(), ONES), "DistributedModel|module"),
    "step: attached outputs": (
        lambda: smp.step(lambda model, x: model(x), detach_outputs=False)(_model(), ONES),
        "detach_outputs",
    ),
    "step: nested": (_stepping(lambda model, x: train_step(model, x)), "inside another step"),
    "timeline before a call": (lambda: smp.step(lambda model, x: x).timeline(), "timeline"),
    # backward.
    **{
        f"backward of {name}": (_backward(loss_of), text)
        for name, loss_of, text in (
            ("a number", lambda out: 3.0, "takes the loss.*received float"),
            ("None", lambda out: None, "takes the loss.*received NoneType"),
            ("a text", lambda out: "loss", "takes the loss.*received str"),
            ("a list of numbers", lambda out: [1.0], "takes the loss"),
            ("an output", lambda out: out, "scalar"),
            ("a detached loss", lambda out: out.mean().detach(), "does not depend on any"),
            ("a constant", lambda out: torch.ones(()), "does not depend on any"),
            ("an item", lambda out: out.mean().item(), "takes the loss"),
        )
    },
    "tensor.backward": (_stepping(lambda model, x: model(x).mean().backward()), "model.backward"),
    "backward outside": (lambda: _model().backward(torch.ones(())), "smp.step"),
    "backward of a number outside": (lambda: _model().backward(1.0), "takes the loss"),
    # The model.
    **{
        f"DistributedModel({name})": (lambda value=value: smp.DistributedModel(value), text)  # type: ignore[misc]
        for name, value, text in (
            ("None", None, "torch.nn.Module; received NoneType"),
            ("class", Net, "torch.nn.Module; received type"),
            ("function", print, "torch.nn.Module; received"),
            ("list", [nn.Linear(2, 2)], "torch.nn.Module; received list"),
            ("state", {"weight": ONES}, "torch.nn.Module; received dict"),
        )
    },
    "TorchScript": (
        lambda: smp.DistributedModel(torch.jit.script(nn.Linear(2, 2))),
        "TorchScript",
    ),
    "model outside a step": (lambda: _model()(ONES), "smp.step"),
    "the user's model outside a step": (lambda: _model().get_module()(ONES), "partitions"),
    "parameters before the partition": (
        lambda: list(smp.DistributedModel(Net()).local_parameters()),
        "first call of a step function",
    ),
    "state_dict(keep_vars)": (lambda: _model().state_dict(keep_vars=True), "keep_vars"),
    "post-partition hook": (
        lambda: smp.DistributedModel(Net()).register_post_partition_hook(5),
        "callable|function",
    ),
    "post-step hook": (lambda: _model().register_post_step_hook("x"), "callable|function"),
    "comm hook": (lambda: _model().register_comm_hook(None, 5), ""),
    "join": (lambda: _model().join().__enter__(), "ddp"),
    **{
        f"load_state_dict({name})": (
            lambda change=change: _model().load_state_dict(change(dict(_model().state_dict()))),  # type: ignore[misc]
            text,
        )
        for name, change, text in (
            ("wrong shape", lambda s: {**s, "first.weight": torch.ones(9, 9)}, "size mismatch"),
            (
                "wrong shape elsewhere",
                lambda s: {**s, "third.bias": torch.ones(9)},
                "size mismatch",
            ),
            ("missing", lambda s: {n: v for n, v in s.items() if n != "third.bias"}, "third.bias"),
            ("unexpected", lambda s: {**s, "more": ONES}, "more"),
            ("empty", lambda s: {}, "Missing"),
        )
    },
    "load_state_dict(None)": (lambda: _model().load_state_dict(None), ""),
    "load_state_dict(list)": (lambda: _model().load_state_dict([1]), ""),
    # Partitions.
    **{
        f"set_partition({module!r:.12}, {index!r})": (
            lambda module=module, index=index: smp.set_partition(module, index),  # type: ignore[misc]
            text,
        )
        for module, index, text in (
            (nn.Linear(1, 1), "1", "must be an int"),
            (nn.Linear(1, 1), None, "must be an int"),
            (nn.Linear(1, 1), 0.0, "must be an int"),
            (nn.Linear(1, 1), True, "must be an int"),
            (nn.Linear(1, 1), [0], "must be an int"),
            ("x", 1, "torch.nn.Module; received str"),
            (None, 0, "torch.nn.Module; received NoneType"),
            (ONES, 0, "torch.nn.Module; received Tensor"),
            ([nn.Linear(1, 1)], 0, "torch.nn.Module; received list"),
        )
    },
    **{
        f"partition({index!r})": (lambda index=index: smp.partition(index).__enter__(), text)  # type: ignore[misc]
        for index, text in (("0", "must be an int"), (None, "must be an int"), (1.0, "an int"))
    },
    "set_partition after the partition": (
        lambda: smp.set_partition(_model().get_module().first, 0),
        "before the first call",
    ),
    # Optimizers and scaling.
    **{
        f"DistributedOptimizer({name})": (
            lambda value=value: smp.DistributedOptimizer(value),  # type: ignore[misc]
            "torch.optim.Optimizer; received",
        )
        for name, value in (("None", None), ("class", torch.optim.SGD), ("list", [ONES]))
    },
    "a parameter twice": (
        lambda: smp.DistributedOptimizer(
            torch.optim.SGD([{"params": [p]} for p in [nn.Parameter(ONES)] * 1])
        ).add_param_group({"params": [_model().get_module().first.weight] * 2}),
        "more than one|twice|duplicate",
    ),
    "optimizer.step inside": (
        _stepping(lambda model, x: _optimizer().step()),
        "after the step function",
    ),
    "optimizer state for others": (
        lambda: _optimizer().load_state_dict({"state": {}, "param_groups": []}),
        "parameter groups",
    ),
    "optimizer state of other sizes": (
        lambda: _optimizer().load_state_dict({"state": {}, "param_groups": [{"params": [0]}]}),
        "parameter groups",
    ),
    "clip_master_grads": (lambda: _optimizer().clip_master_grads(1.0), "fp16"),
    **{
        f"{name}({options})": (
            lambda name=name, options=options: getattr(smp.optimizers, name)(  # type: ignore[misc]
                Net().parameters(), **options
            ),
            "received",
        )
        for name in ("FusedAdam", "FusedLamb", "FusedNovoGrad")
        for options in ({"lr": -1.0}, {"betas": (0.9,)}, {"eps": -1e-8}, {"weight_decay": -1.0})
    },
    "a sparse batch": (_stepping(lambda m, x: m(x), ONES.to_sparse()), "to_dense"),
    # Inside a step.
    **{
        f"in a step: {name}": (_stepping(body), text)
        for name, body, text in (
            ("requires_grad_", lambda m, x: m.get_module().requires_grad_(False), "requires_grad"),
            ("zero_grad", lambda m, x: (m.zero_grad(), m(x)), "grad"),
            (
                "clip_grad_norm_",
                lambda m, x: torch.nn.utils.clip_grad_norm_(m.get_module().parameters(), 1.0),
                "grad",
            ),
            ("sparse", lambda m, x: m(x).to_sparse().to_dense(), "sparse"),
            ("vmap", lambda m, x: torch.vmap(lambda row: row.sin())(m(x)), "torch.func"),
            ("func.grad", lambda m, x: torch.func.grad(torch.sum)(m(x)), "torch.func"),
            ("cond", lambda m, x: torch.cond(m(x).sum() > 0, torch.sin, torch.cos, (x,)), "cond"),
            ("numpy", lambda m, x: m(x).detach().numpy(), ""),
            ("data", lambda m, x: setattr(m(x), "data", x), "data"),
            ("cpu", lambda m, x: m.cpu(), "between two steps"),
            ("half", lambda m, x: m.get_module().half(), "converted|moved"),
            ("autograd.backward", lambda m, x: torch.autograd.backward(m(x).mean()), "backward"),
            ("state_dict", lambda m, x: m.state_dict(), "between two steps"),
            ("out", lambda m, x: torch.sin(m(x).detach(), out=torch.ones(3)), "was given out="),
        )
    },
    # Communication.
    **{
        f"{name}: {what}": (call, text)
        for name, what, call, text in (
            ("send", "rank", lambda: smp.send(1, 7, smp.RankType.PP_RANK), "7"),
            ("send", "negative", lambda: smp.send(1, -1, smp.RankType.PP_RANK), "-1"),
            ("send", "text", lambda: smp.send(1, "0", smp.RankType.PP_RANK), "'0'|int"),
            ("send", "kind", lambda: smp.send(1, 0, "PP"), "RankType|PP"),
            ("recv_from", "rank", lambda: smp.recv_from(9, smp.RankType.PP_RANK), "9"),
            ("broadcast", "group", lambda: smp.broadcast(1, "world"), "CommGroup|world"),
            ("allgather", "group", lambda: smp.allgather(1, None), "CommGroup|None"),
            ("barrier", "group", lambda: smp.barrier(5), "CommGroup|5"),
        )
    },
    # The rest of the names.
    "model_creation(dtype)": (lambda: smp.model_creation(dtype=int).__enter__(), "dtype"),
    "model_creation(long)": (lambda: smp.model_creation(dtype=torch.long).__enter__(), "dtype"),
    "checkpointing of a number": (lambda: smp.set_activation_checkpointing(5), "nn.Module|Module"),
    "strategy": (
        lambda: smp.set_activation_checkpointing(nn.Sequential(nn.ReLU()), strategy="all"),
        "strategy|all",
    ),
    "strategy of a layer": (
        lambda: smp.set_activation_checkpointing(nn.Linear(1, 1), strategy="contiguous"),
        "nn.Sequential",
    ),
    "StepOutput of integers": (
        lambda: smp.StepOutput([torch.tensor(1)]).reduce_mean(),
        "reduce_sum",
    ),
    "StepOutput of shapes": (
        lambda: smp.StepOutput([torch.ones(1), torch.ones(2)]).stack(),
        "one shape",
    ),
    "copy of the model": (lambda: torch.optim.swa_utils.AveragedModel(_model()), "copied"),
}

# ---------------------------------------------------------------- checkpoints

TAG = "saved"
FILES = (
    "layout.json",
    "manifest.json",
    "model_0_0.pt",
    "model_1_0.pt",
    "optimizer_0_0.pt",
    "optimizer_1_0.pt",
    "random_0_0_0.pt",
    "user_content.pt",
)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def _link(path: Path) -> None:
    other = path.with_name(f"{path.name}.other")
    shutil.move(path, other)
    path.symlink_to(other)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": _cut,
    "flipped": _flip,
    "text": lambda path: path.write_text("words"),
    "link": _link,
    "folder": _folder,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
}
#: What stands in the place of a value of layout.json.
WRONG: tuple[Any, ...] = (None, "x", -1, 10**12, 1.5, [], {}, [[]], True)
KEYS = ("pipeline_parallel_degree", "tensor_parallel_degree", "partition", "tensors")
NEWEST = (b"\xff\xfe", b"", b"saved", b"saved whole\n", b"../x partial\n", b"a\nb partial\n", b"\0")


def damages() -> list[str]:
    """Returns the names of all damages to a checkpoint."""
    return [
        *(f"{file} {damage}" for file in FILES for damage in DAMAGES),
        *(f"layout {key} {place}" for key in KEYS for place in range(len(WRONG))),
        *(f"newest {place}" for place in range(len(NEWEST))),
    ]


def damage(folder: Path, name: str) -> None:
    """Damages the checkpoint in a folder; the name "intact" leaves it as it is."""
    what, *rest = name.split()
    saved = folder / f"{TAG}_partial"
    if what == "intact":
        return
    if what == "newest":
        (folder / "newest").write_bytes(NEWEST[int(rest[0])])
    elif what == "layout":
        layout = json.loads((saved / "layout.json").read_text())
        layout[rest[0]] = WRONG[int(rest[1])]
        _rewrite(saved, "layout.json", json.dumps(layout))
    else:
        DAMAGES[rest[0]](saved / what)


def _rewrite(saved: Path, name: str, text: str) -> None:
    """Writes a file so that its checksum is right: who changed it knew what they did."""
    import hashlib

    (saved / name).write_text(text)
    manifest = json.loads((saved / "manifest.json").read_text())
    data = text.encode()
    manifest["files"][name] = {
        "size_bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    (saved / "manifest.json").write_text(json.dumps(manifest))


def resumed(folder: str, name: str) -> str:
    """Resumes from a damaged copy of a checkpoint; returns what came of it."""
    copy = Path(folder, f"copy-{re.sub(r'[^a-z0-9]', '-', name)}")
    if smp.rank() == 0:
        shutil.copytree(Path(folder, "whole"), copy)
        damage(copy, name)
    smp.barrier()
    text = "newest" if name.startswith("newest") else ""
    try:
        return outcome(lambda: smp.resume_from_checkpoint(str(copy)), text, saved_by_rank=True)
    finally:
        smp.barrier()
        if smp.rank() == 0:
            shutil.rmtree(copy)


def saved(folder: str) -> None:
    """Saves what will be damaged."""
    model, optimizer = trained()
    smp.save_checkpoint(
        str(Path(folder, "whole")), TAG, model=model, optimizer=optimizer, user_content={"a": 1}
    )


# ---------------------------------------------------------------- judgement


def outcome(call: Callable[[], Any], text: str, *, saved_by_rank: bool = False) -> str:
    """Makes a call; returns "refused: ...", "accepted", or what is wrong with the error."""
    try:
        call()
    except CommError as error:
        return f"wrong: {error}"
    except Exception as error:
        said = str(error)
        # What plain PyTorch says to the same script is the script's own error.
        is_ours = isinstance(error, KINDS) or "size mismatch" in said or not text
        if not is_ours and isinstance(error, RuntimeError | AttributeError):
            is_ours = bool(text)
        if not is_ours or not re.search(text, said) or len(said) < 8:
            return f"wrong: {type(error).__name__}: {said}"
        return f"refused: {type(error).__name__}: {said}"
    return "accepted"


def try_api(names: list[str]) -> dict[str, str]:
    """Returns what came of some calls on this rank."""
    return {name: outcome(*API[name]) for name in names}


def try_damages(folder: str, names: list[str]) -> dict[str, str]:
    """Returns what came of some damages on this rank."""
    _model()  # kept, with its optimizer
    return {name: resumed(folder, name) for name in names}
