"""Sequences that are split over ranks, in real processes, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import context_cases
import context_scripts
import context_tokens
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


def piped(order: str) -> World:
    """Returns a world of two partitions, each on two ranks that share sequences."""
    return sharing(4, microbatches=4, pipeline_parallel_degree=2, pipeline=order)


#: Two partitions, each on two ranks that share sequences.
PIPED = sharing(4, pipeline_parallel_degree=2)

# ---------------------------------------------------------------- any module


@pytest.mark.parametrize(
    ("world", "place"),
    [
        pytest.param(sharing(2), "first", marks=pytest.mark.slow),
        (sharing(2), "last"),
        pytest.param(PIPED, "last", marks=pytest.mark.slow),
    ],
    ids=["first", "last", "pp2-cp2"],
)
def test_what_reads_across_a_sequence_is_exact_or_refused(
    worlds: Worlds, world: World, place: str
) -> None:
    expected = context_cases.expected(is_piped=world is PIPED)
    for found in run(worlds, world, context_cases.verdicts, place, list(expected), timeout=240):
        assert found == expected


#: Of the scripts, what goes through most branches of the library that others do not.
SAMPLE = {
    "mix_by_overload": "refused",  # the whole model is one module then
    "mean_of_masked": "exact",
    "padded_positions": "exact",
    "flattened": "exact",
    "hooked": "refused",
    "checkpointed": "exact",
    "logits": "exact",
}


def test_scripts_are_exact_or_refused_in_pipelines(worlds: Worlds) -> None:
    for found in run(worlds, PIPED, context_scripts.verdicts, list(SAMPLE), timeout=240):
        assert found == SAMPLE


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_all_scripts(worlds: Worlds, part: int) -> None:
    names = context_scripts.names()[part::4]
    for found in run(worlds, PIPED, context_scripts.verdicts, names, timeout=290):
        assert set(found.values()) <= {"exact", "refused"}, found


#: Of those that move tokens, likewise.
SAMPLE_OF_TOKENS = {
    "sliced-viewed-1-plain-16": "exact",
    "narrowed-chunked-3-convolved-13": "exact",
    "several-prompt-16": "exact",
    "policy-first-16": "exact",
    "chosen_losses-plain-16": "exact",
    "active-plain-13": "refused",
}


def test_scripts_that_move_tokens_are_exact_or_refused(worlds: Worlds) -> None:
    for found in run(worlds, sharing(2), context_tokens.verdicts, list(SAMPLE_OF_TOKENS)):
        assert found == SAMPLE_OF_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize(
    "world", [sharing(2), sharing(3, 3), sharing(4, 4), PIPED], ids=["cp2", "cp3", "cp4", "pp2-cp2"]
)
def test_all_scripts_that_move_tokens(worlds: Worlds, world: World, part: int) -> None:
    names = list(context_tokens.scripts())[part::8]
    for found in run(worlds, world, context_tokens.verdicts, names, timeout=290):
        assert set(found.values()) <= {"exact", "refused"}, found


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
        (PIPED, 2, ["grouped", "gpt2", "bert"]),
        (piped("zero_bubble_v"), 4, ["gpt2"]),
        pytest.param(piped("zero_bubble"), 4, list(MODELS), marks=pytest.mark.slow),
        pytest.param(piped("simple"), 4, list(MODELS), marks=pytest.mark.slow),
    ],
    ids=[
        *("cp2", "cp2-dp2", "cp4", "cp2-four"),
        *("pp2-cp2", "v-cp2", "halves-cp2", "simple-cp2"),
    ],
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
        {
            "pipeline_parallel_degree": 2,
            "sharded_data_parallel_degree": 2,
            "sdp_param_persistence_threshold": 0,
        },
        pytest.param(
            {"pipeline_parallel_degree": 2, "shard_optimizer_state": True}, marks=pytest.mark.slow
        ),
    ],
    ids=["shards", "owners", "pp2-shards", "pp2-owners"],
)
def test_training_with_dropout_is_that_of_one_process(
    worlds: Worlds, config: dict[str, Any]
) -> None:
    if "sharded_data_parallel_degree" in config:
        config = {**config, "sdp_gradient_clipping": float("inf")}
    (want,) = run(worlds, world_of(1, {"ddp": True, "microbatches": 2}), context_cases.trained, 0.2)
    num_ranks = 2 * config.get("pipeline_parallel_degree", 1)
    for found in run(worlds, sharing(num_ranks, **config), context_cases.trained, 0.2):
        assert found == pytest.approx(want, rel=1e-6)


def offloaded() -> list[list[float]]:
    return [context_cases.trained(0.2, reentrant=each, offloads=True) for each in (False, True)]


@pytest.mark.parametrize("degree", [1, 2])
def test_activations_may_be_in_host_memory(worlds: Worlds, degree: int) -> None:
    (want,) = run(worlds, world_of(1, {"ddp": True, "microbatches": 2}), context_cases.trained, 0.2)
    config = {"offload_activations": True, "activation_loading_horizon": 1}
    world = sharing(2 * degree, pipeline_parallel_degree=degree, **config)
    everyones = run(worlds, world, offloaded)
    for kinds in zip(*everyones, strict=True):
        assert sum(each.pop() for each in kinds) > 0
    for found in everyones:
        for each in found:
            assert each == pytest.approx(want, rel=1e-6)


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

    found["short"] = message_of(ConfigError, lambda: losses(model, tokens[:, :3], labels[:, :3]))
    found["lengths"] = message_of(ConfigError, lambda: losses(model, tokens, labels[:, :8]))
    found["pieces"] = message_of(UnsupportedError, lambda: losses(model, tokens, labels))
    other = tokens + smp.cp_rank()
    found["batches"] = message_of(SMPError, lambda: losses(model, other, labels))

    @smp.step(sequence_dims={"tokens": 1, "labels": 1})
    def chosen(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model(tokens)[labels >= 0]
        return nn.functional.cross_entropy(logits, labels[labels >= 0])

    found["chosen"] = message_of(UnsupportedError, lambda: chosen(model, tokens, labels))

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

    @smp.step(sequence_dims={"tokens": 1})
    def size(model: Any, tokens: torch.Tensor) -> Any:
        logits = model(tokens)
        return logits.sum(), len(logits) * logits.shape[1]

    found["size"] = message_of(UnsupportedError, lambda: size(model, tokens))

    @smp.step(sequence_dims={"tokens": 1, "labels": 1})
    def checked(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = model(tokens)
        assert logits.shape[:2] == labels.shape, "no label for each token"
        return context_cases.loss_of(logits, labels)

    found["checked"] = message_of(UnsupportedError, lambda: checked(model, tokens, labels))

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
    "short": "must have at least 4 tokens, since each of the 2 ranks (context_parallel_degree) has "
    "2 blocks of it; received 3: pad it to 4.",
    "lengths": "received: tokens has 16, labels has 8",
    "pieces": "model.backward (test_context_parallel.py:",
    "batches": "must call a step function with the same batch",
    "chosen": 'choose losses of tokens (reduction="none", or labels of -100) rather than their '
    "logits",
    "hooked": "gives code to the backward pass",
    "penalised": "a step function computes gradients by itself",
    "attached": "has detach_outputs=False",
    "size": "returns 16, a size of a piece of the sequence; for the whole it is 32",
    "checked": "where a rank has 8 of 16 tokens of what parameters have met: AssertionError: no "
    "label for each token. Arguments of the step function are whole there",
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


@pytest.mark.parametrize("world", [sharing(2), PIPED], ids=["cp2", "pp2-cp2"])
def test_steps_may_go_several_ways(worlds: Worlds, world: World) -> None:
    for found in run(worlds, world, branching):
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


def messages_of_pipelines() -> dict[str, str]:
    """Returns what a script is told in a pipeline that asks for what cannot be."""
    model = net()
    tokens, _ = context_cases.tokens_of()
    found = {}

    def of(
        name: str, kind: type[Exception], body: Callable[..., Any], tokens: torch.Tensor = tokens
    ) -> None:
        step = smp.step(body, sequence_dims={"tokens": 1})
        found[name] = message_of(kind, lambda: step(model, tokens))

    of("short", ConfigError, lambda model, tokens: model(tokens), tokens[:, :3])
    of("batches", SMPError, lambda model, tokens: model(tokens), tokens + smp.cp_rank())
    of("nothing", UnsupportedError, lambda model, tokens: tokens * 2.0)
    of("differing", SMPError, lambda model, tokens: model(tokens) * (1 + smp.cp_rank()))

    def penalised(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        out = model(tokens)
        (gradient,) = torch.autograd.grad(out.sum(), out, create_graph=True)
        return gradient.sum()

    of("penalised", UnsupportedError, penalised)
    return found


def test_messages_in_pipelines_say_what_to_do(worlds: Worlds) -> None:
    told = {name: TOLD[name] for name in ("short", "batches", "nothing")}
    told["differing"] = "have recorded different computations"
    told["penalised"] = "this step computes gradients by itself"
    for found in run(worlds, PIPED, messages_of_pipelines):
        for name, part in told.items():
            assert part in found[name], (name, found[name])
