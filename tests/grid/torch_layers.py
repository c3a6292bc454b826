# SPDX-License-Identifier: Apache-2.0
"""Kinds of layers and of uses of parameters that the shared grid (`tests/cases/layers.py`) lacks.

`CASES` holds (model, batch, way, methods) by name. The way is the one that `auto` must take, so
that a silent fall-through to `vmap` is seen.
"""

import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.dualdp_torch.checks import data, ids

N = 8
CASES = {}

with warnings.catch_warnings():  # torch warns once that its CPU library lacks projections
    warnings.simplefilter("ignore", UserWarning)
    nn.LSTM(2, 2, proj_size=1)(torch.zeros(1, 1, 2))


class Apply(nn.Module):
    """A function of modules, parameters and inputs, as a module."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def case(*batch, way="Captured", name=None, **parts):
    """Register a function of a module with these parts, and its batch."""

    def register(function):
        CASES[name or function.__name__] = Apply(function, **parts), batch, way
        return function

    return register


def layer(name, module, *shape):
    """Register one layer, followed by a tanh."""
    CASES[name] = nn.Sequential(module, nn.Tanh()), (data(N, *shape),), "Captured"


def parameter(*shape):
    """A parameter, whose numbers are drawn later."""
    return nn.Parameter(torch.zeros(shape))


# ---------------------------------------------------------------------- convolutions

layer("conv3d", nn.Conv3d(3, 4, 3), 3, 5, 4, 5)
layer("conv3d_depthwise", nn.Conv3d(4, 8, 3, groups=4), 4, 4, 5, 4)
layer("conv3d_all", nn.Conv3d(4, 6, 2, stride=2, padding=2, dilation=2, groups=2), 4, 5, 4, 5)
layer("conv_transpose1d", nn.ConvTranspose1d(3, 4, 3, 2, 1, output_padding=1), 3, 5)
layer("conv_transpose2d", nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2), 4, 5, 4)
layer("conv_transpose3d", nn.ConvTranspose3d(4, 6, 3, groups=2, bias=False, dilation=2), 4, 4, 3, 3)
layer(
    "max_pooling",
    nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
    *(2, 6, 6),
)


@case(data(N, 3, 6, 5), conv=nn.Conv2d(3, 4, 3), second=nn.Conv2d(4, 2, 2))
def conv2d_channels_last(m, x):
    return m.second(m.conv(x.to(memory_format=torch.channels_last)).relu())


@case(data(N, 3, 6, 5), conv=nn.Conv2d(3, 4, 3))
def conv2d_non_contiguous(m, x):
    return m.conv(x.transpose(2, 3)).transpose(1, 2)


@case(data(N, 5, 3, 6, 6), conv=nn.Conv2d(3, 4, 3))
def conv2d_over_frames(m, x):
    return m.conv(x.flatten(0, 1)).view(len(x), 5, -1).mean(1)


@case(data(N, 5, 3, 7), conv=nn.Conv1d(3, 4, 3))
def conv1d_over_inner_frames(m, x):
    return m.conv(x.transpose(0, 1).flatten(0, 1)).view(5, len(x), -1).mean(0)


@case(data(N, 2, 3, 5), conv=nn.ConvTranspose1d(3, 4, 3, stride=2))
def conv_of_two_views(m, x):
    views = m.conv(torch.cat([x[:, 0], x[:, 1]])).tanh().flatten(1)
    return views[: len(x)] * views[len(x) :]


@case(data(N, 3, 8), conv=nn.Conv1d(3, 3, 2))
def conv1d_used_twice(m, x):
    return m.conv(m.conv(x).tanh())


# ---------------------------------------------------------------------- norms and tables

layer("layer_norm_eps", nn.LayerNorm(6, eps=0.3), 6)
layer("group_norm_eps", nn.GroupNorm(2, 4, eps=0.2), 4, 5)
layer("group_norm_no_positions", nn.GroupNorm(2, 8), 8)
layer("instance_norm1d", nn.InstanceNorm1d(3, affine=True, eps=0.1), 3, 5)
layer("instance_norm3d", nn.InstanceNorm3d(2, affine=True), 2, 3, 4, 3)
layer("rms_norm", nn.RMSNorm(6), 4, 6)
layer("rms_norm_eps", nn.RMSNorm((3, 6), eps=0.2), 3, 6)
layer("prelu_one", nn.PReLU(), 3, 5)
layer("prelu_per_channel", nn.PReLU(3), 3, 5)
for table in (
    nn.Embedding(5, 3, padding_idx=-1),
    nn.EmbeddingBag(5, 3, mode="sum"),
    nn.EmbeddingBag(5, 3, mode="mean", padding_idx=2),
    nn.EmbeddingBag(5, 3, mode="max", padding_idx=2),
):
    case(ids(5, N, 7), name=str(table), table=table)(lambda m, x: m.table(x))


@case(ids(5, N, 7), data(N, 7), bag=nn.EmbeddingBag(5, 3, mode="sum"))
def embedding_bag_weighted(m, x, w):
    return m.bag(x, per_sample_weights=w)


@case(ids(5, N, 7), way="by_vmap", bag=nn.EmbeddingBag(5, 3, mode="sum"))
def embedding_bag_offsets(m, x):
    return m.bag(x.flatten(), torch.arange(0, x.numel(), x.shape[1]))


# ---------------------------------------------------------------------- raw and derived parameters


@case(data(N, 3, 6), pos=parameter(1, 9, 6), head=nn.Linear(6, 3))
def position_slice(m, x):
    return m.head(x + m.pos[:, : x.shape[1]])


@case(ids(11, N, N), words=nn.Embedding(11, 6), places=nn.Embedding(9, 6))
def position_embedding_of_n_positions(m, x):
    return m.words(x) + m.places(torch.arange(x.shape[1]))


@case(ids(11, N, 5), words=nn.Embedding(11, 6), places=nn.Embedding(9, 6))
def position_embedding_of_batch_one(m, x):
    return m.words(x) + m.places(torch.arange(x.shape[1]).unsqueeze(0))


@case(data(N, 5, 6), token=parameter(1, 1, 6), head=nn.Linear(6, 3))
def class_token_repeated(m, x):
    return m.head(torch.cat([m.token.repeat(len(x), 1, 1), x], 1))


@case(data(N, 5, 6), token=parameter(6), head=nn.Linear(6, 3))
def mask_token_where(m, x):
    return m.head(torch.where(x[..., :1] > 0, m.token, x))


@case(data(N, 5, 6), above=parameter(6), below=parameter(5, 1))
def choice_of_two_parameters_and_a_number(m, x):
    return x * torch.where(x > 0, m.above, m.below) + torch.where(x > 1, m.below, 0.5)


@case(data(N, 6), weight=parameter(3, 6), row=parameter(6))
def weights_written_by_parameters(m, x):
    weight = m.weight * 1
    weight[torch.tensor([True, False, True])] = m.row
    return F.linear(x, weight)


def mask_token_written(m, x):
    hidden = m.first(x)
    hidden[x[..., 0] > 0] = m.token
    return m.head(hidden.tanh())


for shape in ((6,), ()):
    parts = {"first": nn.Linear(6, 6), "token": parameter(*shape), "head": nn.Linear(6, 3)}
    case(data(N, 5, 6), name=f"mask_token_written{shape}", **parts)(mask_token_written)


@case(data(N, 5, 6), scale=parameter(6), shift=parameter(5, 1), gate=parameter(1))
def scaled_and_shifted(m, x):
    return (x * m.scale - m.shift) * (2 * m.gate) + m.gate


@case(data(N, 5, 6), first=nn.Linear(6, 6), pos=parameter(5, 6))
def in_place_position(m, x):
    hidden = m.first(x)
    hidden += m.pos
    return hidden


@case(data(N, 5, 6), way="by_vmap", first=nn.Linear(6, 6), pos=parameter(6))
def in_place_into_a_view(m, x):
    hidden = m.first(x) * 1
    hidden[:, 0].add_(m.pos)
    return hidden


@case(data(N, 6), way="by_vmap", head=nn.Linear(6, 3), t=parameter())
def scalar_temperature(m, x):
    return m.head(x) * m.t.exp()


@case(data(N, 6), w=parameter(3, 6))
def softplus_of_a_weight(m, x):
    return F.linear(x, F.softplus(m.w))


@case(data(N, 5, 6), w=parameter(6, 3))
def product_with_a_weight(m, x):
    return (x @ m.w) @ m.w.t()


@case(data(N, 5, 6), w=parameter(6, 3), b=parameter(3))
def gpt2_convolution(m, x):
    return torch.addmm(m.b, x.view(-1, x.size(-1)), m.w).view(*x.shape[:-1], -1)


@case(data(N, 6), way="by_vmap", w=parameter(3, 6))
def einsum_with_a_weight(m, x):
    return torch.einsum("ni,oi->no", x, m.w)


@case(
    data(N, 6),
    **{
        "base": parameter(5, 6).requires_grad_(False),
        "up": parameter(5, 2),
        "down": parameter(2, 6),
    },
    **{"a": nn.Linear(6, 2), "b": nn.Linear(2, 5)},
)
def low_rank_update(m, x):
    return F.linear(x, m.base + m.up @ m.down) + m.b(m.a(x))


@case(data(N, 3, 6), first=nn.Linear(6, 4))
def transposed_reuse(m, x):
    return F.linear(m.first(x).tanh(), m.first.weight.t())


@case(data(N, 6), first=nn.Linear(6, 3), second=nn.Linear(6, 3))
def only_some_examples_pass(m, x):
    return torch.where(x[:, :1] > 0, m.first(x), m.second(x))


@case(data(N, 6), first=nn.Linear(6, 5), second=nn.Linear(5, 3))
def bias_only(m, x):
    return m.second(m.first(x).tanh())


for name in ("first", "second"):
    getattr(CASES["bias_only"][0], name).weight.requires_grad_(False)
layer("weight_normed", weight_norm(nn.Linear(6, 5)), 6)
layer("weight_normed_convolution", weight_norm(nn.Conv1d(3, 4, 3), dim=None), 3, 7)
for name, middle in (("bilinear", ()), ("bilinear_with_positions", (2,))):
    case(data(N, *middle, 4), data(N, *middle, 5, seed=3), name=name, layer=nn.Bilinear(4, 5, 3))(
        lambda m, x, y: m.layer(x, y)
    )


# ---------------------------------------------------------------------- recurrent


def whole_run(m, x):
    """Outputs and last states."""
    out, state = m.rnn(x)
    state = torch.cat(state, 2) if isinstance(state, tuple) else state
    return torch.cat([out.flatten(1), state.transpose(0, 1).flatten(1)], 1)


for kind, tag, options in (
    (nn.RNN, "two_layers", {"num_layers": 2}),
    (nn.RNN, "relu", {"nonlinearity": "relu"}),
    (nn.GRU, "both_ways", {"bidirectional": True, "num_layers": 2}),
    (nn.GRU, "no_bias", {"bias": False}),
    (nn.LSTM, "both_ways", {"bidirectional": True, "num_layers": 2}),
    (nn.LSTM, "no_bias", {"bias": False}),
    (nn.LSTM, "projection", {"bidirectional": True, "proj_size": 2}),
    (nn.LSTM, "dropout_in_eval", {"num_layers": 2, "dropout": 0.5}),
):
    rnn = kind(3, 4, batch_first=True, **options).eval()
    case(data(N, 5, 3), name=f"{kind.__name__.lower()}_{tag}", rnn=rnn)(whole_run)


@case(data(N, 5, 3), rnn=nn.GRU(3, 4))
def gru_time_first(m, x):
    return m.rnn(x.transpose(0, 1))[0].transpose(0, 1)


@case(data(N, N, 3), rnn=nn.LSTM(3, 4))
def lstm_time_first_with_n_steps(m, x):
    return m.rnn(x.transpose(0, 1))[0].transpose(0, 1)


@case(
    *(data(N, 5, 3), data(N, 4, seed=2), data(N, 4, seed=3)),
    **{"rnn": nn.LSTM(3, 4, batch_first=True), "start": nn.Linear(4, 4)},
)
def lstm_with_a_learned_initial_state(m, x, h, c):
    return m.rnn(x, (m.start(h).unsqueeze(0), c.unsqueeze(0)))[0]


def in_a_loop(m, x):
    state = None
    for t in range(x.shape[1]):
        state = m.cell(x[:, t], state)
    return torch.cat(state, 1) if isinstance(state, tuple) else state


for cell in (nn.RNNCell(3, 4), nn.GRUCell(3, 4), nn.LSTMCell(3, 4)):
    case(data(N, 3, 3), name=f"{cell} in a loop", cell=cell)(in_a_loop)


def packed(m, x, lengths):
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    out, state = m.rnn(packed)
    out, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
    return out.sum(1) + (state[0] if isinstance(state, tuple) else state)[0]


for rnn, lengths in ((nn.GRU, [2, 5, 1, 4, 3, 3, 5, 2]), (nn.LSTM, [5] * N)):
    parts = {"name": f"{rnn.__name__.lower()}_packed", "rnn": rnn(3, 4, batch_first=True)}
    case(data(N, 5, 3), torch.tensor(lengths), **parts)(packed)


# ---------------------------------------------------------------------- attention


def attend(m, x, y=None, **options):
    """Self or cross attention."""
    y = x if y is None else y
    return m.mha(x, y, y, need_weights=False, **options)[0]


for tag, options in (
    ("no_bias", {"bias": False}),
    ("bias_kv", {"add_bias_kv": True, "add_zero_attn": True}),
):
    attention = nn.MultiheadAttention(6, 2, batch_first=True, **options)
    case(data(N, 5, 6), name=f"attention_{tag}", mha=attention)(attend)
case(
    *(data(N, 5, 6), data(N, 3, 4, seed=2)),
    name="attention_across_other_sizes",
    mha=nn.MultiheadAttention(6, 2, kdim=4, vdim=4, batch_first=True),
)(attend)


@case(data(N, 5, 6), mha=nn.MultiheadAttention(6, 2))
def attention_time_first(m, x):
    out, weights = m.mha(*[x.transpose(0, 1)] * 3)
    return torch.cat([out.transpose(0, 1), weights], 2)


@case(
    *(data(N, 5, 6), torch.arange(5) >= torch.tensor([[5], [3], [4], [2], [5], [1], [4], [3]])),
    mha=nn.MultiheadAttention(6, 2, batch_first=True),
)
def attention_masked(m, x, padding):
    causal = nn.Transformer.generate_square_subsequent_mask(5) != 0
    return attend(m, x, key_padding_mask=padding, attn_mask=causal)


layer("encoder", nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 5, 6)


@case(data(N, N, 6), block=nn.TransformerEncoderLayer(6, 2, 8, 0.0, norm_first=True))
def encoder_time_first_of_n_steps(m, x):
    return m.block(x.transpose(0, 1)).transpose(0, 1)


@case(
    *(data(N, 5, 6), data(N, 3, 6, seed=2)),
    block=nn.TransformerDecoderLayer(6, 2, 8, 0.0, batch_first=True),
)
def decoder(m, x, y):
    return m.block(x, y)


# ---------------------------------------------------------------------- spread along a later axis


@case(data(N, 5, 6), scale=parameter(5, 1, 6), places=parameter(9, 1, 6))
def positions_of_time_first(m, x):
    x = x.transpose(0, 1) * m.scale
    return (m.places[: len(x)] + x - m.places[: len(x)] * 2).transpose(0, 1)


@case(data(N, N, 6), places=parameter(N, 1, 6), head=nn.Linear(6, 3))
def positions_of_time_first_as_many_as_examples(m, x):
    return m.head(x.transpose(0, 1) + m.places).transpose(0, 1)


@case(
    data(N, 5, 4), rnn=nn.GRU(4, 3, bidirectional=True, batch_first=True), state=parameter(2, 1, 3)
)
def learned_states_expanded(m, x):
    return m.rnn(x, m.state.expand(2, len(x), 3).contiguous())[0]


@case(
    data(N, 5, 4),
    **{"rnn": nn.LSTM(4, 3, batch_first=True), "h": parameter(1, 1, 3), "c": parameter(1, 1, 3)},
)
def learned_states_repeated(m, x):
    return m.rnn(x, (m.h.repeat(1, len(x), 1), m.c.expand([-1, len(x), -1])))[0]


@case(data(N, 4, 6), tile=parameter(2, 6))
def tiles(m, x):
    return x * m.tile.repeat(2, 1)


@case(data(N, 6), **{name: nn.Linear(6, 6) for name in ("first", "second", "third", "fourth")})
def checkpointed(m, x):
    inner = lambda h: m.third(m.second(h).tanh())  # noqa: E731
    return m.fourth(checkpoint(inner, m.first(x), use_reentrant=False).tanh())
