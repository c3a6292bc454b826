# SPDX-License-Identifier: Apache-2.0
"""The loss that backward is called on: a mean or a sum of one loss per example, as declared."""

import threading
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dualdp_torch as dpt
from dualdp_torch.reduction import current_losses
from tests.only_torch.checks import data, ids, randomise
from tests.only_torch.loop import build, dataset, first_batch, plan, start

MODES = ["auto", "functorch", "ghost"]


@pytest.mark.parametrize("call", [torch.Tensor.backward, torch.autograd.backward])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("declared", "used"), [("mean", "sum"), ("sum", "mean")])
def test_a_loss_that_is_not_what_was_declared_is_refused(declared, used, mode, call):
    _, model, _, loader = start(plan=plan(), loss_reduction=declared, grad_sample_mode=mode)
    _, x, y = first_batch(loader)
    loss = F.cross_entropy(model(x), y, reduction=used)
    with pytest.raises(ValueError, match=f"'{declared}', but the loss is a {used}"):
        call(loss)


def of_each(out, y):
    """(n,) losses."""
    return F.cross_entropy(out, y, reduction="none")


def one_hot(y):
    """(n, 3) targets."""
    return F.one_hot(y, 3).float()


def focal(out, y):
    """Focal loss by hand."""
    p, t = out.sigmoid(), one_hot(y)
    each = F.binary_cross_entropy_with_logits(out, t, reduction="none")
    return ((0.25 * t + 0.75 * (1 - t)) * (1 - (p * t + (1 - p) * (1 - t))) ** 2 * each).mean()


def distilled(out, y):
    """Divergence from a teacher, at a temperature."""
    teacher = torch.linspace(0, 1, len(y) * 3).view(-1, 3)
    return F.kl_div((out / 2).log_softmax(1), teacher.softmax(1), reduction="none").mean() * 4


def tokens(out):
    """(n, 2, 3) logits of two tokens from the (n, 3) outputs."""
    return torch.stack([out, out * 2], 1)


def of_tokens(out, y):
    """Mean over each example's tokens, then over the examples."""
    each = F.cross_entropy(tokens(out).view(-1, 3), y.repeat_interleave(2), reduction="none")
    return each.view(len(y), 2).mean(1).mean()


def connectionist(out, y):
    """CTC, which takes time first."""
    logs = tokens(out).log_softmax(-1).transpose(0, 1)
    lengths = [torch.full((len(y),), k) for k in (2, 1)]
    return F.ctc_loss(logs, torch.ones(len(y), 1, dtype=torch.long), *lengths)


def penalised(out, y):
    """In-place on what is no view, and a guard against nan."""
    each = of_each(out, y)
    each[y == 1] = 0.0
    return torch.where(each.isfinite(), each, torch.zeros(())).clamp(max=9.0).mean()


