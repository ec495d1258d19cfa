"""The declarations: every parameter and environment variable of the library, once.

Type, bounds, default, spellings and description stand side by side; errors and the documentation
table are generated from them. Rules between parameters are in `config.rules`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from smdistributed.modelparallel.common.config.schema import (
    PYTORCH,
    TENSORFLOW,
    Bool,
    Float,
    Int,
    Parameter,
    PositiveInt,
    Settings,
)

_GENERAL = "smd_model_parallel_general.rst"
_COMMON = f"{_GENERAL}, Common Parameters"
_TF = f"{_GENERAL}, TensorFlow-specific Parameters"
_PT = f"{_GENERAL}, PyTorch-specific Parameters"
_SHARDED = "model-parallel-extended-features-pytorch-sharded-data-parallelism.md"
_TIPS = "model-parallel-customize-tips-pitfalls.md, Tensor Parallelism for PyTorch"
_EXAMPLES = "used by published example scripts, in no document"
_OURS = "an extension of this library"


def _default_memory_weight(given: dict[str, Any]) -> float:
    return 0.2 if given.get("optimize") == "speed" else 0.8


def _default_active_microbatches(given: dict[str, Any]) -> int:
    return int(given.get("pipeline_parallel_degree", 1)) + 2


class Parameters(Settings):
    """Every parameter of model parallelism."""

    pipeline_parallel_degree: Annotated[
        PositiveInt,
        Parameter(
            "Number of partitions the model is cut into.",
            since="1.6, as partitions 1.1",
            source=f"{_COMMON}; model-parallel-sm-sdk.md, Configuration parameters",
            aliases=("partitions",),
        ),
    ] = 1
    auto: Annotated[
        Bool,
        Parameter(
            "Plan first: rank 0 records the first training step of the script in a process of its "
            "own, and the job takes the fastest configuration that is estimated to fit its "
            "devices.",
            since="-",
            source=_OURS,
        ),
    ] = False
    microbatches: Annotated[
        PositiveInt,
        Parameter(
            "Number of microbatches that one call of a step function is cut into; 1 means no "
            "pipelining.",
            since="1.1",
            source=_COMMON,
        ),
    ] = 1
    pipeline: Annotated[
        Literal["interleaved", "simple", "zero_bubble", "zero_bubble_v", "auto"],
        Parameter(
            "Schedule. interleaved prefers a backward pass that can run to any forward pass; "
            "simple ends all forward passes first. zero_bubble puts off the gradients of weights "
            "until their rank would be idle; zero_bubble_v does so with a V-shaped partition, in "
            "which each rank has two pieces of the model; auto takes the one of these and "
            "interleaved that a simulation says is the fastest. The last three are extensions of "
            "this library, for PyTorch. Where nothing is set, steps of PyTorch that wait for their "
            "GPUs and not for their hosts have the order of auto.",
            since="1.1",
            source=f"{_COMMON}; model-parallel-core-features.md, Pipeline Execution Schedule",
        ),
    ] = "interleaved"
    optimize: Annotated[
        Literal["memory", "speed"],
        Parameter(
            "What the partitioner balances and what tensor-parallel transformers save. Results "
            "are the same up to rounding.",
            since="1.1",
            source=f"{_COMMON}; model-parallel-core-features.md",
        ),
    ] = "memory"
    placement_strategy: Annotated[
        Literal["cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"],
        Parameter(
            "Order of the reduced-data (D), pipeline (P) and tensor (T) coordinates over "
            "ascending ranks, the right-most letter fastest. cluster is DPT, spread is TPD; "
            "TensorFlow knows these two only.",
            since="1.1, letters 1.6",
            source=f"{_COMMON}; Placement Strategy with Tensor Parallelism",
        ),
    ] = "cluster"
    auto_partition: Annotated[
        Bool,
        Parameter(
            "Let the library assign the parts of the model; smp.partition contexts are then "
            "ignored.",
            since="1.1",
            source=f"{_COMMON}; model-parallel-core-features.md, Manual Model Splitting",
        ),
    ] = True
    default_partition: Annotated[
        Int,
        Field(ge=0),
        Parameter(
            "Partition of everything outside the smp.partition contexts. Required when "
            "auto_partition is false; below pipeline_parallel_degree.",
            since="1.1",
            source=_COMMON,
        ),
    ] = 0
    communication_timeout: Annotated[
        Float,
        # A year: more does not fit into the clocks of the frameworks.
        Field(gt=0, le=31_536_000),
        Parameter(
            "Seconds a rank waits for another one before the call fails with the names of the "
            "missing ranks.",
            since="-",
            source=_OURS,
        ),
    ] = 1800.0

    contiguous: Annotated[
        Bool,
        Parameter(
            "Keep each partition in one connected piece of the graph.",
            since="1.1",
            source=_TF,
            frameworks=TENSORFLOW,
        ),
    ] = True
    horovod: Annotated[
        Bool,
        Parameter(
            "Initialise Horovod over each data-parallel group; the script must not do it.",
            since="1.1",
            source=f"{_TF}; model-parallel-customize-training-script-tf.md",
            frameworks=TENSORFLOW,
        ),
    ] = False

    memory_weight: Annotated[
        Float,
        Field(ge=0.0, le=1.0),
        Parameter(
            "Share of memory, against computation, in what automatic partitioning balances.",
            since="1.1",
            source=_PT,
            frameworks=PYTORCH,
            default="0.2 if optimize is speed, else 0.8",
        ),
    ] = Field(default_factory=_default_memory_weight)
    ddp: Annotated[
        Bool,
        Parameter(
            "Reduce gradients between replicas. Needed by more than one replica, tensor "
            "parallelism, every kind of sharding, and the process-group getters.",
            since="1.1",
            source=f"{_PT}; smd_model_parallel_pytorch.rst",
            frameworks=PYTORCH,
        ),
    ] = False
    active_microbatches: Annotated[
        PositiveInt,
        Parameter(
            "Most microbatches in flight at once; fewer save activation memory.",
            since="1.3",
            source=f"{_PT}; smd_model_parallel_change_log.rst, 1.3.0",
            frameworks=PYTORCH,
            default="pipeline_parallel_degree + 2",
        ),
    ] = Field(default_factory=_default_active_microbatches)
    deterministic_server: Annotated[
        Bool,
        Parameter(
            "Serve requests in the same order on all data-parallel replicas.",
            since="1.3",
            source=_PT,
            frameworks=PYTORCH,
        ),
    ] = False
    checkpointed_blocks: Annotated[
        Int,
        Field(ge=0),
        Parameter(
            "Every so manieth block of the model, the first among them, computes its activations "
            "again in its backward pass: 1 means all blocks, 2 every second, 0 none. Blocks are "
            "modules of one class that follow each other in an nn.ModuleList or nn.Sequential. "
            "See also smp.set_activation_checkpointing, for any modules.",
            since="-",
            source=_OURS,
            frameworks=PYTORCH,
        ),
    ] = 0
    offload_activations: Annotated[
        Bool,
        Parameter(
            "Keep checkpointed activations in host memory between forward and backward; has an "
            "effect only on modules with activation checkpointing.",
            since="1.6",
            source=f"{_PT}; model-parallel-extended-features-pytorch-activation-offloading.md",
            frameworks=PYTORCH,
        ),
    ] = False
    activation_loading_horizon: Annotated[
        Int,
        Field(gt=0),
        Parameter(
            "How many pipeline tasks before its use an offloaded activation is fetched.",
            since="1.6",
            source=f"{_PT}; model-parallel-extended-features-pytorch-activation-offloading.md",
            frameworks=PYTORCH,
        ),
    ] = 4
    tensor_parallel_degree: Annotated[
        PositiveInt,
        Parameter(
            "Number of ranks over which a distributed module is split.",
            since="1.6",
            source=f"{_PT}; model-parallel-best-practices.md, Tensor parallelism",
            frameworks=PYTORCH,
        ),
    ] = 1
    expert_parallel_degree: Annotated[
        PositiveInt,
        Parameter(
            "Number of ranks over which the experts of mixtures are spread; tensor_parallel_degree "
            "is the same, and set by it.",
            since="-",
            source=_OURS,
            frameworks=PYTORCH,
        ),
    ] = 1
    context_parallel_degree: Annotated[
        PositiveInt,
        Parameter(
            "Number of ranks over which the sequences of a batch are split; they get the same "
            "batch, see dp_rank.",
            since="-",
            source=_OURS,
            frameworks=PYTORCH,
        ),
    ] = 1
    fp16: Annotated[
        Bool,
        Parameter(
            "Train in half precision, with FP32 master weights and loss scaling.",
            since="1.10",
            source=f"{_PT}; model-parallel-extended-features-pytorch-fp16.md",
            frameworks=PYTORCH,
        ),
    ] = False
    fp16_params: Annotated[
        Bool,
        Parameter(
            "Create the parameters of distributed modules in half precision, nothing more.",
            since="1.6",
            source=_PT,
            frameworks=PYTORCH,
        ),
    ] = False
    shard_optimizer_state: Annotated[
        Bool,
        Parameter(
            "Split the optimizer state over the ranks that hold the same parameter.",
            since="1.6",
            source=f"{_PT}; model-parallel-extended-features-pytorch-optimizer-state-sharding.md",
            frameworks=PYTORCH,
        ),
    ] = False
    prescaled_batch: Annotated[
        Bool,
        Parameter(
            "The ranks of a tensor-parallel group bring the same examples, so that nothing is "
            "exchanged: shard the data by rdp_rank.",
            since="1.6",
            source=f"{_GENERAL}, Prescaled Batch; model-parallel-best-practices.md",
            frameworks=PYTORCH,
        ),
    ] = False
    skip_tracing: Annotated[
        Bool,
        Parameter(
            "Partition by parameter sizes alone, without a tracing run.",
            since="1.6",
            source=_PT,
            frameworks=PYTORCH,
        ),
    ] = False
    sharded_data_parallel_degree: Annotated[
        PositiveInt,
        Parameter(
            "Number of ranks over which parameters, gradients and optimizer state are sharded; "
            "divides the number of ranks that hold the same slices (rdp_size).",
            since="1.11",
            source=f"{_PT}; {_SHARDED}",
            frameworks=PYTORCH,
        ),
    ] = 1
    sdp_reduce_bucket_size: Annotated[
        Int,
        Field(gt=0),
        Parameter(
            "Elements in a gradient bucket of sharded data parallelism.",
            since="1.11",
            source=_PT,
            frameworks=PYTORCH,
        ),
    ] = 500_000_000
    sdp_param_persistence_threshold: Annotated[
        Int,
        Field(ge=0),
        Parameter(
            "A parameter with fewer elements stays whole on every rank.",
            since="1.11",
            source=_SHARDED,
            frameworks=PYTORCH,
        ),
    ] = 1_000_000
    sdp_max_live_parameters: Annotated[
        Int,
        Field(gt=0),
        Parameter(
            "Most parameter elements gathered at once; one larger layer is gathered alone.",
            since="1.11",
            source=_SHARDED,
            frameworks=PYTORCH,
        ),
    ] = 1_000_000_000
    sdp_hierarchical_allgather: Annotated[
        Bool,
        Parameter(
            "With several hosts, gather in two stages, between hosts and inside each host.",
            since="1.11",
            source=_SHARDED,
            frameworks=PYTORCH,
        ),
    ] = True
    sdp_gradient_clipping: Annotated[
        Float,
        Field(gt=0),
        Parameter(
            "Bound on the global L2 norm of the gradients under sharded data parallelism; inf "
            "switches clipping off.",
            since="1.11",
            source=f"{_SHARDED}, Tips and Considerations",
            frameworks=PYTORCH,
        ),
    ] = 1.0
    bf16: Annotated[
        Bool,
        Parameter(
            "Train in bfloat16, without loss scaling.",
            since="1.11",
            source=f"{_SHARDED}, BF16 Training",
            frameworks=PYTORCH,
        ),
    ] = False
    ddp_dist_backend: Annotated[
        Literal["auto", "nccl", "gloo"],
        Parameter(
            "Transport of the process groups. gloo, an extension, is for hosts without a GPU.",
            since="1.13",
            source=f"{_SHARDED}, SMDDP Collectives",
            frameworks=PYTORCH,
        ),
    ] = "auto"

    delayed_parameter_initialization: Annotated[
        Bool,
        Parameter(
            "Delay the initialisation of parameters inside smp.model_creation.",
            since="-",
            source=_EXAMPLES,
        ),
    ] = False
    static_mode: Annotated[
        Bool,
        Parameter(
            "Accepted; replaying a fixed schedule must not change results.",
            since="-",
            source=_EXAMPLES,
        ),
    ] = False
    fast_mode: Annotated[
        Bool,
        Parameter(
            "Accepted; a cheaper exchange between partitions must not change results.",
            since="-",
            source=_EXAMPLES,
        ),
    ] = False
    checkpoint_attentions: Annotated[
        Bool,
        Parameter(
            "Accepted; recompute the attention of distributed transformer layers in backward.",
            since="-",
            source=_EXAMPLES,
        ),
    ] = False


UNDOCUMENTED = tuple(
    name
    for name, field in Parameters.model_fields.items()
    if any(isinstance(item, Parameter) and item.source == _EXAMPLES for item in field.metadata)
)


def _check_throttle(limit: int) -> int:
    if limit != -1 and limit < 1:
        raise ValueError("neither -1 nor at least 1")
    return limit


class Environment(Settings):
    """Environment variables of the library, under their own names."""

    SMP_NCCL_THROTTLE_LIMIT: Annotated[
        Int,
        AfterValidator(_check_throttle),
        Parameter(
            "Most collective calls of tensor parallelism in flight at once.",
            since="1.6",
            source=_TIPS,
            frameworks=PYTORCH,
            allowed="an integer, at least 1, or -1 for no limit",
        ),
    ] = 8
    SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES: Annotated[
        Int,
        Field(gt=0, multiple_of=8192),
        Parameter(
            "Copy buffer of a special all-gather transport; without effect where it is absent.",
            since="1.13",
            source=f"{_SHARDED}, Performance and memory tuning",
            frameworks=PYTORCH,
        ),
    ] = 16_777_216
    SMDDP_AG_SORT_BUFFER_SIZE_BYTES: Annotated[
        Int,
        Field(gt=0, multiple_of=8192),
        Parameter(
            "Receive buffer of a special all-gather transport; without effect where it is absent.",
            since="1.13",
            source=f"{_SHARDED}, Performance and memory tuning",
            frameworks=PYTORCH,
        ),
    ] = 134_217_728
    MASTER_PORT: Annotated[
        Int | None,
        Parameter(
            "Rendezvous port of the data-parallel backend, which ddp needs.",
            since="1.1",
            source=_PT,
            frameworks=PYTORCH,
            default="set by the launcher",
            allowed="a TCP port, 1 to 65535",
        ),
        Field(ge=1, le=65535),
    ] = None
