"""The fused layer normalisation; the modules of tensor parallelism are not there yet.

Source: smd_model_parallel_pytorch_tensor_parallel.rst; smd_model_parallel_pytorch.rst.
"""

from torch import nn

from smdistributed.modelparallel.torch.compat.later import later_class
from smdistributed.modelparallel.torch.nn.fused_layer_norm import FusedLayerNorm

DistributedModule = later_class("smp.nn.DistributedModule", nn.Module)
DistributedLinear = later_class("smp.nn.DistributedLinear", DistributedModule)
DistributedEmbedding = later_class("smp.nn.DistributedEmbedding", DistributedModule)
DistributedAttentionLayer = later_class("smp.nn.DistributedAttentionLayer", DistributedModule)
DistributedTransformerOutputLayer = later_class(
    "smp.nn.DistributedTransformerOutputLayer", DistributedModule
)
DistributedTransformerLayer = later_class("smp.nn.DistributedTransformerLayer", DistributedModule)
DistributedTransformer = later_class("smp.nn.DistributedTransformer", DistributedModule)
DistributedTransformerLMHead = later_class("smp.nn.DistributedTransformerLMHead", DistributedModule)
FlashAttentionLayer = later_class("smp.nn.FlashAttentionLayer", nn.Module)

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
]
