"""``smp.nn.DistributedTransformerLMHead``.

Source: smd_model_parallel_pytorch_tensor_parallel.rst, Tensor Parallelism Module APIs and Appendix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from smdistributed.modelparallel.torch.nn.embedding import DistributedEmbedding, Head
from smdistributed.modelparallel.torch.nn.options import LayerOptions
from smdistributed.modelparallel.torch.nn.original import READING, method_of_original
from smdistributed.modelparallel.torch.nn.parts import norm
from smdistributed.modelparallel.torch.nn.transformer import DistributedTransformer
from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule

_OWN_OPTIONS = frozenset(
    {
        "use_position_embedding",
        "embedding_dropout_prob",
        "tie_lm_head",
        "lm_head_bias",
        "distribute_embedding",
        "zero_init",
    }
)


@dataclass(frozen=True)
class _Inputs:
    """The items of the tuple that a language model takes."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    token_type_ids: torch.Tensor | None
    position_ids: torch.Tensor | None
    cross_states: torch.Tensor | None
    cross_mask: torch.Tensor | None
    labels: torch.Tensor | None


class DistributedTransformerLMHead(DistributedModule):
    """Embeddings, a ``DistributedTransformer``, and a head that compares with every token.

    Forward and backward are collective: TP_GROUP.

    Shape: takes ``(input_ids, attention_mask, token_type_ids, position_ids, labels)``, with
    ``add_cross_attention`` ``(input_ids, attention_mask, token_type_ids, position_ids,
    cross_states, cross_mask, labels)``, each but the first may be None. Ids, labels and the masks
    are ``(N, S)``; **1 in a mask hides a token**, the reverse of Transformers. Returns hidden
    states ``(N, S, hidden_size)`` without ``add_lm_head``; logits ``(N, S, vocab_size)`` with it;
    ``(loss, logits)`` if labels are given: the mean over those that are not -100, of each position
    compared with the next token if ``causal_mask_size`` is set, else with its own.

    It takes the arguments of ``DistributedTransformer``, and those below.

    Args:
        vocab_size: how many tokens there are.
        num_positions: the longest sequence.
        num_token_types: kinds of tokens; 0 leaves their embedding out.
        add_lm_head: False returns hidden states.
        use_position_embedding: False leaves it out.
        embedding_dropout_prob: of the embeddings; None takes ``hidden_dropout_prob``.
        tie_lm_head: the head's weight is that of the word embedding.
        lm_head_bias: the head has a bias; it then has a weight of its own.
        distribute_embedding: accepted: the word embedding is always split.
        zero_init: accepted, without effect.
        options: see ``LayerOptions``.

    Raises:
        ValueError: as the parts; from ``forward``, inputs that break a rule above.

    Source: smd_model_parallel_pytorch_tensor_parallel.rst, Tensor Parallelism Module APIs.
    """

    has_split_children: ClassVar[bool] = True
    takes_tuple: ClassVar[bool] = True
    option_names = LayerOptions.names() | _OWN_OPTIONS

    def __init__(
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        *,
        use_position_embedding: bool = True,
        embedding_dropout_prob: float | None = None,
        tie_lm_head: bool = True,
        lm_head_bias: bool = False,
        distribute_embedding: bool = True,
        zero_init: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.num_positions = num_positions
        self.num_token_types = num_token_types
        self.add_cross_attention = add_cross_attention
        self.is_causal = causal_mask_size is not None
        self.add_lm_head = add_lm_head
        self.word_embedding = DistributedEmbedding(
            vocab_size, hidden_size, initializer_range=initializer_range
        )

        def embedding(number: int) -> nn.Embedding:
            made = nn.Embedding(number, hidden_size)
            nn.init.normal_(made.weight, std=initializer_range)
            return made

        self.position_embedding = embedding(num_positions) if use_position_embedding else None
        self.token_type_embedding = embedding(num_token_types) if num_token_types else None
        share = hidden_dropout_prob if embedding_dropout_prob is None else embedding_dropout_prob
        self.dropout = nn.Dropout(share)
        self.transformer = DistributedTransformer(
            num_layers=num_layers,
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
            **options,
        )
        ends_unnormed = pre_layernorm and not post_layernorm
        self.layernorm = norm(hidden_size, layernorm_epsilon) if ends_unnormed else None
        self.lm_head = None
        if add_lm_head and (lm_head_bias or not tie_lm_head):
            self.lm_head = Head(
                hidden_size, vocab_size, bias=lm_head_bias, initializer_range=initializer_range
            )

    def __getattr__(self, name: str) -> Any:
        """Has what reads the module that it stands for; says what to do for the rest of it."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            original = self.stands_for
            if original is None or name.startswith("_") or not hasattr(original, name):
                raise
            if name in READING:
                return method_of_original(self, name)
            raise AttributeError(
                f"{error}: it stands for {original.__name__}, which has one, and is in slices. "
                "Save the weights by smp.save_checkpoint(..., partial=False), in the form of "
                f"{original.__name__}, and load them into one, for its {name}; or leave the model "
                "whole: smp.set_tensor_parallelism(module, enabled=False) before "
                "smp.DistributedModel."
            ) from None

    def forward(self, inputs: Any) -> Any:
        """Runs the model on the own examples. Collective: TP_GROUP."""
        return self._run(self._unpack(inputs), None)

    def with_states(self, inputs: Any) -> tuple[Any, list[torch.Tensor]]:
        """Runs the model; returns what the embeddings and each layer give, too.

        The last of these is behind the last norm. Collective: TP_GROUP.
        """
        states: list[torch.Tensor] = []
        return self._run(self._unpack(inputs), states), states

    def _run(self, given: _Inputs, states: list[torch.Tensor] | None) -> Any:
        """Runs the model; puts hidden states into a list, if there is one."""
        group = self.tensor_group
        with group.examples(
            self.place,
            given.input_ids,
            [given.attention_mask, given.cross_mask],
            can_slice=states is None and self.transformer.can_slice(),
        ) as (_, (mask, cross_mask)):
            hidden = self._hidden(given, mask, cross_mask, states)
            if not self.add_lm_head:
                return hidden
            if self.lm_head is not None:
                logits = self.lm_head(hidden)
            else:
                logits = self.word_embedding(hidden, as_head=True)
        if given.labels is None:
            return logits
        return self._loss(logits, given.labels), logits

    def _hidden(
        self,
        given: _Inputs,
        hidden_keys: torch.Tensor | None,
        cross_keys: torch.Tensor | None,
        states: list[torch.Tensor] | None,
    ) -> torch.Tensor:
        embedded = self.word_embedding(given.input_ids)
        if self.position_embedding is not None:
            positions = given.position_ids
            if positions is None:
                device = given.input_ids.device
                positions = torch.arange(given.input_ids.shape[1], device=device)[None]
            embedded = embedded + self.position_embedding(positions)
        if self.token_type_embedding is not None and given.token_type_ids is not None:
            embedded = embedded + self.token_type_embedding(given.token_type_ids)
        embedded = self.dropout(embedded)
        mask = _additive(hidden_keys, embedded)
        entering: tuple[torch.Tensor | None, ...] = (embedded, mask)
        if self.add_cross_attention:
            entering = (embedded, given.cross_states, mask, _additive(cross_keys, embedded))
        if states is None:
            hidden = self.transformer(entering)[0]
        else:
            states += [embedded, *self.transformer.seq_layers.states(entering)]
            hidden = states[-1]
        normed: torch.Tensor = hidden if self.layernorm is None else self.layernorm(hidden)
        if states is not None:
            states[-1] = normed
        return normed

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.is_causal:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def _unpack(self, inputs: Any) -> _Inputs:
        names = ["input_ids", "attention_mask", "token_type_ids", "position_ids"]
        names += ["cross_states", "cross_mask"] if self.add_cross_attention else []
        names += ["labels"]
        if not isinstance(inputs, tuple | list):
            raise ValueError(_rule(self, f"takes ({', '.join(names)})", type(inputs).__name__))
        items = list(inputs)
        if self.add_cross_attention and len(items) == 8 and items[4] is items[5]:
            del items[5]  # as the documents print it
        if len(items) != len(names):
            raise ValueError(_rule(self, f"takes ({', '.join(names)})", f"{len(items)} items"))
        by_name = {"cross_states": None, "cross_mask": None, **dict(zip(names, items, strict=True))}
        given = _Inputs(**by_name)
        ids = given.input_ids
        if self.position_embedding is not None and ids.shape[1] > self.num_positions:
            limit = f"num_positions ({self.num_positions}) is the longest sequence"
            raise ValueError(_rule(self, limit, f"input_ids of shape {tuple(ids.shape)}"))
        if given.token_type_ids is not None and not self.num_token_types:
            raise ValueError(_rule(self, "num_token_types is 0", "token_type_ids"))
        mask = given.attention_mask
        if mask is not None and mask.shape != ids.shape:
            rule = f"attention_mask must have the shape of input_ids, {tuple(ids.shape)}"
            raise ValueError(_rule(self, rule, str(tuple(mask.shape))))
        return given


def _rule(module: nn.Module, rule: str, received: str) -> str:
    return f"{type(module).__name__}: {rule}; received {received}."


def _additive(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """Returns a mask of ones that hide as one that is added to scores, ``(N, 1, 1, S)``."""
    if mask is None:
        return None
    lowest = torch.finfo(like.dtype).min
    return (mask.to(like.dtype) * lowest)[:, None, None]
