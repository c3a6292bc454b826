# SPDX-License-Identifier: Apache-2.0
"""Whole PyTorch models: of `transformers` and `peft`, from their configurations, and handmade.

Each shows what only a whole model shows; its name or comment says what. `MODELS` holds functions
that return (model, loss_fn, batch), the same numbers at every call.
"""

import copy
import functools
import importlib
import os
import warnings

import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from tests import reference
from tests.dualdp_torch.checks import data, ids, randomise
from tests.grid.torch_layers import Apply, parameter

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # every model is made from its configuration
N, VOCABULARY, LENGTH, SIZE = 4, 67, 9, 32
MODELS = {}

# ---------------------------------------------------------------------- transformers


def transformer(name, head, **options):
    """A model of `transformers` in training mode, without any dropout, with loss and batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = importlib.import_module("transformers")
        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**options)
        model = dpt.fix(getattr(transformers, f"{name}{head}")(config))
    for module in model.modules():  # whatever its configuration calls it
        names = ["p"] if "dropout" in type(module).__name__.lower() else []
        for key in [*names, *(key for key in vars(module) if "drop" in key)]:
            if isinstance(getattr(module, key, None), float):
                setattr(module, key, 0.0)
    return model.train(), *HEADS.get(head, (next_token, (words(LENGTH),)))


def words(*shape, seed=1):
    """Ids without the special ones at the lower end."""
    return 5 + ids(VOCABULARY - 5, N, *shape, seed=seed)


def padded():
    """Rows of unequal lengths, padded on the right."""
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [3], [7], [5]])).long()
    return {"input_ids": words(LENGTH) * mask, "attention_mask": mask}


def of_tokens(logits, targets):
    """(n, t, v), (n, t) -> (n,) mean over each row's tokens that count."""
    each = F.cross_entropy(logits.mT, targets, reduction="none", ignore_index=-100)
    return each.sum(1) / (targets != -100).sum(1)


def next_token(model, x):
    return of_tokens(model(input_ids=x, use_cache=False).logits[:, -LENGTH:-1], x[:, 1:])


def translation(model, source, target):
    logits = model(input_ids=source, decoder_input_ids=target, use_cache=False).logits
    return of_tokens(logits[:, :-1], target[:, 1:])


def label(model, batch, y):
    return F.cross_entropy(model(**batch).logits, y, reduction="none")


def patches_that_are_masked(model, x, noise):
    out = model(pixel_values=x, noise=noise)
    apart = (out.logits - model.patchify(x)).square().mean(2)
    return (apart * out.mask).sum(1) / out.mask.sum(1)


