# SPDX-License-Identifier: Apache-2.0
"""Models that people write themselves: convolutional families, graphs, recurrence, adapters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import dualdp_torch as dpt
from tests.zoo.entry import N, Problem
from tests.zoo.torch_language import tokens
from tests.zoo.torch_vision import floats, labels

Tensor = torch.Tensor


def squared(model: Any, *inputs: Any) -> Tensor:
    """(n,) sum over each example's outputs of y^2 / 2 + y cos(index): no targets, asymmetric."""
    y = model(*inputs).flatten(1)
    index = torch.arange(y.shape[1], dtype=y.dtype)
    return (y.square() / 2 + y * index.cos()).mean(1)


def classified(model: Any, x: Any, y: Tensor) -> Tensor:
    """(n,) of a classifier."""
    return F.cross_entropy(model(x), y, reduction="none")


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """The model with the same weights at every call, after `fix`."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dpt.fix(build())


class Apply(nn.Module):
    """A module written as a function of itself: `Apply(forward, name=module, ...)`."""

    def __init__(self, function: Callable[..., Any], **modules: Any) -> None:
        super().__init__()
        self._function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *inputs: Any) -> Any:
        return self._function(self, *inputs)

    def __deepcopy__(self, memo: Any) -> Apply:
        modules = {**self._modules, **self._parameters, **self._buffers}
        other = Apply(self._function)
        memo[id(self)] = other
        for name, part in modules.items():
            setattr(other, name, copy.deepcopy(part, memo))
        return other.train(self.training)


# ---------------------------------------------------------------------- images


def _unit(c_in: int, c_out: int, kernel: int = 3, act: type = nn.ReLU, **o: Any) -> nn.Module:
    conv = nn.Conv2d(c_in, c_out, kernel, padding=kernel // 2, bias=False, **o)
    return nn.Sequential(conv, nn.BatchNorm2d(c_out), act())


def _head(channels: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3))


def _images(build: Callable[[], list[nn.Module]]) -> Callable[[], Problem]:
    """A classifier of images that ends after the layers of `build` and a head."""

    def problem() -> Problem:
        model = seeded(lambda: nn.Sequential(*build()))
        return Problem(model, classified, (floats(N, 3, 16, 16, seed=1), labels()))

    return problem


def vgg() -> list[nn.Module]:
    return [_unit(3, 8), _unit(8, 8), nn.MaxPool2d(2), _unit(8, 16), _head(16)]


def residual() -> list[nn.Module]:
    block = Apply(
        lambda m, x: F.relu(m.two(m.one(x)) + m.short(x)),
        one=_unit(8, 12, stride=2),
        two=_unit(12, 12, act=nn.Identity),
        short=nn.Conv2d(8, 12, 1, stride=2),
    )
    return [_unit(3, 8), block, _head(12)]


def dense_connections() -> list[nn.Module]:
    layers = [
        Apply(lambda m, x: torch.cat([x, m.f(x)], 1), f=_unit(8 + 4 * k, 4)) for k in range(3)
    ]
    return [_unit(3, 8), *layers, nn.AvgPool2d(2), _head(20)]


def _shuffled(m: Any, x: Tensor) -> Tensor:
    left, right = x.chunk(2, 1)
    out = torch.cat([left, m.f(right)], 1)
    n, c, h, w = out.shape
    return out.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def channel_shuffle() -> list[nn.Module]:
    branch = nn.Sequential(_unit(4, 4, 1), _unit(4, 4, act=nn.Identity, groups=4), _unit(4, 4, 1))
    return [_unit(3, 8), Apply(_shuffled, f=branch), _head(8)]


def inverted_residual() -> list[nn.Module]:
    gate = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 4, 1), nn.ReLU(inplace=True),
        nn.Conv2d(4, 16, 1), nn.Hardsigmoid(inplace=True),
    )  # fmt: skip
    block = Apply(
        _gated,
        first=_unit(8, 16, 1, nn.Hardswish),
        deep=_unit(16, 16, 5, nn.Hardswish, groups=16),
        gate=gate,
        last=_unit(16, 8, 1, nn.Identity),
    )
    return [_unit(3, 8, act=nn.SiLU, stride=2), block, _head(8)]


def _gated(m: Any, x: Tensor) -> Tensor:
    hidden = m.deep(m.first(x))
    return x + m.last(hidden * m.gate(hidden))


def inception() -> list[nn.Module]:
    pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), _unit(8, 4, 1))
    branches = nn.ModuleList([_unit(8, 4, 1), _unit(8, 4, 3), _unit(8, 4, 5), pool])
    mixed = Apply(lambda m, x: torch.cat([f(x) for f in m.branches], 1), branches=branches)
    return [_unit(3, 8), mixed, _head(16)]


def weight_standardised() -> list[nn.Module]:
    """The convolution of NF-Nets and BiT, by arithmetic."""

    def standardised(m: Any, x: Tensor) -> Tensor:
        w = m.conv.weight
        mean, var = w.mean((1, 2, 3), keepdim=True), w.var((1, 2, 3), keepdim=True)
        return F.conv2d(x, (w - mean) * torch.rsqrt(var + 1e-5) * m.gain, m.conv.bias, padding=1)

    gain = nn.Parameter(torch.linspace(0.5, 1, 8).view(8, 1, 1, 1))
    layer = Apply(standardised, conv=nn.Conv2d(3, 8, 3), gain=gain)
    return [layer, nn.GroupNorm(2, 8), nn.ELU(), _head(8)]


def weight_standardised_by_batch_norm() -> list[nn.Module]:
    """The same as timm and BiT write it: batch norm of the weights, no example takes part."""

    def standardised(m: Any, x: Tensor) -> Tensor:
        w = m.conv.weight
        flat = F.batch_norm(w.reshape(1, len(w), -1), None, None, training=True, momentum=0.0)
        return F.conv2d(x, flat.reshape_as(w), m.conv.bias, padding=1)

    return [Apply(standardised, conv=nn.Conv2d(3, 8, 3)), nn.GELU(), _head(8)]


def instance_norm() -> list[nn.Module]:
    norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
    return [_unit(3, 8), nn.Conv2d(8, 8, 3), norm, nn.LeakyReLU(0.1), _head(8)]


def u_net() -> Problem:
    def run(m: Any, x: Tensor) -> Tensor:
        one = m.down1(x)
        two = m.down2(F.max_pool2d(one, 2))
        low = m.middle(F.max_pool2d(two, 2))
        up = m.up2(torch.cat([F.interpolate(low, scale_factor=2), two], 1))
        return m.out(m.up1(torch.cat([m.bigger(up), one], 1)))

    def build() -> nn.Module:
        return Apply(
            run,
            down1=_unit(3, 8), down2=_unit(8, 12), middle=_unit(12, 16), up2=_unit(28, 12),
            bigger=nn.ConvTranspose2d(12, 8, 2, stride=2), up1=_unit(16, 8), out=nn.Conv2d(8, 2, 1),
        )  # fmt: skip

    def pixels(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none").mean((1, 2))

    target = torch.arange(N * 256).view(N, 16, 16) % 2
    return Problem(seeded(build), pixels, (floats(N, 3, 16, 16, seed=2), target))


def diffusion_u_net() -> Problem:
    """Noise and time come with the batch; the time's embedding scales the channels."""

    def run(m: Any, x: Tensor, t: Tensor) -> Tensor:
        waves = (t[:, None] * torch.arange(1, 5)).to(x)
        scale = m.time(torch.cat([waves.sin(), waves.cos()], 1))[:, :, None, None]
        return m.out(F.silu(m.norm(m.inner(x))) * (1 + scale))

    def build() -> nn.Module:
        return Apply(
            run, inner=nn.Conv2d(3, 8, 3, padding=1), norm=nn.GroupNorm(2, 8),
            time=nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)),
            out=nn.Conv2d(8, 3, 3, padding=1),
        )  # fmt: skip

    def error(model: Any, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        keep = (-t.to(x))[:, None, None, None].exp()
        mixed = keep.sqrt() * x + (1 - keep).sqrt() * noise
        return (model(mixed, t) - noise).square().flatten(1).mean(1)

    shape = (N, 3, 8, 8)
    return Problem(
        seeded(build), error, (floats(*shape), floats(*shape, seed=3), torch.rand(N) + 0.1)
    )


# ---------------------------------------------------------------------- graphs and sets


def graph() -> Problem:
    """Messages along edges, added up by `index_add` over the nodes of all graphs."""

    def run(m: Any, x: Tensor, edges: Tensor) -> Tensor:
        n, v, _ = x.shape
        offset = torch.arange(n)[:, None] * v
        source, target = ((edges[:, k] + offset).flatten() for k in (0, 1))
        h = torch.tanh(m.embed(x.flatten(0, 1)))
        for layer in m.layers:
            messages = layer(h[source])
            h = torch.tanh(h + torch.zeros_like(h).index_add(0, target, messages))
        return m.head(h.view(n, v, -1).mean(1))

    def build() -> nn.Module:
        layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        return Apply(run, embed=nn.Linear(4, 8), layers=layers, head=nn.Linear(8, 2))

    return Problem(seeded(build), squared, (floats(N, 5, 4), tokens(N, 2, 7, high=10) - 5))


def dense_graph() -> Problem:
    """A graph convolution by a normalised adjacency matrix."""

    def run(m: Any, x: Tensor, edges: Tensor) -> Tensor:
        adjacency = torch.softmax(edges, -1)
        hidden = torch.relu(adjacency @ m.one(x))
        return m.two(adjacency @ hidden).sum(1)

    def build() -> nn.Module:
        return Apply(run, one=nn.Linear(4, 8), two=nn.Linear(8, 2))

    return Problem(seeded(build), squared, (floats(N, 5, 4), floats(N, 5, 5, seed=2)))


def attention_graph() -> Problem:
    """Attention over the neighbours, scattered back by `scatter_add` inside each graph."""

    def run(m: Any, x: Tensor, edges: Tensor) -> Tensor:
        h = m.embed(x)
        source, target = edges.unbind(1)
        wide = lambda index: index[..., None].expand(-1, -1, h.shape[-1])  # noqa: E731
        a, b = h.gather(1, wide(source)), h.gather(1, wide(target))
        weight = F.leaky_relu(m.score(torch.cat([a, b], -1))).exp()
        total = torch.zeros_like(h[..., :1]).scatter_add(1, target[..., None], weight)
        h = torch.zeros_like(h).scatter_add(1, wide(target), weight * a) / (total + 1)
        return m.head(h).mean(1)

    def build() -> nn.Module:
        return Apply(run, embed=nn.Linear(4, 8), score=nn.Linear(16, 1), head=nn.Linear(8, 2))

    return Problem(seeded(build), squared, (floats(N, 5, 4), tokens(N, 2, 7, high=10) - 5))


def deep_sets() -> Problem:
    def build() -> nn.Module:
        inner = nn.Sequential(nn.Linear(4, 8), nn.ELU(), nn.Linear(8, 8))
        return Apply(lambda m, x: m.outer(m.inner(x).amax(1)), inner=inner, outer=nn.Linear(8, 2))

    return Problem(seeded(build), squared, (floats(N, 6, 4),))


def point_net() -> Problem:
    """Its own 3 x 3 transform turns each cloud of points."""

    def run(m: Any, x: Tensor) -> Tensor:
        turn = m.transform(x.mean(2)).view(-1, 3, 3) + torch.eye(3).to(x)
        return m.head(m.body(torch.bmm(turn, x)).amax(2))

    def build() -> nn.Module:
        body = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 1))
        return Apply(run, transform=nn.Linear(3, 9), body=body, head=nn.Linear(8, 2))

    return Problem(seeded(build), squared, (floats(N, 3, 12),))


