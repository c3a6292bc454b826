# SPDX-License-Identifier: Apache-2.0
"""Every kind of layer that torch has and the shared grid (`tests/cases/layers.py`) lacks.

`CASES` holds (builder, batch, way, methods) by name. The way is the one that `auto` must take, so
that a silent fall-through to `vmap` is seen.
"""

import functools
import warnings

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.dualdp_torch.checks import METHODS, data, ids

N = 8
#: For models that torch.func.vmap itself can't run.
WITHOUT_VMAP = tuple(method for method in METHODS if method != "vmap")

with warnings.catch_warnings():  # torch warns once that its CPU library lacks projections
    warnings.simplefilter("ignore", UserWarning)
    nn.LSTM(2, 2, proj_size=1)(torch.zeros(1, 1, 2))


class Apply(nn.Module):
    """A function of modules and inputs, as a module."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            if isinstance(module, nn.Parameter):
                self.register_parameter(name, module)
            else:
                self.add_module(name, module)

    def forward(self, *inputs):
        return self.function(self, *inputs)


CASES = {}


def case(*batch, way="Captured", name=None, methods=METHODS):
    """Register a function that builds a model, and its batch."""

    def register(build):
        CASES[name or build.__name__] = (build, batch, way, methods)
        return build

    return register


def layer(name, make, *shape, **options):
    """Register a model of a linear layer, the layer, and a tanh."""
    case(data(N, *shape), name=name, **options)(lambda: nn.Sequential(make(), nn.Tanh()))


# ---------------------------------------------------------------------- convolutions

for tag, arguments, options in (
    ("plain", (3, 4, 3), {}),
    ("stride_pad", (3, 4, 3), {"stride": 2, "padding": 1}),
    ("depthwise", (4, 8, 3), {"groups": 4}),
    ("same_even", (3, 4, 4), {"padding": "same"}),
    ("circular", (3, 4, 3), {"padding": 1, "padding_mode": "circular"}),
    ("pointwise", (3, 4, 1), {"bias": False}),
    ("everything", (4, 6, 2), {"stride": 2, "padding": 2, "dilation": 2, "groups": 2}),
):
    make = functools.partial(nn.Conv3d, *arguments, **options)
    layer(f"conv3d_{tag}", make, arguments[0], 5, 5, 5)
for axes, kind in ((1, nn.ConvTranspose1d), (2, nn.ConvTranspose2d), (3, nn.ConvTranspose3d)):
    for tag, arguments, options in (
        ("stride", (3, 4, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
        ("groups", (4, 6, 3), {"groups": 2, "bias": False, "dilation": 2}),
    ):
        make = functools.partial(kind, *arguments, **options)
        layer(f"conv_transpose{axes}d_{tag}", make, arguments[0], *(5, 4, 3)[:axes])


@case(data(N, 3, 6, 5), methods=WITHOUT_VMAP)
def conv2d_channels_last():
    def forward(m, x):
        return m.second(m.first(x.to(memory_format=torch.channels_last)).relu())

    convs = {"first": nn.Conv2d(3, 4, 3), "second": nn.Conv2d(4, 2, 2)}
    return Apply(forward, **convs).to(memory_format=torch.channels_last)


@case(data(N, 3, 6, 5))
def conv2d_non_contiguous():
    return Apply(lambda m, x: m.conv(x.transpose(2, 3)).transpose(1, 2), conv=nn.Conv2d(3, 4, 3))


@case(data(N, 5, 3, 6, 6))
def conv2d_over_frames():
    def forward(m, x):
        return m.conv(x.flatten(0, 1)).view(len(x), 5, -1).mean(1)

    return Apply(forward, conv=nn.Conv2d(3, 4, 3))


@case(data(N, 5, 3, 7))
def conv1d_over_inner_frames():
    def forward(m, x):
        return m.conv(x.transpose(0, 1).flatten(0, 1)).view(5, len(x), -1).mean(0)

    return Apply(forward, conv=nn.Conv1d(3, 4, 3, groups=1))


@case(data(N, 2, 3, 5))
def two_views_of_an_example():
    def forward(m, x):
        views = m.conv(torch.cat([x[:, 0], x[:, 1]])).tanh().flatten(1)
        return views[: len(x)] * views[len(x) :]

    return Apply(forward, conv=nn.ConvTranspose1d(3, 4, 3, stride=2))


# ---------------------------------------------------------------------- norms

layer(
    "layer_norm_no_affine",
    lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6, elementwise_affine=False)),
    *(4, 6),
)
layer("layer_norm_no_bias", lambda: nn.LayerNorm(6, bias=False), 4, 6)
layer("layer_norm_two_axes", lambda: nn.LayerNorm((3, 6)), 4, 3, 6)
layer("layer_norm_eps", lambda: nn.LayerNorm(6, eps=0.3), 6)
layer("group_norm", lambda: nn.GroupNorm(2, 4, eps=0.2), 4, 5)
layer("group_norm_one_group", lambda: nn.GroupNorm(1, 4), 4, 3, 2)
layer("group_norm_no_positions", lambda: nn.GroupNorm(2, 8), 8)
layer("instance_norm1d", lambda: nn.InstanceNorm1d(3, affine=True, eps=0.1), 3, 5)
layer("instance_norm2d", lambda: nn.InstanceNorm2d(3, affine=True), 3, 5, 4)
layer("instance_norm3d", lambda: nn.InstanceNorm3d(2, affine=True), 2, 3, 4, 3)
layer("rms_norm", lambda: nn.RMSNorm(6), 4, 6)
layer("rms_norm_eps", lambda: nn.RMSNorm((3, 6), eps=0.2), 3, 6)
layer(
    "local_response_norm",
    lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.LocalResponseNorm(2)),
    *(3, 5),
)


# ---------------------------------------------------------------------- tables

for tag, options in (
    ("plain", {}),
    ("padding", {"padding_idx": 2}),
    ("negative_padding", {"padding_idx": -1}),
):
    case(ids(5, N, 7), name=f"embedding_{tag}")(functools.partial(nn.Embedding, 5, 3, **options))
for mode in ("sum", "mean", "max"):
    for tag, options in (("", {}), ("_padding", {"padding_idx": 2})):
        case(ids(5, N, 7), name=f"embedding_bag_{mode}{tag}")(
            functools.partial(nn.EmbeddingBag, 5, 3, mode=mode, **options)
        )


@case(ids(5, N, 7), data(N, 7))
def embedding_bag_weighted():
    return Apply(
        lambda m, x, w: m.bag(x, per_sample_weights=w), bag=nn.EmbeddingBag(5, 3, mode="sum")
    )


@case(ids(5, N, 7), way="by_vmap")
def embedding_bag_offsets():
    def forward(m, x):
        return m.bag(x.flatten(), torch.arange(0, x.numel(), x.shape[1]))

    return Apply(forward, bag=nn.EmbeddingBag(5, 3, mode="sum"))


# ---------------------------------------------------------------------- raw and derived parameters


@case(data(N, 5, 6))
def position_table():
    return Apply(
        lambda m, x: m.head(x + m.pos), pos=nn.Parameter(torch.zeros(5, 6)), head=nn.Linear(6, 3)
    )


@case(data(N, 5, 6))
def position_table_with_batch_axis():
    return Apply(
        lambda m, x: m.head(m.pos + x), pos=nn.Parameter(torch.zeros(1, 5, 6)), head=nn.Linear(6, 3)
    )


@case(data(N, 3, 6))
def position_slice():
    return Apply(
        lambda m, x: m.head(x + m.pos[:, : x.shape[1]]),
        pos=nn.Parameter(torch.zeros(1, 9, 6)),
        head=nn.Linear(6, 3),
    )


@case(ids(11, N, 5))
def position_embedding():
    def forward(m, x):
        return m.head(m.words(x) + m.places(torch.arange(x.shape[1])))

    return Apply(
        forward, words=nn.Embedding(11, 6), places=nn.Embedding(9, 6), head=nn.Linear(6, 3)
    )


@case(ids(11, N, N))
def position_embedding_of_n_positions():
    def forward(m, x):
        return m.head(m.words(x) + m.places(torch.arange(x.shape[1])))

    return Apply(
        forward, words=nn.Embedding(11, 6), places=nn.Embedding(9, 6), head=nn.Linear(6, 3)
    )


@case(ids(11, N, 5))
def position_embedding_of_batch_one():
    def forward(m, x):
        return m.head(m.words(x) + m.places(torch.arange(x.shape[1]).unsqueeze(0)))

    return Apply(
        forward, words=nn.Embedding(11, 6), places=nn.Embedding(9, 6), head=nn.Linear(6, 3)
    )


@case(data(N, 5, 6))
def class_token():
    def forward(m, x):
        return m.head(torch.cat([m.token.expand(len(x), -1, -1), x], 1))[:, 0]

    return Apply(forward, token=nn.Parameter(torch.zeros(1, 1, 6)), head=nn.Linear(6, 3))


@case(data(N, 5, 6))
def class_token_repeated():
    def forward(m, x):
        return m.head(torch.cat([m.token.repeat(len(x), 1, 1), x], 1))

    return Apply(forward, token=nn.Parameter(torch.zeros(1, 1, 6)), head=nn.Linear(6, 3))


@case(data(N, 5, 6))
def mask_token_where():
    def forward(m, x):
        return m.head(torch.where(x[..., :1] > 0, m.token, x))

    return Apply(forward, token=nn.Parameter(torch.zeros(6)), head=nn.Linear(6, 3))


@case(data(N, 5, 6))
def choice_of_two_parameters_and_a_number():
    def forward(m, x):
        return x * torch.where(x > 0, m.above, m.below) + torch.where(x > 1, m.below, 0.5)

    above, below = (nn.Parameter(torch.zeros(shape)) for shape in ((6,), (5, 1)))
    return Apply(forward, above=above, below=below)


@case(data(N, 6))
def weights_written_by_parameters():
    def forward(m, x):
        weight = m.weight * 1
        weight[torch.tensor([True, False, True])] = m.row
        return F.linear(x, weight)

    weight, row = (nn.Parameter(torch.zeros(shape)) for shape in ((3, 6), (6,)))
    return Apply(forward, weight=weight, row=row)


for shape in ((6,), (1, 6), ()):

    @case(data(N, 5, 6), name=f"mask_token_written{shape}", methods=WITHOUT_VMAP)
    def mask_token_written(shape=shape):
        def forward(m, x):
            hidden = m.first(x)
            hidden[x[..., 0] > 0] = m.token
            return m.head(hidden.tanh())

        token = nn.Parameter(torch.zeros(shape))
        return Apply(forward, first=nn.Linear(6, 6), token=token, head=nn.Linear(6, 3))


@case(data(N, 5, 6))
def scaled_and_shifted():
    return Apply(
        lambda m, x: (x * m.scale - m.shift) * (2 * m.gate) + m.gate,
        scale=nn.Parameter(torch.zeros(6)),
        shift=nn.Parameter(torch.zeros(5, 1)),
        gate=nn.Parameter(torch.zeros(1)),
    )


@case(data(N, 5, 6))
def in_place_position():
    def forward(m, x):
        hidden = m.first(x)
        hidden += m.pos
        return hidden

    return Apply(forward, first=nn.Linear(6, 6), pos=nn.Parameter(torch.zeros(5, 6)))


@case(data(N, 5, 6), way="by_vmap")
def in_place_into_a_view():
    def forward(m, x):
        hidden = m.first(x) * 1
        hidden[:, 0].add_(m.pos)
        return hidden

    return Apply(forward, first=nn.Linear(6, 6), pos=nn.Parameter(torch.zeros(6)))


@case(data(N, 6), way="by_vmap")
def scalar_temperature():
    return Apply(
        lambda m, x: m.head(x) * m.t.exp(), head=nn.Linear(6, 3), t=nn.Parameter(torch.zeros(()))
    )


@case(data(N, 6))
def softplus_of_a_weight():
    return Apply(lambda m, x: F.linear(x, F.softplus(m.w)), w=nn.Parameter(torch.zeros(3, 6)))


@case(data(N, 5, 6))
def product_with_a_weight():
    return Apply(lambda m, x: (x @ m.w) @ m.w.t(), w=nn.Parameter(torch.zeros(6, 3)))


@case(data(N, 5, 6))
def gpt2_convolution():
    def forward(m, x):
        return torch.addmm(m.b, x.view(-1, x.size(-1)), m.w).view(*x.shape[:-1], -1)

    return Apply(forward, w=nn.Parameter(torch.zeros(6, 3)), b=nn.Parameter(torch.zeros(3)))


@case(data(N, 6), way="by_vmap")
def einsum_with_a_weight():
    return Apply(lambda m, x: torch.einsum("ni,oi->no", x, m.w), w=nn.Parameter(torch.zeros(3, 6)))


@case(data(N, 6))
def weight_normed():
    return nn.Sequential(weight_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3))


@case(data(N, 3, 7))
def weight_normed_convolution():
    return nn.Sequential(weight_norm(nn.Conv1d(3, 4, 3), dim=None), nn.Tanh())


@case(data(N, 6))
def low_rank_update():
    def forward(m, x):
        return F.linear(x, m.base + m.up @ m.down) + m.b(m.a(x))

    return Apply(
        forward,
        base=nn.Parameter(torch.zeros(5, 6), requires_grad=False),
        up=nn.Parameter(torch.zeros(5, 2)),
        down=nn.Parameter(torch.zeros(2, 6)),
        a=nn.Linear(6, 2, bias=False),
        b=nn.Linear(2, 5, bias=False),
    )


# ---------------------------------------------------------------------- tied, shared, reused


@case(ids(11, N, 5))
def tied_head():
    def forward(m, x):
        return F.linear(m.body(m.words(x)).tanh(), m.words.weight)

    return Apply(forward, words=nn.Embedding(11, 6), body=nn.Linear(6, 6))


@case(data(N, 3, 6))
def transposed_reuse():
    return Apply(
        lambda m, x: F.linear(m.first(x).tanh(), m.first.weight.t()), first=nn.Linear(6, 4)
    )


@case(data(N, 5, 6))
def reuse_at_other_ranks():
    return Apply(lambda m, x: m.first(m.first(x).tanh().mean(1)), first=nn.Linear(6, 6))


@case(data(N, 3, 8))
def reused_convolution():
    return Apply(lambda m, x: m.conv(m.conv(x).tanh()), conv=nn.Conv1d(3, 3, 2))


@case(data(N, 6))
def only_some_examples_pass():
    def forward(m, x):
        return torch.where(x[:, :1] > 0, m.first(x), m.second(x))

    return Apply(forward, first=nn.Linear(6, 3), second=nn.Linear(6, 3))


@case(data(N, 6))
def bias_only():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    return model


# ---------------------------------------------------------------------- other layers

layer("prelu_one", lambda: nn.PReLU(), 3, 5)
layer("prelu_per_channel", lambda: nn.PReLU(3), 3, 5)
layer("flattened", lambda: nn.Sequential(nn.Flatten(), nn.Linear(30, 3)), 3, 2, 5)
layer("pixel_shuffle", lambda: nn.Sequential(nn.Conv2d(1, 4, 2), nn.PixelShuffle(2)), 1, 4, 4)
layer(
    "max_pooling",
    lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
    *(2, 6, 6),
)


@case(data(N, 4), data(N, 5, seed=3))
def bilinear():
    return Apply(lambda m, x, y: m.layer(x, y), layer=nn.Bilinear(4, 5, 3))


@case(data(N, 2, 4), data(N, 2, 5, seed=3))
def bilinear_with_positions():
    return Apply(lambda m, x, y: m.layer(x, y), layer=nn.Bilinear(4, 5, 3, bias=False))


# ---------------------------------------------------------------------- recurrent

for cell in (nn.RNN, nn.GRU, nn.LSTM):
    for tag, options in (
        ("batch_first", {"batch_first": True}),
        ("two_layers", {"batch_first": True, "num_layers": 2}),
        ("bidirectional", {"batch_first": True, "bidirectional": True, "num_layers": 2}),
        ("no_bias", {"batch_first": True, "bias": False}),
        ("dropout_in_eval", {"batch_first": True, "num_layers": 2, "dropout": 0.5}),
        ("time_first", {}),
        *([("relu", {"batch_first": True, "nonlinearity": "relu"})] if cell is nn.RNN else []),
        *(
            [("projection", {"batch_first": True, "proj_size": 2, "bidirectional": True})]
            if cell is nn.LSTM
            else []
        ),  # fmt: skip
    ):
        name = f"{cell.__name__.lower()}_{tag}"

        def build(cell=cell, options=options):
            first = options.get("batch_first", False)

            def forward(m, x):
                out, state = m.rnn(x if first else x.transpose(0, 1))
                state = torch.cat(state, 2) if isinstance(state, tuple) else state
                out = out if first else out.transpose(0, 1)
                return torch.cat([out.flatten(1), state.transpose(0, 1).flatten(1)], 1)

            return Apply(forward, rnn=cell(3, 4, **options)).eval()

        runs = cell is nn.LSTM and tag != "projection"
        case(data(N, 5, 3), name=name, methods=METHODS if runs else WITHOUT_VMAP)(build)


@case(data(N, 5, 3), data(N, 4, seed=2), data(N, 4, seed=3))
def lstm_with_a_learned_initial_state():
    def forward(m, x, h, c):
        out, _ = m.rnn(x, (m.start(h).unsqueeze(0), c.unsqueeze(0)))
        return out

    return Apply(forward, rnn=nn.LSTM(3, 4, batch_first=True), start=nn.Linear(4, 4))


@case(data(N, N, 3), methods=WITHOUT_VMAP)
def lstm_time_first_with_n_steps():
    return Apply(lambda m, x: m.rnn(x.transpose(0, 1))[0].transpose(0, 1), rnn=nn.LSTM(3, 4))


@case(ids(7, N, 5), methods=WITHOUT_VMAP)
def lstm_over_words():
    def forward(m, x):
        return m.head(m.rnn(m.words(x))[0].mean(1))

    return Apply(
        forward, words=nn.Embedding(7, 3), rnn=nn.LSTM(3, 4, batch_first=True), head=nn.Linear(4, 2)
    )


for cell in (nn.RNNCell, nn.GRUCell, nn.LSTMCell):

    def build(cell=cell):
        def forward(m, x):
            state = None
            for t in range(x.shape[1]):
                state = m.cell(x[:, t], state)
            return torch.cat(state, 1) if isinstance(state, tuple) else state

        return Apply(forward, cell=cell(3, 4))

    case(data(N, 3, 3), name=f"{cell.__name__.lower()}_in_a_loop", methods=WITHOUT_VMAP)(build)


for cell in (nn.GRU, nn.LSTM):
    for ordered in (False, True):

        def build(cell=cell, ordered=ordered):
            def forward(m, x, lengths):
                if ordered:
                    x, lengths = x, torch.full_like(lengths, x.shape[1])
                packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=ordered)
                out, state = m.rnn(packed)
                out, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
                state = state[0] if isinstance(state, tuple) else state
                return out.sum(1) + state[0]

            return Apply(forward, rnn=cell(3, 4, batch_first=True))

        case(
            data(N, 5, 3),
            torch.tensor([2, 5, 1, 4, 3, 3, 5, 2]),
            name=f"{cell.__name__.lower()}_packed{'_in_order' if ordered else ''}",
            way="Captured",
            methods=WITHOUT_VMAP,
        )(build)


# ---------------------------------------------------------------------- attention


def attend(m, x, y=None, **options):
    """Self or cross attention."""
    y = x if y is None else y
    return m.mha(x, y, y, need_weights=False, **options)[0]


for tag, options in (
    ("plain", {}),
    ("no_bias", {"bias": False}),
    ("bias_kv", {"add_bias_kv": True}),
    ("zero_attention", {"add_zero_attn": True}),
):
    case(data(N, 5, 6), name=f"attention_{tag}")(
        functools.partial(
            lambda options: Apply(
                attend, mha=nn.MultiheadAttention(6, 2, batch_first=True, **options)
            ),
            options,
        )
    )


@case(data(N, 5, 6))
def attention_time_first():
    return Apply(
        lambda m, x: attend(m, x.transpose(0, 1)).transpose(0, 1), mha=nn.MultiheadAttention(6, 2)
    )


@case(data(N, 5, 6), data(N, 3, 6, seed=2))
def attention_cross():
    return Apply(attend, mha=nn.MultiheadAttention(6, 2, batch_first=True))


@case(data(N, 5, 6), data(N, 3, 4, seed=2))
def attention_cross_other_sizes():
    return Apply(attend, mha=nn.MultiheadAttention(6, 2, kdim=4, vdim=4, batch_first=True))


@case(data(N, 5, 6), torch.arange(5) >= torch.tensor([[5], [3], [4], [2], [5], [1], [4], [3]]))
def attention_masked():
    def forward(m, x, padding):
        causal = nn.Transformer.generate_square_subsequent_mask(5) != 0
        return attend(m, x, key_padding_mask=padding, attn_mask=causal)

    return Apply(forward, mha=nn.MultiheadAttention(6, 2, batch_first=True))


@case(data(N, 5, 6))
def attention_with_weights():
    def forward(m, x):
        out, weights = m.mha(x, x, x)
        return torch.cat([out, weights], 2)

    return Apply(forward, mha=nn.MultiheadAttention(6, 2, batch_first=True))


for first in (True, False):
    for norm_first in (True, False):

        def build(first=first, norm_first=norm_first):
            block = nn.TransformerEncoderLayer(
                6, 2, 8, dropout=0.0, batch_first=first, norm_first=norm_first
            )
            if first:
                return Apply(lambda m, x: m.block(x), block=block)
            return Apply(lambda m, x: m.block(x.transpose(0, 1)).transpose(0, 1), block=block)

        tag = f"{'batch' if first else 'time'}_first{'_pre_norm' if norm_first else ''}"
        case(data(N, N, 6), name=f"encoder_{tag}")(build)


@case(data(N, 5, 6), data(N, 3, 6, seed=2))
def decoder():
    block = nn.TransformerDecoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    return Apply(lambda m, x, y: m.block(x, y), block=block)


@case(data(N, 5, 6), data(N, 3, 6, seed=2))
def whole_transformer():
    return Apply(
        lambda m, x, y: m.net(x, y),
        net=nn.Transformer(6, 2, 1, 1, 8, dropout=0.0, batch_first=True),
    )


# ---------------------------------------------------------------------- spread along a later axis


@case(data(N, 5, 6))
def positions_of_time_first():
    def forward(m, x):
        x = x.transpose(0, 1) * m.scale
        return m.head(m.places[: len(x)] + x - m.places[: len(x)] * 2).transpose(0, 1)

    scale, places = (nn.Parameter(torch.zeros(size, 1, 6)) for size in (5, 9))
    return Apply(forward, scale=scale, places=places, head=nn.Linear(6, 3))


@case(data(N, N, 6))
def positions_of_time_first_as_many_as_examples():
    def forward(m, x):
        return m.head(x.transpose(0, 1) + m.places).transpose(0, 1)

    return Apply(forward, places=nn.Parameter(torch.zeros(N, 1, 6)), head=nn.Linear(6, 3))


@case(data(N, 5, 4), methods=WITHOUT_VMAP)
def learned_states_expanded():
    def forward(m, x):
        return m.rnn(x, m.state.expand(2, len(x), 3).contiguous())[0]

    state = nn.Parameter(torch.zeros(2, 1, 3))
    return Apply(forward, rnn=nn.GRU(4, 3, bidirectional=True, batch_first=True), state=state)


@case(data(N, 5, 4), methods=WITHOUT_VMAP)
def learned_states_repeated():
    def forward(m, x):
        states = m.hidden.repeat(1, len(x), 1), m.cell.expand([-1, len(x), -1])
        return m.rnn(x, states)[0]

    hidden, cell = (nn.Parameter(torch.zeros(1, 1, 3)) for _ in range(2))
    return Apply(forward, rnn=nn.LSTM(4, 3, batch_first=True), hidden=hidden, cell=cell)


@case(data(N, 4, 6))
def tiles():
    return Apply(lambda m, x: x * m.tile.repeat(2, 1), tile=nn.Parameter(torch.zeros(2, 6)))


# ---------------------------------------------------------------------- checkpointing


def checkpointed(m, x, reentrant=False):
    """The middle of four layers is checkpointed."""
    hidden = m.first(x)
    hidden = checkpoint(lambda h: m.third(m.second(h).tanh()), hidden, use_reentrant=reentrant)
    return m.fourth(hidden.tanh())


def four_layers(forward):
    """A model of four linear layers."""
    names = ("first", "second", "third", "fourth")
    return Apply(forward, **{name: nn.Linear(6, 6) for name in names})


case(data(N, 6), name="checkpoint", methods=WITHOUT_VMAP)(lambda: four_layers(checkpointed))
