# SPDX-License-Identifier: Apache-2.0
"""Losses of `torch.nn.functional`, written correctly, and with the mistakes that people make.

Everything is float64. There are as many outputs as examples, so that an axis taken for another one
is no error of shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

Tensor = torch.Tensor
#: Examples of a batch, outputs of a model, and classes.
N = K = 6


def floats(*shape: int, seed: int = 0) -> Tensor:
    """Standard normals."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def ids(*shape: int, seed: int = 0, high: int = K) -> Tensor:
    """Integers."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------- architectures


class Architecture(NamedTuple):
    """A model from inputs to (n, K).

    Attributes:
        build: () -> the model.
        inputs: (rows, seed) -> its inputs.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Tensor]


class _Attention(nn.Module):
    """One block of a transformer, and the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(self.inner(x)).mean(1))


class _Reused(nn.Module):
    """One layer used twice, and a parameter that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(K, K), nn.Parameter(torch.ones(K))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x) + self.shift))


def _rows(*shape: int) -> Callable[[int, int], Tensor]:
    return lambda n, seed: floats(n, *shape, seed=seed)


ARCHITECTURES: dict[str, Architecture] = {
    "mlp": Architecture(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, K)),
        _rows(4),
    ),
    "cnn": Architecture(
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, K)
        ),
        _rows(2, 4, 4),
    ),
    "tokens": Architecture(
        lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, K)),
        lambda n, seed: ids(n, 3, seed=seed, high=9),
    ),
    "attention": Architecture(_Attention, _rows(4, 3)),
    "reused": Architecture(_Reused, _rows(K)),
}


# ---------------------------------------------------------------------- losses


class Loss(NamedTuple):
    """One loss, as a function of a model's outputs.

    Attributes:
        call: (arguments, target, **options of the loss) -> losses or their reduction.
        arguments: outputs (n, K) -> what the loss takes, a tuple.
        target: (rows, seed) -> a target for each row.
        kind: "elements": compares number with number, so that shapes may broadcast; "classes": a
            row of scores with a class; "rows": whole rows.
        is_float: the target may be any number.
    """

    call: Callable[..., Tensor]
    arguments: Callable[[Tensor], tuple[Tensor, ...]]
    target: Callable[[int, int], Tensor]
    kind: str
    is_float: bool = False


