"""Models of Transformers, with what scripts do to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scripts.kit import Kit, script

_NEEDS: dict[str, Any] = {"needs": "transformers", "tolerance": 1e-6}


def _ids(words: int, size: int = 4, length: int = 6) -> Any:
    return torch.randint(3, words, (size, length))


@script(**_NEEDS)
def gpt2_with_labels_and_generate_between_steps(kit: Kit) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    net = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    )  # fmt: skip
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.AdamW(model.parameters(), 1e-3))

    @kit.step
    def train(model: Any, ids: Any, mask: Any) -> Any:
        labels = ids.masked_fill(mask == 0, -100)
        out = model(input_ids=ids, attention_mask=mask, labels=labels)
        model.backward(out.loss)
        return out.loss

    for _ in range(2):
        ids = _ids(20)
        mask = torch.ones_like(ids)
        mask[1, 4:] = 0
        model.train()
        optimizer.zero_grad()
        kit.note(train(model, ids, mask))
        optimizer.step()
        model.eval()
        with torch.no_grad():
            found = net.generate(torch.tensor([[1, 5]]), max_new_tokens=3, do_sample=False)
        kit.note(found.double())


@script(**_NEEDS)
def llama_with_hidden_states_and_value_head(kit: Kit) -> None:
    from transformers import LlamaConfig, LlamaModel

    class Reward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = LlamaModel(
                LlamaConfig(
                    vocab_size=20, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
                    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
                    use_cache=False,
                )
            )  # fmt: skip
            self.v_head = nn.Linear(8, 1, bias=False)

        def forward(self, ids: Any, mask: Any) -> Any:
            out = self.backbone(ids, attention_mask=mask, output_hidden_states=True)
            h = torch.stack(out.hidden_states[-2:]).mean(0)
            last = mask.sum(1) - 1
            return self.v_head(h)[torch.arange(len(ids)), last].squeeze(-1)

    model = kit.model(Reward())
    optimizer = kit.optimizer(torch.optim.AdamW(model.parameters(), 1e-3))

    @kit.step
    def train(model: Any, chosen: Any, rejected: Any, mask: Any) -> Any:
        better, worse = model(chosen, mask), model(rejected, mask)
        loss = -F.logsigmoid(better - worse).mean()
        model.backward(loss)
        return loss, (better > worse).double().mean()

    for _ in range(2):
        optimizer.zero_grad()
        mask = torch.ones(4, 6, dtype=torch.long)
        mask[0, 3:] = 0
        kit.note(*train(model, _ids(20), _ids(20), mask))
        optimizer.step()


@script(**_NEEDS)
def bert_masked_words_with_resized_embeddings(kit: Kit) -> None:
    from transformers import BertConfig, BertForMaskedLM

    net = BertForMaskedLM(
        BertConfig(
            vocab_size=18, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=16, max_position_embeddings=16, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    net.resize_token_embeddings(20, mean_resizing=False)
    model = kit.model(net)
    no_decay = ["bias", "LayerNorm.weight"]
    groups = [
        {
            "params": [
                p for n, p in model.named_parameters() if any(d in n for d in no_decay) == flag
            ],
            "weight_decay": 0.0 if flag else 0.01,
        }
        for flag in (False, True)
    ]
    optimizer = kit.optimizer(torch.optim.AdamW(groups, lr=1e-3))

    @kit.step
    def train(model: Any, ids: Any, labels: Any, mask: Any) -> Any:
        loss, logits = model(ids, attention_mask=mask, labels=labels, return_dict=False)
        model.backward(loss)
        return loss, (logits.argmax(-1) == labels).double().mean()

    for _ in range(2):
        ids = _ids(20)
        labels = ids.clone()
        chosen = torch.rand(ids.shape) < 0.4
        labels[~chosen] = -100
        ids[chosen] = 19
        optimizer.zero_grad()
        kit.note(*train(model, ids, labels, torch.ones_like(ids)))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@script(**_NEEDS)
def t5_with_labels_and_decoder_inputs(kit: Kit) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    net = T5ForConditionalGeneration(
        T5Config(
            vocab_size=20, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0, use_cache=False,
        )
    )  # fmt: skip
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.Adafactor(model.parameters(), lr=1e-3))

    @kit.step
    def train(model: Any, ids: Any, mask: Any, labels: Any) -> Any:
        out = model(input_ids=ids, attention_mask=mask, labels=labels)
        model.backward(out["loss"])
        return out["loss"]

    for _ in range(2):
        optimizer.zero_grad()
        kit.note(train(model, _ids(20), torch.ones(4, 6, dtype=torch.long), _ids(20, 4, 4)))
        optimizer.step()


@script(**_NEEDS)
def vit_backbone_with_own_head_frozen_at_first(kit: Kit) -> None:
    from transformers import ViTConfig, ViTModel

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit = ViTModel(
                ViTConfig(
                    hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
                    image_size=8, patch_size=4, hidden_dropout_prob=0.0,
                    attention_probs_dropout_prob=0.0,
                ),
                add_pooling_layer=False,
            )  # fmt: skip
            self.classifier = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3))

        def forward(self, pixel_values: Any, labels: Any = None) -> Any:
            h = self.vit(pixel_values).last_hidden_state[:, 0]
            logits = self.classifier(h)
            return (None if labels is None else F.cross_entropy(logits, labels)), logits

    net = Classifier()
    for p in net.vit.parameters():
        p.requires_grad = False
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.AdamW(model.parameters(), 1e-3))

    @kit.step
    def train(model: Any, batch: Any) -> Any:
        loss, _ = model(**batch)
        model.backward(loss)
        return loss

    for number in range(3):
        if number == 1:
            for name, p in net.vit.named_parameters():
                p.requires_grad = "layer.1" in name or "layers.1" in name
        optimizer.zero_grad()
        batch = {"pixel_values": torch.randn(4, 3, 8, 8), "labels": torch.randint(0, 3, (4,))}
        kit.note(train(model, batch))
        optimizer.step()


@script(**_NEEDS)
def whisper_like_speech_to_text(kit: Kit) -> None:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    net = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_mel_bins=4,
            max_source_positions=6, max_target_positions=8, dropout=0.0, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, use_cache=False,
            begin_suppress_tokens=None,
        )
    )  # fmt: skip
    net.model.encoder.embed_positions.requires_grad_(False)
    model = kit.model(net)
    optimizer = kit.optimizer(torch.optim.AdamW(model.parameters(), 1e-3))

    @kit.step
    def train(model: Any, features: Any, labels: Any) -> Any:
        out = model(input_features=features, labels=labels)
        model.backward(out.loss)
        return out.loss

    for _ in range(2):
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(4, 4, 12), _ids(20, 4, 5)))
        optimizer.step()


@script(**_NEEDS)
def qwen_with_inputs_embeds_of_a_projector(kit: Kit) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    class Vlm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision = nn.Conv2d(3, 6, 4, 4)
            self.projector = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8))
            self.language = Qwen2ForCausalLM(
                Qwen2Config(
                    vocab_size=20, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
                    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
                    tie_word_embeddings=True,
                )
            )  # fmt: skip

        def forward(self, pixels: Any, ids: Any, labels: Any) -> Any:
            image = self.projector(self.vision(pixels).flatten(2).transpose(1, 2))
            embeds = self.language.get_input_embeddings()(ids).clone()
            slot = ids == 3
            embeds = embeds.masked_scatter(slot.unsqueeze(-1), image)
            return self.language(inputs_embeds=embeds, labels=labels, use_cache=False)

    net = Vlm()
    net.language.requires_grad_(False)
    net.language.model.layers[-1].requires_grad_(True)
    model = kit.model(net)
    optimizer = kit.optimizer(
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    )

    @kit.step
    def train(model: Any, pixels: Any, ids: Any, labels: Any) -> Any:
        out = model(pixels, ids, labels)
        model.backward(out.loss)
        return out.loss

    for _ in range(2):
        ids = torch.randint(4, 20, (4, 8))
        ids[:, 1:5] = 3
        labels = ids.masked_fill(ids == 3, -100)
        optimizer.zero_grad()
        kit.note(train(model, torch.randn(4, 3, 8, 8), ids, labels))
        optimizer.step()


@script(**_NEEDS)
def sentence_embeddings_by_mean_pooling(kit: Kit) -> None:
    from transformers import DistilBertConfig, DistilBertModel

    class Sentences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = DistilBertModel(
                DistilBertConfig(
                    vocab_size=20, dim=8, n_layers=2, n_heads=2, hidden_dim=16,
                    max_position_embeddings=16, dropout=0.0, attention_dropout=0.0,
                )
            )  # fmt: skip

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            h = self.encoder(input_ids, attention_mask=attention_mask)[0]
            mask = attention_mask.unsqueeze(-1).expand(h.size()).to(h.dtype)
            return (h * mask).sum(1) / mask.sum(1).clamp(min=1e-9)

    model = kit.model(Sentences())
    optimizer = kit.optimizer(torch.optim.AdamW(model.parameters(), 1e-3))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 3)

    @kit.step
    def train(model: Any, anchors: Any, positives: Any) -> Any:
        a, b = model(**anchors), model(**positives)
        scores = F.cosine_similarity(a.unsqueeze(1), b.unsqueeze(0), dim=-1) * 20
        loss = F.cross_entropy(scores, torch.arange(len(a)))
        model.backward(loss)
        return loss

    def encoded() -> Any:
        mask = torch.ones(4, 6, dtype=torch.long)
        mask[:2, 4:] = 0
        return {"input_ids": _ids(20), "attention_mask": mask}

    for _ in range(2):
        optimizer.zero_grad()
        kit.note(train(model, encoded(), encoded()))
        optimizer.step()
        scheduler.step()


@script(**_NEEDS)
def opt_with_low_ranks_injected_like_peft(kit: Kit) -> None:
    from transformers import OPTConfig, OPTForCausalLM

    class LoraLayer(nn.Module):
        def __init__(self, base_layer: nn.Linear, r: int) -> None:
            super().__init__()
            self.base_layer = base_layer
            self.lora_A = nn.ModuleDict(
                {"default": nn.Linear(base_layer.in_features, r, bias=False)}
            )
            self.lora_B = nn.ModuleDict(
                {"default": nn.Linear(r, base_layer.out_features, bias=False)}
            )
            nn.init.zeros_(self.lora_B["default"].weight)
            self.active, self.scaling = ["default"], {"default": 2.0}

        def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
            result = self.base_layer(x, *args, **kwargs)
            for name in self.active:
                a, b = self.lora_A[name], self.lora_B[name]
                result = result + b(a(x.to(a.weight.dtype))) * self.scaling[name]
            return result

    net = OPTForCausalLM(
        OPTConfig(
            vocab_size=20, hidden_size=8, ffn_dim=16, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=16, word_embed_proj_dim=8, dropout=0.0, attention_dropout=0.0,
            use_cache=False,
        )
    )  # fmt: skip
    net.requires_grad_(False)
    for name, module in list(net.named_modules()):
        if name.endswith(("q_proj", "v_proj")):
            parent, _, child = name.rpartition(".")
            setattr(net.get_submodule(parent), child, LoraLayer(module, 2))
    net.enable_input_require_grads()
    model = kit.model(net)
    optimizer = kit.optimizer(
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    )

    @kit.step
    def train(model: Any, ids: Any) -> Any:
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    for number in range(3):
        if number == 2:  # as with disable_adapter()
            for module in net.modules():
                if isinstance(module, LoraLayer):
                    module.scaling["default"] = 1.0
        optimizer.zero_grad()
        kit.note(train(model, _ids(20)))
        optimizer.step()
