"""Sequences that are split over ranks, in real processes, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import context_cases
import pytest
import torch
from torch import nn
from world import run, world_of

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import ConfigError, SMPError, UnsupportedError
from smdistributed.modelparallel.common.testing import World, Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]


def sharing(ranks: int, degree: int = 2, microbatches: int = 2, **config: Any) -> World:
    """Returns a world whose ranks share sequences."""
    given = {"context_parallel_degree": degree, "ddp": True, "microbatches": microbatches}
    return world_of(ranks, {**given, **config})


# ---------------------------------------------------------------- any module


@pytest.mark.parametrize("place", [pytest.param("first", marks=pytest.mark.slow), "last"])
def test_what_reads_across_a_sequence_is_exact_or_refused(worlds: Worlds, place: str) -> None:
    names = list(context_cases.expected())
    for found in run(worlds, sharing(2), context_cases.verdicts, place, names, timeout=240):
        assert found == context_cases.expected()


# ---------------------------------------------------------------- Transformers

MODELS = {
    each.__name__: each
    for each in (
        context_cases.llama,
        context_cases.grouped,
        context_cases.windowed,
        context_cases.gpt2,
        context_cases.bert,
    )
}


def of_transformers(names: list[str], microbatches: int) -> dict[str, float]:
    return {
        name: context_cases.of_transformers(
            MODELS[name],
            padded=True,
            microbatches=microbatches,
            checkpointed=name in ("grouped", "gpt2"),
        )
        for name in names
    }


@pytest.mark.parametrize(
    ("world", "microbatches", "names"),
    [
        (sharing(2), 2, list(MODELS)),
        (sharing(4), 2, ["grouped"]),
        pytest.param(sharing(4, 4, 1), 1, list(MODELS), marks=pytest.mark.slow),
        pytest.param(sharing(2, 2, 4), 4, list(MODELS), marks=pytest.mark.slow),
    ],
    ids=["cp2", "cp2-dp2", "cp4", "cp2-four"],
)
def test_models_as_they_are(
    worlds: Worlds, world: World, microbatches: int, names: list[str]
) -> None:
    for found in run(worlds, world, of_transformers, names, microbatches, timeout=240):
        assert max(found.values()) < 1e-13, found


@pytest.mark.parametrize(
    "config",
    [
        {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0},
        {"shard_optimizer_state": True},
    ],
    ids=["shards", "owners"],
)
def test_training_with_dropout_is_that_of_one_process(
    worlds: Worlds, config: dict[str, Any]
) -> None:
    if "sharded_data_parallel_degree" in config:
        config = {**config, "sdp_gradient_clipping": float("inf")}
    (want,) = run(worlds, world_of(1, {"ddp": True, "microbatches": 2}), context_cases.trained, 0.2)
    for found in run(worlds, sharing(2, **config), context_cases.trained, 0.2):
        assert found == pytest.approx(want, rel=1e-6)


# ---------------------------------------------------------------- a step


def net() -> smp.DistributedModel:
    torch.manual_seed(1)
    return smp.DistributedModel(context_cases.Net(nn.Identity(), "last"))


def message_of(kind: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "no error"


def messages() -> dict[str, str]:
    """Returns what a script is told that asks for what cannot be."""
    model = net()
    tokens, labels = context_cases.tokens_of()
    found = {}

    @smp.step
    def unnamed(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens).sum()

    found["unnamed"] = message_of(ConfigError, lambda: unnamed(model, tokens))

    @smp.step(sequence_dims={"tokens": 1, "labels": 1})
    def losses(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(tokens).mT, labels, reduction="none")
        model.backward(loss)
        return loss

    found["odd"] = message_of(ConfigError, lambda: losses(model, tokens[:, :6], labels[:, :6]))
    found["lengths"] = message_of(ConfigError, lambda: losses(model, tokens, labels[:, :8]))
    found["pieces"] = message_of(UnsupportedError, lambda: losses(model, tokens, labels))
    other = tokens + smp.cp_rank()
    found["batches"] = message_of(SMPError, lambda: losses(model, other, labels))

    @smp.step(sequence_dims={"tokens": 1, "labels": 1})
    def shifted(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return context_cases.loss_of(model(tokens)[:, :-1], labels[:, 1:])

    found["shifted"] = message_of(UnsupportedError, lambda: shifted(model, tokens, labels))

    @smp.step(sequence_dims={"tokens": 1})
    def hooked(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        out = model(tokens)
        out.register_hook(lambda gradient: gradient / gradient.norm())
        return out.sum()

    found["hooked"] = message_of(UnsupportedError, lambda: hooked(model, tokens))

    @smp.step(sequence_dims={"tokens": 1})
    def penalised(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        out = model(tokens)
        (gradient,) = torch.autograd.grad(out.sum(), out, create_graph=True)
        return gradient.sum()

    found["penalised"] = message_of(UnsupportedError, lambda: penalised(model, tokens))

    @smp.step(sequence_dims={"tokens": 1}, detach_outputs=False)
    def attached(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens)

    found["attached"] = message_of(UnsupportedError, lambda: attached(model, tokens))

    @smp.step(sequence_dims={"tokens": None, "ids": 1})
    def nothing(model: Any, tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (ids * 2.0).sum()

    found["nothing"] = message_of(UnsupportedError, lambda: nothing(model, tokens, tokens))
    found["join"] = message_of(UnsupportedError, model.join)
    found["comm hook"] = message_of(
        UnsupportedError, lambda: model.register_comm_hook(None, lambda state, bucket: None)
    )
    return found


TOLD = {
    "unnamed": "Say by smp.step(sequence_dims={'tokens': 1})",
    "odd": "must be a multiple of 4, since each of the 2 ranks (context_parallel_degree) has 2 "
    "blocks of it; received 6: pad it to 8.",
    "lengths": "received: tokens has 16, labels has 8",
    "pieces": "model.backward (test_context_parallel.py:",
    "batches": "must call a step function with the same batch",
    "shifted": "shift labels rather than logits",
    "hooked": "gives code to the backward pass",
    "penalised": "a step function computes gradients by itself",
    "attached": "has detach_outputs=False",
    "nothing": "computes nothing of which a rank could have a piece",
    "join": "cannot run out of it alone",
    "comm hook": "average over DP_CP_GROUP",
}


def test_messages_say_what_to_do(worlds: Worlds) -> None:
    for found in run(worlds, sharing(2), messages):
        for name, part in TOLD.items():
            assert part in found[name], name


def branching() -> list[float]:
    """Returns by how much a step differs that goes other ways, and has a state, and evaluates."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(1)
        plain = context_cases.Net(nn.Identity(), "last")
        torch.manual_seed(1)
        model = smp.DistributedModel(context_cases.Net(nn.Identity(), "last"))
        calls = []

        @smp.step(sequence_dims={"batch": 1})
        def evaluate(model: Any, batch: dict[str, torch.Tensor], scale: float) -> Any:
            calls.append(scale)
            out = model(batch["tokens"])
            if scale > 1:
                out = out * scale
            if scale > 2:
                out = out + out.mean(1, keepdim=True)
            return {"logits": out, "labels": batch["labels"], "loss": out.square().mean()}

        tokens, labels = context_cases.tokens_of()
        found = []
        for scale in (1.0, 3.0, 2.0, 3.0, 1.0):
            with torch.no_grad():
                got = evaluate(model, {"tokens": tokens, "labels": labels}, scale)
                out = plain(tokens) * scale
                out = out + out.mean(1, keepdim=True) if scale > 2 else out
            assert torch.equal(got["labels"].concat(), labels)
            found.append(float((got["logits"].concat() - out).abs().max()))
            found.append(float((got["loss"].reduce_mean() - out.square().mean()).abs()))
        # What was tried for the whole has left nothing behind.
        assert len(calls) == 5 * 2
        return found
    finally:
        torch.set_default_dtype(torch.float32)


def test_steps_may_go_several_ways(worlds: Worlds) -> None:
    for found in run(worlds, sharing(2), branching):
        assert max(found) < 1e-13


def places() -> tuple[int, ...]:
    group = smp.get_cp_process_group()
    assert torch.distributed.get_process_group_ranks(group) == smp.get_cp_group()
    assert smp.allgather(smp.rank(), smp.CP_GROUP) == smp.get_cp_group()
    return smp.cp_rank(), smp.cp_size(), smp.dp_rank(), smp.dp_size(), smp.rdp_rank()


def test_ranks_that_share_a_sequence(worlds: Worlds) -> None:
    assert run(worlds, sharing(4), places) == (
        (0, 2, 0, 2, 0),
        (1, 2, 0, 2, 0),
        (0, 2, 1, 2, 1),
        (1, 2, 1, 2, 1),
    )