#: Losses that are what they say, by the usual ways to write them.
RIGHT = {
    "mean": {
        "cross entropy": F.cross_entropy,
        "smoothed": lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1),
        "by hand": lambda out, y: of_each(out, y).mean(),
        "along an axis": lambda out, y: of_each(out, y).mean(0),
        "scaled": lambda out, y: 0.5 * F.cross_entropy(out, y),
        "accumulated": lambda out, y: F.cross_entropy(out, y) / 4,
        "two terms": lambda out, y: F.cross_entropy(out, y) + 0.1 * out.square().mean(),
        "own mean first": lambda out, y: out.square().mean(1).mean(),
        "of two views": lambda out, y: torch.stack([of_each(out, y), out.sum(1)]).mean(0).mean(),
        "examples first": lambda out, y: out.square().mean(0).sum(),
        "binary, with weights": lambda out, y: F.binary_cross_entropy_with_logits(
            out, torch.ones_like(out), weight=torch.arange(3.0)
        ),
        "squared": lambda out, y: F.mse_loss(out, one_hot(y)),
        "one output": lambda out, y: F.mse_loss(out[:, :1].squeeze(-1), y.float()),
        "huber": lambda out, y: F.huber_loss(out, one_hot(y)),
        "smooth l1": lambda out, y: F.smooth_l1_loss(out, one_hot(y)),
        "absolute": lambda out, y: F.l1_loss(out, one_hot(y)),
        "binary": lambda out, y: F.binary_cross_entropy(out.sigmoid(), one_hot(y)),
        "log likelihood": lambda out, y: F.nll_loss(out.log_softmax(-1), y),
        "gathered": lambda out, y: -out.log_softmax(1).gather(1, y[:, None]).squeeze(1).mean(),
        "indexed": lambda out, y: -out.log_softmax(1)[torch.arange(len(y)), y].mean(),
        "weights": lambda out, y: (of_each(out, y) * torch.linspace(0, 1, len(y))).mean(),
        "focal": focal,
        "distilled": distilled,
        "tokens": of_tokens,
        "tokens, classes second": lambda out, y: F.cross_entropy(
            tokens(out).transpose(1, 2), y[:, None].expand(-1, 2)
        ),
        "tokens, smoothed": lambda out, y: F.cross_entropy(
            tokens(out).view(-1, 3), y.repeat_interleave(2), label_smoothing=0.1
        ),
        "next token": lambda out, y: F.cross_entropy(
            tokens(out)[:, :-1].reshape(-1, 3), y.repeat_interleave(1)
        ),
        "permuted": lambda out, y: tokens(out).permute(0, 2, 1).square().mean(),
        "ctc": connectionist,
        "in place": penalised,
        "margin": lambda out, y: F.multi_margin_loss(out, y),
        "poisson": lambda out, y: F.poisson_nll_loss(out, one_hot(y)),
        "cosine": lambda out, y: (1 - F.cosine_similarity(out, one_hot(y) + 1)).mean(),
        "triplet": lambda out, y: F.triplet_margin_loss(out, one_hot(y), one_hot(y).flip(1)),
        "to prototypes": lambda out, y: F.cross_entropy(out @ torch.ones(3, 4), y),
        "layer norm": lambda out, y: F.layer_norm(out, (3,)).square().mean(),
        "largest": lambda out, y: (out - out.max(1, keepdim=True).values).square().mean(),
        "entropy": lambda out, y: torch.einsum("nv,nv->n", out.softmax(1), out).mean(),
    },
    "sum": {
        "list": lambda out, y: torch.stack([of_each(out, y).sum(), out.sum()]).sum(),
        "chosen tokens": lambda out, y: F.cross_entropy(
            tokens(out)[:, 0][y != 1], y[y != 1], reduction="sum"
        ),
        "cross entropy": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
        "by hand": lambda out, y: of_each(out, y).sum(),
        "weights": lambda out, y: F.cross_entropy(
            out, y, weight=torch.arange(3.0), reduction="sum"
        ),
        "variational": lambda out, y: (
            F.mse_loss(out, torch.zeros_like(out), reduction="sum")
            - 0.5 * torch.sum(1 + out - out.exp())
        ),
        "chosen": lambda out, y: of_each(out, y)[y != 1].sum(),
    },
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("declared", "loss_fn"),
    [pytest.param(r, f, id=f"{r}: {name}") for r, fs in RIGHT.items() for name, f in fs.items()],
)
def test_the_usual_losses_pass(declared, loss_fn, mode):
    _, model, optimizer, loader = start(plan=plan(), loss_reduction=declared, grad_sample_mode=mode)
    for x, y, _ in loader:
        loss_fn(model(x), y).backward()
        optimizer.step()


def masked_mean(out, y):
    """A mean over some of the batch."""
    return of_each(out, y)[y != 1].mean()


def correlation(out, y):
    """One minus the correlation of two outputs over the batch."""
    a, b = out[:, 0] - out[:, 0].mean(), out[:, 1] - out[:, 1].mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm())


class Centre(torch.autograd.Function):
    """Subtracts the mean over the batch, in code that the graph does not show."""

    @staticmethod
    def forward(ctx, z):
        return z - z.mean(0)

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(0)