# ---------------------------------------------------------------------- sequences


def _recurrent(kind: str, **options: Any) -> Callable[[], Problem]:
    def build() -> nn.Module:
        rnn = getattr(nn, kind)(6, 8, batch_first=True, **options)
        width = 8 * (1 + options.get("bidirectional", False))
        run = lambda m, x: m.out(m.rnn(m.table(x))[0])  # noqa: E731
        return Apply(run, table=nn.Embedding(67, 6), rnn=rnn, out=nn.Linear(width, 5))

    return lambda: Problem(seeded(build), squared, (tokens(N, 7),))


def lstm_cells() -> Problem:
    def run(m: Any, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 8)
        for step in x.unbind(1):
            h, c = m.cell(step, (h, c))
        return m.out(h)

    def build() -> nn.Module:
        return Apply(run, cell=nn.LSTMCell(4, 8), out=nn.Linear(8, 2))

    return Problem(seeded(build), squared, (floats(N, 5, 4),))


def transformer_encoder() -> Problem:
    def run(m: Any, ids: Tensor) -> Tensor:
        hidden = m.encoder(m.table(ids) + m.places, src_key_padding_mask=ids > 60)
        return m.out(hidden[:, 0])

    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        places = nn.Parameter(torch.randn(9, 16) * 0.1)
        parts = {"table": nn.Embedding(67, 16), "encoder": encoder, "out": nn.Linear(16, 3)}
        return Apply(run, places=places, **parts)

    return Problem(seeded(build), classified, (tokens(N, 9, high=62), labels()))