def _one(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda given, target, **options: function(given[0], target, **options)


def _gaussian(given: Any, target: Tensor, **options: Any) -> Tensor:
    return F.gaussian_nll_loss(given[0], target, given[1], **options)


def _ctc(given: Any, target: Tensor, **options: Any) -> Tensor:
    logs, n = torch.stack([given[0], given[0] * 2, given[0].cos()]).log_softmax(-1), len(target)
    lengths = [torch.full((n,), k, dtype=torch.long) for k in (3, target.shape[1])]
    return F.ctc_loss(logs, target, *lengths, **options)


def _real(n: int, seed: int) -> Tensor:
    return floats(n, K, seed=seed)


def _shares(n: int, seed: int) -> Tensor:
    return floats(n, K, seed=seed).sigmoid()


def _row_signs(n: int, seed: int) -> Tensor:
    return floats(n, seed=seed).sign()


def _classes(n: int, seed: int) -> Tensor:
    return ids(n, seed=seed)


def _itself(z: Tensor) -> tuple[Tensor, ...]:
    return (z,)


#: Losses of `torch.nn.functional`, by their name there; some of every kind.
LOSSES: dict[str, Loss] = {
    "mse_loss": Loss(_one(F.mse_loss), _itself, _real, "elements", True),
    "gaussian_nll_loss": Loss(
        _gaussian, lambda z: (z, F.softplus(z) + 0.1), _real, "elements", True
    ),
    "binary_cross_entropy_with_logits": Loss(
        _one(F.binary_cross_entropy_with_logits), _itself, _shares, "elements", True
    ),
    "kl_div": Loss(
        _one(F.kl_div),
        lambda z: (z.log_softmax(-1),),
        lambda n, seed: floats(n, K, seed=seed).softmax(-1),
        "elements",
        True,
    ),
    "cross_entropy": Loss(_one(F.cross_entropy), _itself, _classes, "classes"),
    "multi_margin_loss": Loss(_one(F.multi_margin_loss), _itself, _classes, "classes"),
    "cosine_embedding_loss": Loss(
        lambda given, target, **options: F.cosine_embedding_loss(*given, target, **options),
        lambda z: (z, z.tanh().flip(1)),
        _row_signs,
        "rows",
    ),
    "triplet_margin_loss": Loss(
        lambda given, target, **options: F.triplet_margin_loss(
            given[0], target, given[1], **options
        ),
        lambda z: (z, z.flip(1)),
        _real,
        "rows",
        True,
    ),
    "ctc_loss": Loss(_ctc, _itself, lambda n, seed: ids(n, 1, seed=seed, high=K - 1) + 1, "rows"),
}


def each(loss: Loss, z: Tensor, target: Tensor) -> Tensor:
    """(n,) the loss of every row, averaged over its own numbers."""
    found = loss.call(loss.arguments(z), target, reduction="none")
    return found if found.dim() == 1 else found.flatten(1).mean(1)


# ---------------------------------------------------------------------- how they are written

Criterion = Callable[[Loss, nn.Module, Tensor, Tensor], Tensor]


class Form(NamedTuple):
    """A way to write the loss of a batch.

    Attributes:
        criterion: (loss, model, inputs, targets) -> the scalar that backward is called on.
        reduction: what is declared, "mean" or "sum".
        fits: the losses it is written for.
    """

    criterion: Criterion
    reduction: str = "mean"
    fits: Callable[[str, Loss], bool] = lambda name, loss: True


def _of(**options: Any) -> Criterion:
    return lambda loss, m, x, t: loss.call(loss.arguments(m(x)), t, **options)


def _weighted(loss: Loss, m: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    """Weights that depend on each row's own target."""
    own = t.to(torch.float64).reshape(len(t), -1).mean(1).sigmoid()
    return (own * each(loss, m(x), t)).mean()


#: Correct: the mean or the sum of what each row gives alone.
CORRECT: dict[str, Form] = {
    "mean": Form(_of(reduction="mean")),
    "sum": Form(_of(reduction="sum"), "sum"),
    "default": Form(_of()),
    "by hand": Form(lambda loss, m, x, t: each(loss, m(x), t).mean()),
    "by hand, summed": Form(lambda loss, m, x, t: each(loss, m(x), t).sum(), "sum"),
    "divided": Form(lambda loss, m, x, t: each(loss, m(x), t).sum() / len(t)),
    "own weights": Form(_weighted),
    "batch mean": Form(_of(reduction="batchmean"), fits=lambda name, _: name == "kl_div"),
    "one output": Form(
        lambda loss, m, x, t: loss.call(
            [a[:, :1].squeeze(1) for a in loss.arguments(m(x))], t[:, 0]
        ),
        fits=lambda _, loss: loss.kind == "elements",
    ),
    "smoothed": Form(_of(label_smoothing=0.1), fits=lambda name, _: name == "cross_entropy"),
    "positions": Form(
        lambda loss, m, x, t: loss.call(
            [torch.stack([a, a * 2], 2) for a in loss.arguments(m(x))], t[:, None].expand(-1, 2)
        ),
        fits=lambda name, _: name == "cross_entropy",
    ),
}


def _shaped(change: Callable[[Any, Tensor], tuple[Any, Tensor]]) -> Criterion:
    """The loss of arguments and targets that were given another shape."""

    def criterion(loss: Loss, m: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        given, target = change(list(loss.arguments(m(x))), t)
        return loss.call(given, target)

    return criterion


def _outputs(change: Callable[[Tensor], Tensor]) -> Criterion:
    """The loss of outputs that depend on the batch."""
    return lambda loss, m, x, t: each(loss, change(m(x)), t).mean()


def _losses(change: Callable[[Tensor, Tensor], Tensor]) -> Criterion:
    """A number made of the losses (n,) and the targets."""
    return lambda loss, m, x, t: change(each(loss, m(x), t), t)


def _targets(change: Callable[[Tensor], Tensor]) -> Criterion:
    """Targets that depend on the batch."""
    return lambda loss, m, x, t: each(loss, m(x), change(t)).mean()


def _inputs(change: Callable[[Tensor], Tensor]) -> Criterion:
    """Inputs that depend on the batch."""
    return lambda loss, m, x, t: each(loss, m(change(x)), t).mean()


def _counts(t: Tensor) -> Tensor:
    """(n,) how many rows of the batch have a target like each row's."""
    kind = t.reshape(len(t), -1)[:, 0] > 0
    return (kind[:, None] == kind).sum(1).to(torch.float64)


def _numbers(t: Tensor) -> Tensor:
    """(n,) one number of each target."""
    return t.to(torch.float64).reshape(len(t), -1).mean(1)


def _class_weights(loss: Loss, m: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    weight = 1 / torch.bincount(t, minlength=K).clamp(min=1).to(torch.float64)
    return loss.call(loss.arguments(m(x)), t, weight=weight, reduction="sum")


def _ignored(loss: Loss, m: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return loss.call(loss.arguments(m(x)), torch.where(t > 2, -100, t))


def _positive_weight(loss: Loss, m: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    weight = (t < 0.5).sum(0) / (t >= 0.5).sum(0).clamp(min=1)
    return loss.call(loss.arguments(m(x)), t, pos_weight=weight)


def _in_batch_negatives(loss: Loss, m: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    z = F.normalize(m(x), dim=1)
    return loss.call(loss.arguments(z @ z.T), torch.arange(len(t)))


def _standardised(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.std(0) + 1e-3)


def _mixed(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x.flip(0)


def _elements(_: str, loss: Loss) -> bool:
    return loss.kind == "elements"


def _matrices(_: str, loss: Loss) -> bool:
    """Losses of (n, K) outputs with (n, K) targets."""
    return loss.target(2, 0).shape == (2, K) and loss.kind != "rows"


def _floats(_: str, loss: Loss) -> bool:
    return loss.is_float


def _classified(name: str, loss: Loss) -> bool:
    return loss.kind == "classes"


def _with_class_weights(name: str, _: Loss) -> bool:
    return name in ("cross_entropy", "multi_margin_loss")


def _with_ignored(name: str, _: Loss) -> bool:
    return name == "cross_entropy"


#: Mistakes: what people write, and the losses it can be written with.
MISTAKES: dict[str, Form] = {
    # an axis too many or too few
    "output not squeezed": Form(
        _shaped(lambda a, t: ([p[:, :1] for p in a], t[:, 0])), fits=_elements
    ),
    "target not squeezed": Form(
        _shaped(lambda a, t: ([p[:, 0] for p in a], t[:, :1])), fits=_elements
    ),
    # axes in the wrong order
    "output transposed": Form(
        _shaped(lambda a, t: ([p.mT for p in a], t)), fits=lambda n, loss: loss.kind != "rows"
    ),
    "target transposed": Form(_shaped(lambda a, t: (a, t.mT)), fits=_matrices),
    "flattened the other way": Form(
        _shaped(lambda a, t: ([p.mT.reshape(-1) for p in a], t.reshape(-1))), fits=_elements
    ),
    "class axis last": Form(
        _shaped(lambda a, t: ([p[None] for p in a], t[None])), fits=_with_ignored
    ),
    # a mean over the wrong axis
    "softmax over the batch": Form(_outputs(lambda z: z.softmax(0))),
    "normalised over the batch": Form(_outputs(lambda z: F.normalize(z, dim=0))),
    "batch norm of outputs": Form(_outputs(lambda z: F.batch_norm(z, None, None, training=True))),
    "centred, detached": Form(_outputs(lambda z: z - z.detach().mean(0))),
    "scaled by a detached maximum": Form(_outputs(lambda z: z / z.detach().abs().amax(0))),
    "cumulated over the batch": Form(_outputs(lambda z: z.cumsum(0))),
    "sorted over the batch": Form(_outputs(lambda z: z.sort(0).values)),
    "loss of the means": Form(
        _shaped(lambda a, t: ([p.mean(0) for p in a], t.mean(0))), fits=_elements
    ),
    "root of the mean": Form(_losses(lambda v, t: v.abs().mean().sqrt())),
    "hard examples": Form(_losses(lambda v, t: v.topk(2).values.mean())),
    "above the mean": Form(_losses(lambda v, t: F.relu(v - v.detach().mean()).mean())),
    # weights from the batch
    "weights by counts": Form(_losses(lambda v, t: (v / _counts(t)).sum()), "sum"),
    "mean by counts": Form(
        _losses(lambda v, t: (v * (_numbers(t) > 0)).sum() / (_numbers(t) > 0).sum().clamp(min=1))
    ),
    "chosen, then a mean": Form(
        _losses(lambda v, t: v[_numbers(t) >= _numbers(t).median()].mean())
    ),
    "weights from losses": Form(_losses(lambda v, t: (v.detach().softmax(0) * v).sum()), "sum"),
    "advantages": Form(
        _losses(
            lambda v, t: (
                v * (_numbers(t) - _numbers(t).mean()) / (_numbers(t).std() + 1e-6)
            ).mean()
        )
    ),
    "weights read as numbers": Form(
        _losses(lambda v, t: v.mean() * float(_numbers(t).abs().max()))
    ),
    "divided by a number": Form(
        _losses(lambda v, t: v.sum() / max(int((_numbers(t) > 0).sum()), 1))
    ),
    "class weights by counts": Form(_class_weights, "sum", fits=_with_class_weights),
    "ignored targets": Form(_ignored, fits=_with_ignored),
    "positive weight by counts": Form(
        _positive_weight, fits=lambda name, _: name == "binary_cross_entropy_with_logits"
    ),
    # statistics of the batch in targets and inputs
    "targets standardised": Form(_targets(_standardised), fits=_floats),
    "targets of another row": Form(_targets(lambda t: t.roll(1, 0))),
    "targets mixed": Form(_targets(_mixed), fits=_floats),
    "inputs standardised": Form(
        _inputs(lambda x: _standardised(x) if x.is_floating_point() else x.flip(0))
    ),
    "inputs mixed": Form(_inputs(lambda x: _mixed(x) if x.is_floating_point() else x.roll(1, 0))),
    # pairs
    "in-batch negatives": Form(_in_batch_negatives, fits=_classified),
    "outputs of another row": Form(_outputs(lambda z: z * z.roll(1, 0))),
    "distance to another row": Form(_outputs(lambda z: z - z.flip(0).detach())),
}