class Total(torch.autograd.Function):
    """A scalar of its own."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z.square().sum().sqrt()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


def first_column_zero(out):
    """Writes into a view."""
    out = out * 1
    out[:, 0] = 0.0
    return out.square()


def written(out):
    """Writes some outputs over others."""
    other = out * 1
    other[torch.arange(len(out))] = out.exp()
    return other.square()


#: Criteria that pair, reorder or mix the examples (n, 3): name -> (criterion, its node).
MIXING = {
    "batch norm": (lambda z: F.batch_norm(z, None, None, training=True), "NativeBatchNorm"),
    "distances": (lambda z: torch.cdist(z, z).mean(1), "Cdist"),
    "condensed distances": (lambda z: F.pdist(z), "Pdist"),
    "all pairs": (lambda z: ((z[:, None] - z[None]) ** 2).mean((1, 2)), "Unsqueeze"),
    "pairs by broadcasting": (lambda z: (z[:, :1] - z[:, 0]).mean(1), "Sub"),
    "pairs by expanding": (lambda z: z[:, 0].expand(len(z), -1).square().mean(1), "Expand"),
    "outer": (lambda z: torch.outer(z[:, 0], z[:, 1]), "Mul"),
    "products": (lambda z: torch.bmm(z[None], z.T[None]), "Bmm|Unsqueeze|Permute"),
    "products, added": (lambda z: torch.addmm(torch.zeros(len(z), len(z)), z, z.t()), "Addmm"),
    "batched, wrong axis": (lambda z: torch.bmm(z.t()[:, :, None], z.t()[:, None]), "Bmm|TBack"),
    "flipped": (lambda z: z * z.flip(0), "Flip"),
    "flipped, from the end": (lambda z: z * z.flip(-2), "Flip"),
    "rolled": (lambda z: z * z.roll(1, 0), "Roll"),
    "rolled as one": (lambda z: z * z.roll(3), "Roll"),
    "maximum": (lambda z: z - z.max(0).values, "MaxBackward0"),
    "minimum": (lambda z: z - z.min(0).values, "MinBackward0"),
    "median": (lambda z: z - z.median(0).values, "Median"),
    "sorted": (lambda z: z.sort(0).values * z, "Sort"),
    "cumulated": (lambda z: z.cumsum(-2), "Cumsum"),
    "selected": (lambda z: z * z.index_select(0, torch.arange(len(z)).flip(0)), "IndexSelect"),
    "gathered": (lambda z: z * z.gather(0, torch.zeros(len(z), 3, dtype=torch.long)), "Gather"),
    "scattered": (
        lambda z: torch.zeros_like(z).scatter_add(0, torch.zeros(len(z), 3).long(), z).square(),
        "ScatterAdd",
    ),
    "looked up": (lambda z: F.embedding(torch.arange(len(z)).flip(0), z) * z, "Embedding"),
    "joined": (lambda z: torch.cat([z, z.exp()]), "Cat"),
    "stacked": (lambda z: torch.stack([z, z.exp()]).square(), "Stack"),
    "one example": (lambda z: z - z[0], "Select"),
    "neighbours": (lambda z: z[1:] - z[:-1], "Slice"),
    "split": (lambda z: z.split(1)[0] - z, "Split"),
    "t()": (lambda z: z.t().square(), "TBackward0"),
    "transposed": (lambda z: z.transpose(-1, 0).square(), "Transpose"),
    "permuted": (lambda z: z.permute(-1, 0).square(), "Permute"),
    "viewed": (lambda z: z.view(3, -1).log_softmax(1), "LogSoftmax|View"),
    "in front": (lambda z: z.view(1, -1).log_softmax(1), "View"),
    "softmax, from the end": (lambda z: z.softmax(-2).square(), "Softmax"),
    "repeated": (lambda z: z.repeat(2, 1).square(), "Repeat"),
    "normalised": (lambda z: F.layer_norm(z, z.shape), "NativeLayerNorm"),
    "singular values": (lambda z: torch.linalg.svdvals(z), "LinalgSvd"),
    "strided": (lambda z: z.as_strided((len(z), 3), (0, 1)).square(), "AsStrided"),
    "frequencies": (lambda z: torch.fft.fft(z, dim=-2).abs(), "FftR2C"),
    "as a kernel": (lambda z: F.conv1d(torch.ones(len(z), 3, 4), z.view(-1, 3, 1)), "Convol"),
    "into a view": (first_column_zero, "CopySlices"),
    "over others": (written, "IndexPut"),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("mix", "node"), [pytest.param(*case, id=name) for name, case in MIXING.items()]
)
def test_a_criterion_that_joins_or_moves_examples_is_refused(mix, node, reduction):
    _, model, _, loader = start(plan=plan(), loss_reduction=reduction)
    _, x, _ = first_batch(loader)
    mixed = mix(model(x))
    match = rf"joins or moves examples \(\S*({node})\S* below the"
    if reduction == "mean":  # over a number of rows that is no multiple of the examples'
        match += r"|a mean over \d+ numbers of 9 examples"
    with pytest.raises(ValueError, match=match):
        getattr(mixed, reduction)().backward()


@pytest.mark.parametrize("loss_fn", [lambda z: Centre.apply(z).square().mean(), Total.apply])
def test_functions_that_nobody_can_look_into_are_refused(loss_fn):
    _, model, _, loader = start(plan=plan())
    _, x, _ = first_batch(loader)
    with pytest.raises(ValueError, match="autograd.Function .* use clipped_grad_sum"):
        loss_fn(model(x)).backward()


def test_a_loss_that_ends_in_an_unknown_function_is_refused():
    _, model, _, loader = start(plan=plan())
    _, x, y = first_batch(loader)
    with pytest.raises(ValueError, match="ends in SoftplusBackward0, which is no mean and no sum"):
        F.softplus(F.cross_entropy(model(x), y)).backward()


def test_rows_of_different_counts_are_not_combined():
    """One row that was chosen by an index is no part of every example's loss."""
    _, model, _, loader = start(plan=plan())
    _, x, _ = first_batch(loader)
    out = model(x)
    with pytest.raises(ValueError, match="SubBackward0 below the mean"):
        (out - out[torch.tensor([0])]).square().mean().backward()