def transformer_whole() -> Problem:
    """`nn.Transformer` with time first, as its default is."""

    def run(m: Any, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1]).to(m.table.weight)
        a, b = (m.table(ids).transpose(0, 1) for ids in (source, target))
        return m.out(m.net(a, b, tgt_mask=mask)).transpose(0, 1)

    def build() -> nn.Module:
        net = nn.Transformer(16, 4, 1, 1, 24, dropout=0.0)
        return Apply(run, table=nn.Embedding(67, 16), net=net, out=nn.Linear(16, 5))

    return Problem(seeded(build), squared, (tokens(N, 7), tokens(N, 5, seed=2)))


def linear_attention() -> Problem:
    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.project(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("ntd,nte->ntde", k, v).cumsum(1)
        size = torch.einsum("ntd,ntd->nt", q, k.cumsum(1))
        return m.out(torch.einsum("ntd,ntde->nte", q, state) / size[..., None])

    def build() -> nn.Module:
        return Apply(run, project=nn.Linear(6, 24), out=nn.Linear(8, 3))

    return Problem(seeded(build), squared, (floats(N, 5, 6),))


def state_space() -> Problem:
    """A diagonal state space model, as a convolution by FFT with a kernel made of parameters."""

    def run(m: Any, x: Tensor) -> Tensor:
        t = x.shape[1]
        steps = torch.arange(t).to(x)
        kernel = (m.c[..., None] * torch.exp(-m.decay.exp()[..., None] * steps)).sum(1)
        spectrum = torch.fft.rfft(x.transpose(1, 2), n=2 * t) * torch.fft.rfft(kernel, n=2 * t)
        y = torch.fft.irfft(spectrum, n=2 * t)[..., :t].transpose(1, 2)
        return m.out(F.gelu(y + m.skip * x))

    def build() -> nn.Module:
        return Apply(
            run, c=nn.Parameter(torch.randn(6, 4)), decay=nn.Parameter(torch.randn(6, 4)),
            skip=nn.Parameter(torch.randn(6)), out=nn.Linear(6, 3),
        )  # fmt: skip

    return Problem(seeded(build), squared, (floats(N, 8, 6),))


def causal_convolutions() -> Problem:
    def build() -> nn.Module:
        convs = [
            parametrizations.weight_norm(nn.Conv1d(4 if k == 0 else 8, 8, 2, dilation=2**k))
            for k in range(3)
        ]
        pads = [nn.ConstantPad1d((2**k, 0), 0.0) for k in range(3)]
        layers = [part for pair in zip(pads, convs, strict=True) for part in (*pair, nn.ReLU())]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3))

    return Problem(seeded(build), classified, (floats(N, 4, 16), labels()))


