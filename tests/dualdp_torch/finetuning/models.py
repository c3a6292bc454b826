# SPDX-License-Identifier: Apache-2.0
"""Tiny language models in float64, responses of unequal lengths, and textbook losses of one row."""

import os
import warnings

import torch
from torch.nn import functional as F

from tests.closeness import assert_grads_close

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # every model is made from its configuration
VOCABULARY, LENGTH = 23, 10
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "attention_dropout": 0.0,
}  # fmt: skip
_GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1,
    "num_heads": 4, "dropout_rate": 0.0, "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
#: Name -> class, configuration, options; modules of queries and values, second of a feed-forward.
FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2, ["c_attn"], ["mlp.c_proj"]),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _SIZES, ["q_proj", "v_proj"], ["down_proj"]),
    "qwen": ("Qwen2ForCausalLM", "Qwen2Config", _SIZES, ["q_proj", "v_proj"], ["down_proj"]),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_SIZES, "head_dim": 4}, [], []),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5, ["q", "v"], ["wo"]),
}
_LORA = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.0}
#: Name -> configuration of peft and its options.
ADAPTERS = {
    "lora": ("LoraConfig", _LORA),
    "dora": ("LoraConfig", {**_LORA, "use_dora": True}),
    "ia3": ("IA3Config", {}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
}


def model_of(family, *, adapter=None, is_checkpointed=False, seed=0):
    """A model in training mode, all of whose numbers are asymmetric."""
    import transformers

    transformers.logging.set_verbosity_error()
    kind, config, options = FAMILIES[family][:3]
    torch.manual_seed(seed)
    model = getattr(transformers, kind)(getattr(transformers, config)(**options))
    if adapter == "bitfit":
        _train_biases(model)
    elif adapter is not None:
        model = _adapted(adapter, family, model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.double().train()


def _adapted(adapter, family, model):
    import peft

    kind, options = ADAPTERS[adapter]
    attention, feedforward = FAMILIES[family][3:]
    options = {"task_type": "SEQ_2_SEQ_LM" if family == "t5" else "CAUSAL_LM", **options}
    if kind == "IA3Config":
        options["target_modules"] = attention + feedforward
        options["feedforward_modules"] = feedforward
    elif kind == "LoraConfig":
        options |= {"target_modules": attention, "fan_in_fan_out": family == "gpt2"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, getattr(peft, kind)(**options))


def _train_biases(model):
    """BitFit (Ben Zaken et al. 2022): biases, or, where a family has none, norms are trained."""
    has_bias = any(name.endswith("bias") for name, _ in model.named_parameters())
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias") if has_bias else "norm" in name)


def responses(count, seed=1):
    """(prompt, response) of unequal lengths, together at most LENGTH."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda low, high, *shape: torch.randint(low, high, shape, generator=generator)  # noqa: E731
    pairs = []
    for _ in range(count):
        prompt, response = int(draw(1, 5, 1)), int(draw(1, 6, 1))
        pairs.append((draw(1, VOCABULARY, prompt).tolist(), draw(1, VOCABULARY, response).tolist()))
    return pairs


def tensors(rows):
    """Rows of the core as tensors."""
    return {name: torch.as_tensor(column) for name, column in rows.items()}


def log_probs_of(model, prompt, response):
    """log pi(token), one for each token of a response: one unpadded row, the textbook's way."""
    ids = torch.tensor([prompt + response])
    inside = F.log_softmax(model(ids, use_cache=False).logits[0, -ids.shape[1] :], dim=-1)
    each = [inside[len(prompt) + k - 1, token] for k, token in enumerate(response)]
    return torch.stack(each if prompt else each[1:])  # nothing predicts a first token


def gradients_of(model, losses):
    """Name -> (n, *shape), of a list of scalars by plain autograd."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    each = [
        torch.autograd.grad(loss, list(named.values()), materialize_grads=True) for loss in losses
    ]
    return {name: torch.stack(grads) for name, *grads in zip(named, *each, strict=True)}


def assert_equal(found, expected, dtype="float64"):
    """Gradients agree, per example and parameter, to 1e-10."""
    arrays = lambda grads: {name: grad.detach().numpy() for name, grad in grads.items()}  # noqa: E731
    assert_grads_close(arrays(found), arrays(expected), dtype)
