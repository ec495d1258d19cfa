"""One job of the Trainer of Transformers: train, evaluate, save; or resume and train on.

The same code runs in one process without the library, and on the ranks of a pipeline.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_pt_utils import get_parameter_names
from transformers.utils import is_sagemaker_mp_enabled

import smdistributed.modelparallel.torch as smp

VOCABULARY = 41
LENGTH = 12
EXAMPLES = 32
ACCUMULATED = 2


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same in every process; the last ones of some texts are masked."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._tokens = torch.randint(3, VOCABULARY, (EXAMPLES, LENGTH), generator=generator)

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens[index]
        mask = torch.ones_like(tokens)
        mask[LENGTH - index % 3 :] = 0
        # As many labels in each text: a mean over microbatches is that over the batch only then.
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}


class NotingTrainer(Trainer):  # type: ignore[misc]
    """The Trainer; notes the losses, which its log rounds."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # With model parallelism it takes the model's own mean of the loss; alone it would divide
        # by a number of tokens that it counts.
        self.model_accepts_loss_kwargs = False
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def build(architecture: str) -> nn.Module:
    torch.manual_seed(0)
    if architecture == "gpt2":
        gpt2 = GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=4,
            n_head=2,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        )
        return GPT2LMHeadModel(gpt2)
    bert = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(bert)


IS_NEWER = int(transformers.__version__.partition(".")[0]) >= 5
#: A model-parallel Trainer of Transformers 4 looks for no other file on resume.
SAVING: dict[str, Any] = {} if IS_NEWER else {"save_safetensors": False}


def given(architecture: str) -> tuple[nn.Module, tuple[Any, Any]]:
    """Returns the model for the Trainer, and what that of Transformers 5 does not make with it."""
    if not (IS_NEWER and is_sagemaker_mp_enabled()):
        return build(architecture), (None, None)
    if smp.state.cfg.tensor_parallel_degree == 1:
        model = build(architecture)
        return model, optimizers(model)
    with smp.tensor_parallelism(auto=True):
        net = build(architecture)
    wrapped = smp.DistributedModel(net, backward_passes_per_step=ACCUMULATED)
    assert any(wrapped.distributed_modules()), "something is in slices"
    return net, optimizers(net)


def optimizers(model: nn.Module) -> tuple[Any, Any]:
    """Returns an optimizer with the groups of the Trainer's own."""
    decayed = get_parameter_names(model, [nn.LayerNorm], [r"bias", r"layernorm", r"(^|\.)norm"])
    named = dict(model.named_parameters())
    groups = [
        {"params": [each for name, each in named.items() if name in decayed], "weight_decay": 0.1},
        {"params": [each for name, each in named.items() if name not in decayed]},
    ]
    adam = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)
    return smp.DistributedOptimizer(adam), None


class Arguments(TrainingArguments):  # type: ignore[misc]
    """With model parallelism the Trainer knows no device but CUDA's: here it is the host."""

    @functools.cached_property
    def _setup_devices(self) -> torch.device:
        if not is_sagemaker_mp_enabled():
            return super()._setup_devices  # type: ignore[no-any-return]
        AcceleratorState._reset_state(reset_partial_state=True)
        self.distributed_state = None
        self._n_gpu = 0
        return torch.device("cpu")


def arguments(folder: str, steps: int, saved: int) -> Arguments:
    return Arguments(
        output_dir=folder,
        max_steps=steps,
        save_steps=saved,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=saved,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        learning_rate=1e-2,
        gradient_accumulation_steps=ACCUMULATED,
        max_grad_norm=0.1,  # less than the norms: clipping acts
        weight_decay=0.1,
        **SAVING,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=not is_sagemaker_mp_enabled(),
    )


def job(architecture: str, folder: str, steps: int, saved: int, resumes: bool) -> dict[str, Any]:
    """Trains; returns the logged losses, what evaluation gives, and the predictions."""
    model, made = given(architecture)
    trainer = NotingTrainer(
        model=model,
        optimizers=made,
        args=arguments(folder, steps, saved),
        train_dataset=Texts(1),
        eval_dataset=Texts(2),
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{saved}" if resumes else None)
    evaluation = trainer.evaluate()
    predictions = trainer.predict(Texts(3))
    trainer.save_model(f"{folder}/final")
    return {
        "losses": trainer.losses,
        "norms": [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log],
        "evaluations": [
            log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log
        ],
        "evaluation": evaluation["eval_loss"],
        "predictions": torch.from_numpy(predictions.predictions),
    }
