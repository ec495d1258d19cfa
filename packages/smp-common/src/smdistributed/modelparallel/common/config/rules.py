"""Rules between parameters.

A rule names its parameters, so that it is skipped when one of them is wrong by itself, and so that
its text shows each of them as the user wrote it, with its value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from smdistributed.modelparallel.common.config.parameters import Parameters


@dataclass(frozen=True)
class Rule:
    """A demand on several parameters.

    Attributes:
        names: the parameters it speaks of.
        broken: whether a configuration breaks it.
        text: the demand and the fix; ``{name}`` stands for the spelling of a parameter.
    """

    names: tuple[str, ...]
    broken: Callable[[Parameters], bool]
    text: str


_SDP_PARAMETERS = tuple(name for name in Parameters.model_fields if name.startswith("sdp_"))

#: What a plan decides.
PLANNED = (
    "pipeline_parallel_degree",
    "microbatches",
    "pipeline",
    "tensor_parallel_degree",
    "expert_parallel_degree",
    "context_parallel_degree",
    "sharded_data_parallel_degree",
    "shard_optimizer_state",
    "checkpointed_blocks",
)

RULES = (
    *(
        Rule(
            ("auto", name),
            # The default argument ties each function to its own name.
            lambda c, name=name: c.auto and name in c.model_fields_set,  # type: ignore[misc]
            f"{{auto}} true decides {{{name}}}: leave one of them out.",
        )
        for name in PLANNED
    ),
    Rule(
        ("tensor_parallel_degree", "ddp"),
        lambda c: c.tensor_parallel_degree > 1 and not c.ddp,
        "{tensor_parallel_degree} above 1 needs {ddp}: set it to true.",
    ),
    Rule(
        ("expert_parallel_degree", "tensor_parallel_degree"),
        lambda c: c.expert_parallel_degree not in (1, c.tensor_parallel_degree),
        "{expert_parallel_degree} above 1 and {tensor_parallel_degree} must be equal, since the "
        "ranks that have experts between them are those that split modules: leave out one of them.",
    ),
    Rule(
        ("context_parallel_degree", "ddp"),
        lambda c: c.context_parallel_degree > 1 and not c.ddp,
        "{context_parallel_degree} above 1 needs {ddp}: set it to true.",
    ),
    Rule(
        ("context_parallel_degree", "tensor_parallel_degree"),
        lambda c: c.context_parallel_degree > 1 and c.tensor_parallel_degree > 1,
        "{context_parallel_degree} and {tensor_parallel_degree} are not both above 1 yet, since "
        "slices gather the examples of ranks that have whole sequences: set one of them to 1.",
    ),
    Rule(
        ("auto_partition", "default_partition"),
        lambda c: not c.auto_partition and "default_partition" not in c.model_fields_set,
        "{auto_partition} false needs {default_partition}: give the partition of what no "
        "smp.partition context claims.",
    ),
    Rule(
        ("default_partition", "pipeline_parallel_degree"),
        lambda c: c.default_partition >= c.pipeline_parallel_degree,
        "{default_partition} must be a partition: between 0 and {pipeline_parallel_degree} - 1.",
    ),
    Rule(
        ("pipeline", "auto_partition"),
        lambda c: c.pipeline == "zero_bubble_v" and not c.auto_partition,
        "{pipeline} zero_bubble_v is a partition that the library makes: set {auto_partition} to "
        "true, or {pipeline} to zero_bubble.",
    ),
    Rule(
        ("sharded_data_parallel_degree", "ddp"),
        lambda c: c.sharded_data_parallel_degree > 1 and not c.ddp,
        "{sharded_data_parallel_degree} above 1 needs {ddp}: set it to true.",
    ),
    Rule(
        ("sharded_data_parallel_degree", "shard_optimizer_state"),
        lambda c: c.sharded_data_parallel_degree > 1 and c.shard_optimizer_state,
        "{sharded_data_parallel_degree} above 1 already shards the optimizer state: set "
        "{shard_optimizer_state} to false.",
    ),
    Rule(
        ("fp16", "bf16"),
        lambda c: c.fp16 and c.bf16,
        "{fp16} and {bf16} exclude each other: set one of them to false.",
    ),
    Rule(
        ("shard_optimizer_state", "ddp"),
        lambda c: c.shard_optimizer_state and not c.ddp,
        "{shard_optimizer_state} needs {ddp}: set it to true.",
    ),
)

IDLE_RULES = (
    Rule(
        ("activation_loading_horizon", "offload_activations"),
        lambda c: "activation_loading_horizon" in c.model_fields_set and not c.offload_activations,
        "{activation_loading_horizon} has an effect only with {offload_activations}.",
    ),
    *(
        Rule(
            (name, "sharded_data_parallel_degree"),
            # The default argument ties each function to its own name.
            lambda c, name=name: (  # type: ignore[misc]
                name in c.model_fields_set and c.sharded_data_parallel_degree == 1
            ),
            f"{{{name}}} has an effect only with {{sharded_data_parallel_degree}} above 1.",
        )
        for name in _SDP_PARAMETERS
    ),
)


def broken(
    rules: Collection[Rule],
    config: Parameters,
    spelled: Mapping[str, str],
    skip: Collection[str] = (),
) -> Iterator[str]:
    """Texts of the rules that ``config`` breaks.

    Args:
        rules: `RULES`, whose breach is an error, or `IDLE_RULES`, whose breach has no effect.
        config: what is judged.
        spelled: main name -> what the user wrote.
        skip: parameters that are wrong by themselves.
    """
    shown = {name: spelled.get(name, name) for name in type(config).model_fields}
    for rule in rules:
        if not set(rule.names) & set(skip) and rule.broken(config):
            received = ", ".join(f"{shown[n]} {getattr(config, n)!r}" for n in rule.names)
            yield f"{rule.text.format_map(shown)} Got {received}."