#: Losses whose gradient for one example depends on the others, and what is said of them.
WRONG = {
    "class weights": (
        lambda out, y: F.cross_entropy(out, y, weight=torch.arange(1.0, 4.0)),
        "a weighted mean",
    ),
    "ignored by choice": (lambda out, y: F.cross_entropy(out, y, ignore_index=1), "a weighted"),
    "some of the batch": (masked_mean, r"a mean over \d+ numbers of 9 examples"),
    "a sum, divided": (lambda out, y: of_each(out, y).sum() / len(y), "a sum divided by"),
    "a token mean": (
        lambda out, y: (of_each(out, y) * (y != 1)).sum() / (y != 1).sum(),
        "a sum divided by",
    ),
    "like smoothing": (
        lambda out, y: F.nll_loss(lp := out.log_softmax(1), y) + (lp * 2).sum() / (y != 1).sum(),
        "a sum divided by",
    ),
    "root": (lambda out, y: F.mse_loss(out, torch.zeros_like(out)).sqrt(), "The loss is sqrt of"),
    "largest": (lambda out, y: of_each(out, y).max(), "The loss is max of"),
    "correlation": (correlation, "The loss is div of"),
    "centred": (lambda out, y: (out - out.mean(0)).square().mean(), "MeanBackward1 below the mean"),
    "spread": (lambda out, y: out.std(0).mean(), r"a mean over 3 numbers"),
    "spread of all": (lambda out, y: (out - out.std()).square().mean(), "StdBackward0 below"),
    "smoothed, weights": (
        lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1, weight=torch.ones(3)),
        "a weighted mean",
    ),
    "over the batch": (lambda out, y: -out.log_softmax(0)[:, 0].mean(), "LogSoftmaxBackward0"),
    "contrastive": (
        lambda out, y: F.cross_entropy(out @ out.T, torch.arange(len(y))),
        "MmBackward0 below the mean",
    ),
    "mixed by a constant": (
        lambda out, y: (torch.ones(len(y), len(y)) @ out).square().mean(),
        "MmBackward0 below the mean",
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("loss_fn", "match"), [pytest.param(*case, id=name) for name, case in WRONG.items()]
)
def test_a_loss_that_mixes_examples_is_refused(loss_fn, match, mode):
    _, model, _, loader = start(plan=plan(), grad_sample_mode=mode)
    _, x, y = first_batch(loader)
    with pytest.raises(ValueError, match=match):
        loss_fn(model(x), y).backward()


def in_a_mapping(rows):
    """A batch as tokenizers make it: a mapping that is no dict."""
    return UserDict(x=torch.stack([r[0] for r in rows]), y=[(torch.stack([r[1] for r in rows]),)])


@pytest.mark.parametrize("collate", [None, in_a_mapping])
def test_ignored_targets_are_found_in_the_batch(collate):
    model, optimizer, _ = build()
    x, y, _ = dataset().tensors
    y = y.clone()
    y[7] = -100
    loader = DataLoader(TensorDataset(x, y), batch_size=12, collate_fn=collate)
    _, model, optimizer, loader = start((model, optimizer, loader), plan=plan())
    held = [7 in plan().batch_indices(step) for step in range(6)]
    assert 0 < sum(held) < 6
    for step, batch in enumerate(loader):
        x, y = batch if collate is None else (batch["x"], batch["y"][0][0])
        loss = F.cross_entropy(model(x), y)
        if held[step]:
            break
        loss.backward()
        optimizer.step()
    with pytest.raises(ValueError, match="ignored targets"):
        loss.backward()