Y, IMAGES = torch.arange(N) % 3, {"pixel_values": data(N, 3, SIZE, SIZE)}
EVERY_THIRD = torch.arange(LENGTH) % 3 > 0
#: Head -> loss and batch, where it is no language model.
HEADS = {
    "ForSequenceClassification": (label, (padded(), Y)),
    "ForMaskedLM": (
        lambda model, batch, y: of_tokens(model(**batch).logits, y),
        (padded(), padded()["input_ids"].masked_fill(EVERY_THIRD, -100)),
    ),
    "ForConditionalGeneration": (translation, (words(LENGTH), words(6, seed=2))),
    "ForImageClassification": (label, (IMAGES, Y)),
    "ForPreTraining": (
        patches_that_are_masked,
        (IMAGES["pixel_values"], torch.rand(N, 16, generator=torch.Generator().manual_seed(9))),
    ),
    "ForAudioFrameClassification": (
        lambda model, x, y: of_tokens(model(x).logits, y),
        (data(N, 200), ids(3, N, 9)),
    ),
}
SMALL = {
    **{"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_labels": 3},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "type_vocab_size": 2},
    **{"image_size": SIZE, "patch_size": 8, "decoder_start_token_id": 0},
}
EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2, "num_key_value_heads": 1}
D_MODEL = {"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
D_MODEL |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
STAGES = {"hidden_sizes": [16, 32], "depths": [1, 1], "drop_path_rate": 0.0}
SOUND = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4), "layerdrop": 0.0}
SOUND |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
SOUND |= {"num_feat_extract_layers": 2, "apply_spec_augment": False, "classifier_proj_size": 8}
REFORMER = {"is_decoder": True, "attn_layers": ["local", "lsh"], "attention_head_size": 8}
REFORMER |= {"axial_pos_embds": False, "num_buckets": 2, "hash_seed": 0, "feed_forward_size": 24}
REFORMER |= {"local_attn_chunk_length": 3, "lsh_attn_chunk_length": 3}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_layers": 1}
MAE = {"decoder_intermediate_size": 12, "decoder_hidden_size": 8}
MAE |= {"decoder_num_attention_heads": 2, "decoder_num_hidden_layers": 1}
SWIN = {"embed_dim": 8, "depths": [2, 1], "num_attention_heads": [1, 2], "window_size": 4}
SWIN |= {"patch_size": 4}
for name, head, options in (
    ("GPT2", "LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 2}),  # Conv1D, a tied head
    ("Llama", "ForCausalLM", {"num_key_value_heads": 1}),  # grouped queries, rotated
    ("Gemma2", "ForCausalLM", {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4}),
    ("OPT", "ForCausalLM", {"ffn_dim": 24, "word_embed_proj_dim": 16}),  # rows before the padding
    ("Bloom", "ForCausalLM", {"n_layer": 2, "n_head": 2}),  # positions as a bias of attention
    ("Mamba", "ForCausalLM", {"state_size": 4, "time_step_rank": 3}),  # a selective scan
    ("Mixtral", "ForCausalLM", EXPERTS),  # experts as one tensor, tokens sorted to them
    ("GptOss", "ForCausalLM", {**EXPERTS, "head_dim": 8}),  # with biases and attention sinks
    ("Rwkv", "ForCausalLM", {"attention_hidden_size": 16}),  # a recurrence with a maximum
    ("Reformer", "ModelWithLMHead", REFORMER),  # reversible layers
    ("Bert", "ForSequenceClassification", {}),
    ("Albert", "ForSequenceClassification", {"embedding_size": 8, "num_hidden_groups": 1}),
    ("FNet", "ForSequenceClassification", {}),  # tokens are mixed by a Fourier transform
    ("DebertaV2", "ForSequenceClassification", {"relative_attention": True}),
    ("IBert", "ForMaskedLM", {}),  # buffers of ranges
    ("T5", "ForConditionalGeneration", T5),
    ("Bart", "ForConditionalGeneration", {**D_MODEL, "forced_eos_token_id": None}),
    ("ViTMAE", "ForPreTraining", MAE),  # patches are shuffled, and put back
    ("Swin", "ForImageClassification", SWIN),  # windows, some of them shifted
    ("ResNet", "ForImageClassification", {"embedding_size": 8, **STAGES}),
    ("ConvNext", "ForImageClassification", {"num_stages": 2, **STAGES}),
    ("Wav2Vec2", "ForAudioFrameClassification", SOUND),  # a convolution of normed weights
):
    MODELS[name.lower()] = functools.partial(transformer, name, head, **{**SMALL, **options})


def adapted(base, config, **options):
    """A frozen model with an adapter of `peft`; half of an adapter begins at zero."""
    model, loss_fn, batch = MODELS[base]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = importlib.import_module("peft")
        torch.manual_seed(1)
        model = peft.get_peft_model(model, getattr(peft, f"{config}Config")(**options))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.1)
    return model.train(), loss_fn, batch


TWO = {"target_modules": ["q_proj", "v_proj"]}
for name, base, config, options in (
    ("lora", "llama", "Lora", {"r": 2, "target_modules": "all-linear"}),
    ("dora", "llama", "Lora", {"r": 2, "use_dora": True, **TWO}),
    ("ia3", "llama", "IA3", {"feedforward_modules": ["v_proj"], **TWO}),
    ("lokr", "llama", "LoKr", {"r": 2, **TWO}),
    ("oft", "llama", "OFT", {"r": 2, "oft_block_size": 0, **TWO}),
    ("prompt", "llama", "PromptTuning", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}),
    ("prefix", "bert", "PrefixTuning", {"task_type": "SEQ_CLS", "num_virtual_tokens": 3}),
):
    MODELS[name] = functools.partial(adapted, base, config, **options)

# ---------------------------------------------------------------------- handmade


def scored(model, *batch):
    """(n,) losses without targets."""
    return reference.loss_fn(lambda _: model(*batch), None)


def handmade(*batch, loss=scored, **parts):
    """Register a function of a module with these parts, and its batch."""

    def register(function):
        model = Apply(function, **parts)
        MODELS[function.__name__] = lambda: (randomise(copy.deepcopy(model)), loss, batch)
        return function

    return register


