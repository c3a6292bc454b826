# SPDX-License-Identifier: Apache-2.0
"""Language models of `transformers`, tiny and randomly initialised from their configurations."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from tests.zoo.entry import N, Problem

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # every model is made from its configuration
VOCABULARY, LENGTH = 67, 9


def tokens(*shape: int, seed: int = 0, high: int = VOCABULARY) -> torch.Tensor:
    """Ids without the special ones at the lower end."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, high, shape, generator=generator)


def hugging_face(model: str, config: str, options: dict[str, Any]) -> Any:
    """A model of `transformers` in training mode, without any dropout."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        experts = options.get("experts_implementation")
        settings = getattr(transformers, config)(
            **{name: value for name, value in options.items() if name != "experts_implementation"}
        )
        built = getattr(transformers, model)(settings)
        if experts:
            built.set_experts_implementation(experts)
    for module in built.modules():  # whatever its configuration calls it
        names = ["p"] if "dropout" in type(module).__name__.lower() else []
        names += [name for name in vars(module) if "drop" in name]
        for name in names:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return built.train()


def next_token(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """(n,) mean over each row's tokens."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return each.view(len(ids), -1).mean(1)


def label(model: Any, batch: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    """(n,) of a classifier."""
    return F.cross_entropy(model(**batch).logits, y, reduction="none")


def token_labels(model: Any, batch: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    """(n,) mean over each row's tokens that count, as in masked language modelling."""
    logits = model(**batch).logits.transpose(1, 2)
    each = F.cross_entropy(logits, y, reduction="none", ignore_index=-100)
    return each.sum(1) / (y != -100).sum(1)


def translation(model: Any, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """(n,) mean over each row's target tokens, by teacher forcing."""
    out = model(input_ids=source, decoder_input_ids=target, use_cache=False).logits[:, :-1]
    each = F.cross_entropy(out.transpose(1, 2), target[:, 1:], reduction="none")
    return each.mean(1)


def padded(seed: int) -> dict[str, torch.Tensor]:
    """Rows of unequal lengths, padded on the right."""
    lengths = torch.tensor([LENGTH, 3, 7, 5])[:N]
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {"input_ids": tokens(N, LENGTH, seed=seed) * mask, "attention_mask": mask}


def causal(model: str, config: str, **options: Any) -> Problem:
    """A decoder that predicts the next token."""
    built = hugging_face(model, config, {**DECODER, **options})
    return Problem(built, next_token, (tokens(N, LENGTH, seed=1),))


def classifier(model: str, config: str, **options: Any) -> Problem:
    """A classifier of padded sequences."""
    if "d_model" not in options:  # else the configuration has names of its own
        options = {**ENCODER, **options}
    built = hugging_face(model, config, {"num_labels": 3, **options})
    return Problem(built, label, (padded(2), tokens(N, seed=3, high=8) - 5))


def masked(model: str, config: str, **options: Any) -> Problem:
    """A masked language model; other tokens have no label."""
    built = hugging_face(model, config, {**ENCODER, **options})
    batch = padded(4)
    labels = batch["input_ids"].masked_fill(torch.arange(LENGTH) % 3 > 0, -100)
    return Problem(built, token_labels, (batch, labels))


def seq2seq(model: str, config: str, **options: Any) -> Problem:
    """An encoder and a decoder."""
    built = hugging_face(model, config, options)
    return Problem(built, translation, (tokens(N, LENGTH, seed=5), tokens(N, 6, seed=6)))


DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = DECODER | {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "type_vocab_size": 2,
}
ENCODER.pop("num_key_value_heads")
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_inner": 48}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EAGER = _EXPERTS | {"experts_implementation": "eager"}
_OLMOE = {"num_experts": 4, "num_experts_per_tok": 2}
_QWEN_MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1,
}  # fmt: skip
_GRIFFIN = {"lru_width": 32, "attention_window_size": 4, "num_key_value_heads": 1, "head_dim": 8}
_JAMBA = {
    "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 3, "use_mamba_kernels": False,
}  # fmt: skip
_XLNET = {"d_model": 32, "d_inner": 48, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY}
_FUNNEL = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_inner": 48, "n_head": 4, "d_head": 8,
    "block_sizes": [1, 1],
}  # fmt: skip
_MOBILE = {"intra_bottleneck_size": 16, "embedding_size": 16, "num_feedforward_networks": 2}
_REFORMER = {
    "is_decoder": True, "attn_layers": ["local", "lsh"], "feed_forward_size": 48,
    "attention_head_size": 8, "axial_pos_embds": False, "num_buckets": 2,
    "local_attn_chunk_length": 3, "lsh_attn_chunk_length": 3, "hash_seed": 0,
}  # fmt: skip
_SPLIT = "head_dim"
#: name, function above, model, configuration, options.
_ROWS: tuple[tuple[str, Any, str, str, dict[str, Any]], ...] = (
    # decoders
    ("gpt2", causal, "GPT2LMHeadModel", "GPT2Config", _GPT2),
    ("llama", causal, "LlamaForCausalLM", "LlamaConfig", {}),
    ("mistral", causal, "MistralForCausalLM", "MistralConfig", {"sliding_window": 4}),
    ("gemma", causal, "GemmaForCausalLM", "GemmaConfig", {_SPLIT: 8}),
    ("gemma2", causal, "Gemma2ForCausalLM", "Gemma2Config", {_SPLIT: 8, "sliding_window": 4}),
    ("gemma3", causal, "Gemma3ForCausalLM", "Gemma3TextConfig", {_SPLIT: 8, "sliding_window": 4}),
    ("qwen2", causal, "Qwen2ForCausalLM", "Qwen2Config", {}),
    ("qwen3", causal, "Qwen3ForCausalLM", "Qwen3Config", {_SPLIT: 8}),
    ("gpt_neox", causal, "GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
    (
        "gpt_neo",
        causal,
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    ),
    ("gptj", causal, "GPTJForCausalLM", "GPTJConfig", {**_GPT2, "rotary_dim": 4}),
    ("opt", causal, "OPTForCausalLM", "OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    ("bloom", causal, "BloomForCausalLM", "BloomConfig", {"n_layer": 2, "n_head": 4}),
    ("falcon", causal, "FalconForCausalLM", "FalconConfig", {"alibi": False}),
    ("phi", causal, "PhiForCausalLM", "PhiConfig", {"resid_pdrop": 0.0}),
    ("phi3", causal, "Phi3ForCausalLM", "Phi3Config", {}),
    ("olmo2", causal, "Olmo2ForCausalLM", "Olmo2Config", {}),
    ("starcoder2", causal, "Starcoder2ForCausalLM", "Starcoder2Config", {}),
    ("stablelm", causal, "StableLmForCausalLM", "StableLmConfig", {}),
    ("cohere", causal, "CohereForCausalLM", "CohereConfig", {}),
    ("granite", causal, "GraniteForCausalLM", "GraniteConfig", {}),
    ("smollm3", causal, "SmolLM3ForCausalLM", "SmolLM3Config", {}),
    ("mpt", causal, "MptForCausalLM", "MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2}),
    ("mamba", causal, "MambaForCausalLM", "MambaConfig", {"state_size": 4, "time_step_rank": 3}),
    (
        "mamba2",
        causal,
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {"state_size": 4, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 4},
    ),
    ("mixtral", causal, "MixtralForCausalLM", "MixtralConfig", _EXPERTS),
    ("mixtral_eager", causal, "MixtralForCausalLM", "MixtralConfig", _EAGER),
    ("olmoe", causal, "OlmoeForCausalLM", "OlmoeConfig", _OLMOE),
    ("qwen2_moe", causal, "Qwen2MoeForCausalLM", "Qwen2MoeConfig", _QWEN_MOE),
    ("gpt_oss", causal, "GptOssForCausalLM", "GptOssConfig", {**_EXPERTS, _SPLIT: 8}),
    ("recurrent_gemma", causal, "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", _GRIFFIN),
    ("jamba", causal, "JambaForCausalLM", "JambaConfig", _JAMBA),
    ("rwkv", causal, "RwkvForCausalLM", "RwkvConfig", {"attention_hidden_size": 32}),
    # encoders
    ("bert", classifier, "BertForSequenceClassification", "BertConfig", {}),
    ("bert_mlm", masked, "BertForMaskedLM", "BertConfig", {}),
    ("roberta", classifier, "RobertaForSequenceClassification", "RobertaConfig", {}),
    (
        "albert",
        classifier,
        "AlbertForSequenceClassification",
        "AlbertConfig",
        {"embedding_size": 16, "num_hidden_groups": 1},
    ),
    (
        "distilbert",
        masked,
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    ),
    ("electra", classifier, "ElectraForSequenceClassification", "ElectraConfig", {}),
    ("mpnet", masked, "MPNetForMaskedLM", "MPNetConfig", {}),
    ("fnet", classifier, "FNetForSequenceClassification", "FNetConfig", {}),
    ("modernbert", masked, "ModernBertForMaskedLM", "ModernBertConfig", {}),
    (
        "squeezebert",
        classifier,
        "SqueezeBertForSequenceClassification",
        "SqueezeBertConfig",
        {"embedding_size": 32},
    ),
    ("convbert", classifier, "ConvBertForSequenceClassification", "ConvBertConfig", {}),
    ("roformer", masked, "RoFormerForMaskedLM", "RoFormerConfig", {}),
    ("nystromformer", masked, "NystromformerForMaskedLM", "NystromformerConfig", {}),
    ("xlnet", classifier, "XLNetForSequenceClassification", "XLNetConfig", _XLNET),
    ("funnel", classifier, "FunnelForSequenceClassification", "FunnelConfig", _FUNNEL),
    (
        "big_bird",
        masked,
        "BigBirdForMaskedLM",
        "BigBirdConfig",
        {"attention_type": "original_full"},
    ),
    ("megatron_bert", masked, "MegatronBertForMaskedLM", "MegatronBertConfig", {}),
    ("ernie", classifier, "ErnieForSequenceClassification", "ErnieConfig", {}),
    ("esm", masked, "EsmForMaskedLM", "EsmConfig", {"position_embedding_type": "rotary"}),
    ("ibert", masked, "IBertForMaskedLM", "IBertConfig", {}),
    ("mobilebert", classifier, "MobileBertForSequenceClassification", "MobileBertConfig", _MOBILE),
    ("reformer", causal, "ReformerModelWithLMHead", "ReformerConfig", _REFORMER),
    ("deberta", classifier, "DebertaForSequenceClassification", "DebertaConfig", {}),
    ("deberta_v2", classifier, "DebertaV2ForSequenceClassification", "DebertaV2Config", {}),
    # encoders with decoders
    ("t5", seq2seq, "T5ForConditionalGeneration", "T5Config", _T5),
    ("mt5", seq2seq, "MT5ForConditionalGeneration", "MT5Config", _T5),
    ("bart", seq2seq, "BartForConditionalGeneration", "BartConfig", _BART),
    ("pegasus", seq2seq, "PegasusForConditionalGeneration", "PegasusConfig", _BART),
    ("marian", seq2seq, "MarianMTModel", "MarianConfig", _BART),
)

#: name -> build, as in `Entry`.
MODELS: dict[str, Callable[[], Problem]] = {
    name: partial(function, model, config, **options)
    for name, function, model, config, options in _ROWS
}