# ---------------------------------------------------------------------- tables and pairs


def tabular() -> Problem:
    """Bags of ids and numbers, with all products of two (DLRM)."""

    def run(m: Any, ids: Tensor, x: Tensor) -> Tensor:
        parts = torch.stack([*(bag(ids[:, k]) for k, bag in enumerate(m.bags)), m.bottom(x)], 1)
        pairs = torch.bmm(parts, parts.transpose(1, 2)).flatten(1)
        return m.top(torch.cat([pairs, x], 1))

    def build() -> nn.Module:
        bags = nn.ModuleList(nn.EmbeddingBag(67, 6, mode="mean") for _ in range(2))
        return Apply(run, bags=bags, bottom=nn.Linear(4, 6), top=nn.Linear(13, 2))

    return Problem(seeded(build), squared, (tokens(N, 2, 3), floats(N, 4)))


def factorisation() -> Problem:
    def run(m: Any, pairs: Tensor) -> Tensor:
        user, item = pairs.unbind(1)
        return (m.users(user) * m.items(item)).sum(1, keepdim=True) + m.bias(item)

    def build() -> nn.Module:
        return Apply(
            run, users=nn.Embedding(67, 4), items=nn.Embedding(67, 4), bias=nn.Embedding(67, 1)
        )

    return Problem(seeded(build), squared, (tokens(N, 2),))


