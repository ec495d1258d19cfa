"""The modules of tensor parallelism: ``smp.nn``.

Source: smd_model_parallel_pytorch_tensor_parallel.rst; smd_model_parallel_pytorch.rst.
"""

from smdistributed.modelparallel.torch.nn.attention import DistributedAttentionLayer
from smdistributed.modelparallel.torch.nn.embedding import DistributedEmbedding
from smdistributed.modelparallel.torch.nn.flash_attention import FlashAttentionLayer
from smdistributed.modelparallel.torch.nn.fused_layer_norm import FusedLayerNorm
from smdistributed.modelparallel.torch.nn.layer import DistributedTransformerLayer
from smdistributed.modelparallel.torch.nn.linear import DistributedLinear
from smdistributed.modelparallel.torch.nn.lm_head import DistributedTransformerLMHead
from smdistributed.modelparallel.torch.nn.output import DistributedTransformerOutputLayer
from smdistributed.modelparallel.torch.nn.transformer import DistributedTransformer
from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule

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