@pytest.mark.parametrize("mixes", [False, True])
def test_only_the_graph_above_the_models_outputs_is_looked_at(mixes):
    """Attention moves axes and multiplies outputs; its criterion may do neither."""
    model = randomise(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(data(20, 3, 4)), batch_size=5)
    run = plan(num_examples=20, expected_batch_size=5, num_steps=1)
    _, model, optimizer, loader = start((model, optimizer, loader), plan=run)
    for (x,) in loader:
        out = model(x)
        out = out - out.mean(0) if mixes else out
        if mixes:
            with pytest.raises(ValueError, match="MeanBackward1 below the mean"):
                out.square().mean().backward()
            break
        out.square().mean().backward()
        optimizer.step()


def test_the_loss_is_found_from_another_thread():
    """On a GPU hooks run in a thread of autograd's own."""
    main, seen = threading.get_ident(), []
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def look(_):
        other = threading.Thread(target=lambda: seen.append(current_losses(main)))
        other.start()
        other.join()

    y.register_hook(look)
    loss = y.sum()
    loss.backward()
    assert seen[0] == (loss,)
    assert current_losses() == ()


def test_targets_of_a_recorded_loss_are_looked_at():
    model, x = build()[0], data(4, 6)
    y = ids(3, 4)
    for loss_fn in (
        lambda out: F.cross_entropy(out, y, ignore_index=int(y[0])),
        lambda out: F.cross_entropy(out, y, weight=torch.ones(3)),
    ):
        with dpt.record_per_sample(model, loss_reduction="mean") as record:
            with pytest.raises(ValueError, match="a weighted mean"):
                loss_fn(model(x)).backward()
    with dpt.record_per_sample(model, loss_reduction="mean") as record:
        F.cross_entropy(model(x), y, ignore_index=2 if 2 not in y else -5).backward()
    assert len(record.norms()) == 4


@pytest.mark.parametrize("position", [0, 1])
def test_every_loss_of_one_backward_is_looked_at(position):
    _, model, _, loader = start(plan=plan())
    _, x, y = first_batch(loader)
    out = model(x)
    losses = [F.cross_entropy(out, y), F.cross_entropy(out, y)]
    losses[position] = out.std(0).mean()
    with pytest.raises(ValueError, match="a mean over 3 numbers"):
        torch.autograd.backward(losses)


def test_two_losses_of_one_backward_are_their_sum():
    _, model, optimizer, loader = start(plan=plan())
    for x, y, _ in loader:
        out = model(x)
        torch.autograd.backward([F.cross_entropy(out, y), out.square().mean()])
        optimizer.step()


def test_the_loss_given_to_grad_is_looked_at():
    _, model, _, loader = start(plan=plan())
    _, x, y = first_batch(loader)
    x.requires_grad_()
    with pytest.raises(ValueError, match="'mean', but the loss is a sum"):
        torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), x)


def in_thread(call):
    """What a call raises in a thread of its own."""
    raised = []

    def run():
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


def test_a_backward_in_another_thread_is_looked_at():
    _, model, _, loader = start(plan=plan())
    _, x, y = first_batch(loader)
    (error,) = in_thread(F.cross_entropy(model(x), y, reduction="sum").backward)
    assert "'mean', but the loss is a sum" in str(error)


def test_losses_are_found_in_threads_that_nobody_named():
    """As on a GPU, where the hook's thread is neither the forward's nor the backward's."""
    seen = []
    y = torch.ones(2, requires_grad=True) * 2

    def look(_):
        in_thread(lambda: seen.append(current_losses()))

    y.register_hook(look)
    loss = y.sum()
    loss.backward()
    assert seen[0] == (loss,)


def test_a_backward_whose_loss_cannot_be_found_is_refused():
    _, model, _, loader = start(plan=plan())
    _, x, y = first_batch(loader)
    loss = F.cross_entropy(model(x), y)
    with pytest.raises(RuntimeError, match="whose loss could not be found"):
        torch.autograd.Variable._execution_engine.run_backward(
            (loss,), (torch.ones(()),), False, False, (), True, True
        )


def test_a_loss_that_was_refused_is_refused_again():
    _, model, _, loader = start(plan=plan())
    _, x, y = first_batch(loader)
    loss = F.cross_entropy(model(x), y, reduction="sum")
    for _ in range(2):
        with pytest.raises(ValueError, match="but the loss is a sum"):
            loss.backward(retain_graph=True)