def autoencoder() -> Problem:
    """Variational, with the noise of each example in the batch."""

    def run(m: Any, x: Tensor, noise: Tensor) -> Any:
        mean, log_scale = m.inner(x).chunk(2, 1)
        return m.outer(mean + log_scale.exp() * noise), mean, log_scale

    def build() -> nn.Module:
        return Apply(run, inner=nn.Linear(6, 8), outer=nn.Linear(4, 6))

    def bound(m: Any, x: Tensor, noise: Tensor) -> Tensor:
        again, mean, log_scale = m(x, noise)
        divergence = 0.5 * (mean.square() + (2 * log_scale).exp() - 2 * log_scale - 1).sum(1)
        return (again - x).square().sum(1) + divergence

    return Problem(seeded(build), bound, (floats(N, 6), floats(N, 4, seed=2)))


def siamese() -> Problem:
    """Anchor, positive and negative of one example through one network."""

    def run(m: Any, x: Tensor) -> Tensor:
        return F.normalize(m.net(x.flatten(0, 1)), dim=1).view(len(x), 3, -1)

    def triplet(m: Any, x: Tensor) -> Tensor:
        anchor, near, far = m(x).unbind(1)
        return F.softplus((anchor - near).square().sum(1) - (anchor - far).square().sum(1))

    def build() -> nn.Module:
        return Apply(run, net=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))

    return Problem(seeded(build), triplet, (floats(N, 3, 6),))


def radiance_field() -> Problem:
    """Waves of the coordinates, points along each ray, alpha compositing."""

    def run(m: Any, rays: Tensor) -> Tensor:
        depth = torch.linspace(0.1, 1, 5).to(rays)
        points = rays[:, None, :3] + depth[:, None] * rays[:, None, 3:]
        waves = torch.cat([(points * 2.0**k).sin() for k in range(3)], -1)
        out = m.net(waves)
        alpha = 1 - torch.exp(-F.softplus(out[..., 3]))
        left = torch.cumprod(1 - alpha + 1e-6, 1) / (1 - alpha + 1e-6)
        return (out[..., :3].sigmoid() * (alpha * left)[..., None]).sum(1)

    def build() -> nn.Module:
        return Apply(run, net=nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 4)))

    return Problem(seeded(build), squared, (floats(N, 6),))


def normalising_flow() -> Problem:
    def run(m: Any, x: Tensor) -> Any:
        total = x.new_zeros(len(x))
        for layer in m.layers:
            kept, moved = x.chunk(2, 1)
            shift, scale = layer(kept).chunk(2, 1)
            x = torch.cat([moved * torch.tanh(scale).exp() + shift, kept], 1)
            total = total + torch.tanh(scale).sum(1)
        return x, total

    def build() -> nn.Module:
        return Apply(run, layers=nn.ModuleList(nn.Linear(2, 4) for _ in range(3)))

    def negative_log_likelihood(m: Any, x: Tensor) -> Tensor:
        z, log_determinant = m(x)
        return z.square().sum(1) / 2 - log_determinant

    return Problem(seeded(build), negative_log_likelihood, (floats(N, 4),))


def neural_ode() -> Problem:
    def run(m: Any, x: Tensor) -> Tensor:
        for step in range(4):
            time = torch.full_like(x[:, :1], step / 4)
            x = x + 0.25 * m.field(torch.cat([x, time], 1))
        return x

    def build() -> nn.Module:
        return Apply(run, field=nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)))

    return Problem(seeded(build), squared, (floats(N, 4),))


def energy() -> Problem:
    """The output is a derivative by the input (forces)."""

    def run(m: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(m.net(x).sum(), x, create_graph=True)
        return force

    def build() -> nn.Module:
        return Apply(run, net=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))

    return Problem(seeded(build), squared, (floats(N, 4),))


# ---------------------------------------------------------------------- experts and adapters


def experts_by_weights() -> Problem:
    def run(m: Any, x: Tensor) -> Tensor:
        gate = m.gate(x).softmax(-1)
        best = gate.topk(2, -1)
        sparse = torch.zeros_like(gate).scatter(-1, best.indices, best.values)
        outs = torch.stack([expert(x) for expert in m.experts], -1)
        return (outs * sparse[..., None, :]).sum(-1)

    def build() -> nn.Module:
        experts = nn.ModuleList(nn.Linear(6, 5) for _ in range(4))
        return Apply(run, gate=nn.Linear(6, 4), experts=experts)

    return Problem(seeded(build), squared, (floats(N, 7, 6),))


