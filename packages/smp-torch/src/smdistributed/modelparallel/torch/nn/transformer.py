"""``smp.nn.DistributedTransformer``.

Source: smd_model_parallel_pytorch_tensor_parallel.rst, Tensor Parallelism Module APIs and Appendix.
"""

from __future__ import annotations

from typing import Any, ClassVar

from smdistributed.modelparallel.torch.nn.in_turn import LayersInTurn
from smdistributed.modelparallel.torch.nn.layer import DistributedTransformerLayer
from smdistributed.modelparallel.torch.nn.options import LayerOptions
from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule


class DistributedTransformer(DistributedModule):
    """Transformer layers, one after the other; a pipeline divides it between them.

    Shape: takes and returns the tuple of ``DistributedTransformerLayer``.

    It takes the arguments of ``DistributedTransformerLayer``, for each layer, and those below.

    Args:
        num_layers: how many.
        options: see ``LayerOptions``; ``attention_window`` may be a list with one entry a layer.

    Raises:
        ValueError: ``num_layers`` below 1, or as ``DistributedTransformerLayer``.

    Source: smd_model_parallel_pytorch_tensor_parallel.rst, Tensor Parallelism Module APIs.
    """

    has_split_children: ClassVar[bool] = True
    takes_tuple: ClassVar[bool] = True
    option_names = LayerOptions.names()

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"num_layers must be at least 1; received {num_layers}.")
        more = LayerOptions(**options)
        windows = more.attention_window
        if isinstance(windows, list | tuple) and len(windows) != num_layers:
            raise ValueError(
                f"attention_window must have one entry a layer ({num_layers}); received "
                f"{len(windows)}."
            )
        self.seq_layers = LayersInTurn(
            *(
                DistributedTransformerLayer(
                    num_attention_heads=num_attention_heads,
                    attention_head_size=attention_head_size,
                    hidden_size=hidden_size,
                    intermediate_size=intermediate_size,
                    attention_dropout_prob=attention_dropout_prob,
                    hidden_dropout_prob=hidden_dropout_prob,
                    activation=activation,
                    layernorm_epsilon=layernorm_epsilon,
                    initializer_range=initializer_range,
                    use_normal_initialization=use_normal_initialization,
                    causal_mask_size=causal_mask_size,
                    add_cross_attention=add_cross_attention,
                    pre_layernorm=pre_layernorm,
                    post_layernorm=post_layernorm,
                    **more.as_layer(index),
                )
                for index in range(num_layers)
            )
        )

    def can_slice(self) -> bool:
        """Whether this rank can run the layers in slices of its examples."""
        return isinstance(self.seq_layers, LayersInTurn) and self.seq_layers.can_slice()

    def forward(self, inputs: Any) -> Any:
        """Applies the layers in order. Collective: TP_GROUP."""
        return self.seq_layers(inputs)