@handmade(data(N, 3, 6, 6), conv=nn.Conv2d(3, 4, 3), head=nn.Linear(144, 3))
def weights_standardised_by_batch_norm(m, x):
    """As timm and BiT write it: no example takes part."""
    w = m.conv.weight
    flat = F.batch_norm(w.reshape(1, len(w), -1), None, None, training=True, momentum=0.0)
    return m.head(F.conv2d(x, flat.reshape_as(w), m.conv.bias, padding=1).tanh().flatten(1))


@handmade(
    *(data(N, 3, 8, 8), data(N, 8, seed=2)),
    **{"down": nn.Conv2d(3, 4, 3, padding=1), "norm": nn.GroupNorm(2, 4)},
    **{"low": nn.Conv2d(4, 6, 3, 2, 1), "up": nn.ConvTranspose2d(6, 4, 2, 2)},
    **{"time": nn.Linear(8, 4), "out": nn.Conv2d(8, 1, 1)},
)
def u_net_with_time(m, x, waves):
    one = F.silu(m.norm(m.down(x))) * (1 + m.time(waves)[:, :, None, None])
    return m.out(torch.cat([m.up(F.silu(m.low(one))), one], 1))


@handmade(
    *(data(N, 5, 4), ids(5, N, 2, 7)),
    **{"embed": nn.Linear(4, 8), "score": nn.Linear(16, 1), "head": nn.Linear(8, 2)},
)
def attention_over_a_graph(m, x, edges):
    h, (source, target) = m.embed(x), edges.unbind(1)
    wide = lambda index: index[..., None].expand(-1, -1, h.shape[-1])  # noqa: E731
    a, b = h.gather(1, wide(source)), h.gather(1, wide(target))
    weight = m.score(torch.cat([a, b], -1)).tanh().exp()
    total = torch.zeros_like(h[..., :1]).scatter_add(1, target[..., None], weight)
    h = torch.zeros_like(h).scatter_add(1, wide(target), weight * a) / (total + 1)
    return m.head(h).mean(1)


@handmade(data(N, 8, 6), c=parameter(6, 4), decay=parameter(6, 4), out=nn.Linear(6, 3))
def state_space_by_fourier_transform(m, x):
    t = x.shape[1]
    kernel = (m.c[..., None] * torch.exp(-m.decay.exp()[..., None] * torch.arange(t).to(x))).sum(1)
    spectrum = torch.fft.rfft(x.mT, n=2 * t) * torch.fft.rfft(kernel, n=2 * t)
    return m.out(F.gelu(torch.fft.irfft(spectrum, n=2 * t)[..., :t].mT))


def evidence(model, x, noise):
    again, mean, log_scale = model(x, noise)
    divergence = 0.5 * (mean.square() + (2 * log_scale).exp() - 2 * log_scale - 1).sum(1)
    return (again - x).square().sum(1) + divergence


@handmade(
    *(data(N, 6), data(N, 4, seed=2)),
    loss=evidence,
    **{"inner": nn.Linear(6, 8), "outer": nn.Linear(4, 6)},
)
def outputs_made_from_each_other(m, x, noise):
    """A variational autoencoder."""
    mean, log_scale = m.inner(x).chunk(2, 1)
    return m.outer(mean + log_scale.exp() * noise), mean, log_scale


@handmade(data(N, 4), net=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)))
def derivative_by_the_input(m, x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(m.net(x).sum(), x, create_graph=True)[0]


@handmade(
    data(N, 7, 6),
    **{"gate": nn.Linear(6, 3), "experts": nn.ModuleList(nn.Linear(6, 5) for _ in range(3))},
)
def experts_by_index(m, x):
    """Tokens of all examples are sorted to their expert by `nonzero`, and added back."""
    flat = x.flatten(0, 1)
    weight, chosen = m.gate(flat).softmax(-1).max(-1)
    out = flat.new_zeros(len(flat), 5)
    for k, expert in enumerate(m.experts):
        at = (chosen == k).nonzero().flatten()
        out = out.index_add(0, at, expert(flat[at]) * weight[at, None])
    return out.view(*x.shape[:2], 5)


@handmade(data(N, 6, 4), data(N, 3, seed=2), make=nn.Linear(3, 20))
def weights_made_by_another_network(m, x, z):
    return torch.einsum("noi,nti->nto", m.make(z).view(-1, 5, 4), x)