def experts_by_index() -> Problem:
    """Tokens of all examples sorted to their expert by `nonzero`, and added back."""

    def run(m: Any, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = m.gate(flat).softmax(-1).max(-1)
        out = flat.new_zeros(len(flat), 5)
        for k, expert in enumerate(m.experts):
            at = (chosen == k).nonzero().flatten()
            out = out.index_add(0, at, expert(flat[at]) * weight[at, None])
        return out.view(*x.shape[:2], 5)

    def build() -> nn.Module:
        experts = nn.ModuleList(nn.Linear(6, 5) for _ in range(3))
        return Apply(run, gate=nn.Linear(6, 3), experts=experts)

    return Problem(seeded(build), squared, (floats(N, 7, 6),))


def hyper_network() -> Problem:
    """The weights of the second network are outputs of the first."""

    def run(m: Any, x: Tensor, z: Tensor) -> Tensor:
        weight = m.make(z).view(-1, 5, 4)
        return torch.einsum("noi,nti->nto", weight, x)

    def build() -> nn.Module:
        return Apply(run, make=nn.Linear(3, 20))

    return Problem(seeded(build), squared, (floats(N, 6, 4), floats(N, 3, seed=2)))


def _adapter(run: Callable[..., Tensor], **parts: Callable[[], Any]) -> Callable[[], Problem]:
    """A frozen layer, and what is trained beside it."""

    def build() -> nn.Module:
        base = nn.Linear(6, 5)
        base.requires_grad_(False)
        return Apply(run, base=base, **{name: part() for name, part in parts.items()})

    return lambda: Problem(seeded(build), squared, (floats(N, 7, 6),))


def _random(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape) * 0.3)


def _dora(m: Any, x: Tensor) -> Tensor:
    weight = m.base.weight + m.b @ m.a
    return F.linear(x, m.size[:, None] * weight / weight.norm(dim=1, keepdim=True), m.base.bias)


_LORA = {"a": _random(2, 6), "b": _random(5, 2)}
#: name -> build, as in `Entry`.
MODELS: dict[str, Callable[[], Problem]] = {
    "vgg": _images(vgg),
    "residual": _images(residual),
    "dense_connections": _images(dense_connections),
    "channel_shuffle": _images(channel_shuffle),
    "inverted_residual": _images(inverted_residual),
    "inception": _images(inception),
    "weight_standardised": _images(weight_standardised),
    "weight_standardised_by_batch_norm": _images(weight_standardised_by_batch_norm),
    "instance_norm": _images(instance_norm),
    "u_net": u_net,
    "diffusion_u_net": diffusion_u_net,
    "graph": graph,
    "dense_graph": dense_graph,
    "attention_graph": attention_graph,
    "deep_sets": deep_sets,
    "point_net": point_net,
    "lstm": _recurrent("LSTM", num_layers=2),
    "gru": _recurrent("GRU", bidirectional=True),
    "rnn": _recurrent("RNN"),
    "lstm_cells": lstm_cells,
    "transformer_encoder": transformer_encoder,
    "transformer_whole": transformer_whole,
    "linear_attention": linear_attention,
    "state_space": state_space,
    "causal_convolutions": causal_convolutions,
    "tabular": tabular,
    "factorisation": factorisation,
    "autoencoder": autoencoder,
    "siamese": siamese,
    "radiance_field": radiance_field,
    "normalising_flow": normalising_flow,
    "neural_ode": neural_ode,
    "energy": energy,
    "experts_by_weights": experts_by_weights,
    "experts_by_index": experts_by_index,
    "hyper_network": hyper_network,
    "lora_by_hand": _adapter(lambda m, x: m.base(x) + F.linear(F.linear(x, m.a), m.b), **_LORA),
    "lora_merged": _adapter(lambda m, x: F.linear(x, m.base.weight + m.b @ m.a), **_LORA),
    "dora_by_hand": _adapter(_dora, **_LORA, size=_random(5)),
    "ia3_by_hand": _adapter(
        lambda m, x: m.base(x * m.inner) * m.outer, inner=_random(6), outer=_random(5)
    ),
    "bias_only": _adapter(lambda m, x: torch.tanh(m.base(x) + m.shift), shift=_random(5)),
}
