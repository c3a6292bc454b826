# SPDX-License-Identifier: Apache-2.0
"""Ordinary right loops, with every check at every step: none of them raises anything."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset

from tests.dualdp_torch.checks import randomise
from tests.dualdp_torch.per_sample.loops import Model, linear, slow, trained

ROWS, T, V = 26, 5, 7


class Items(Dataset):
    """Rows with features, a class, real targets, tokens and a weight of their own."""

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.columns = {
            "x": torch.randn(ROWS, 6, generator=generator),
            "y": torch.randint(3, (ROWS,), generator=generator),
            "t": torch.rand(ROWS, 3, generator=generator),
            "words": torch.randint(1, V, (ROWS, T), generator=generator),
            "image": torch.randn(ROWS, 1, 8, 8, generator=generator),
            "weight": torch.rand(ROWS, generator=generator) + 0.5,
        }

    def __len__(self):
        return ROWS

    def __getitem__(self, k):
        return {name: column[k] for name, column in self.columns.items()}


def train(model, loop, reduction="mean", rows=ROWS, **options):
    torch.manual_seed(3)
    steps = list(
        trained(model, Subset(Items(), range(rows)), loop, reduction, mode="auto", **options)
    )
    engine = steps[-1][-1]
    assert engine.ledger.failed_check is None
    assert "check_impossible" not in engine.ledger.to_json()
    assert engine.get_epsilon(delta=1e-5) > 0


def each(o, y):
    return F.cross_entropy(o, y, reduction="none")


# ---------------------------------------------------------------------- losses


def focal(o, b, how):
    losses = (1 - o.softmax(1).gather(1, b["y"][:, None])[:, 0]) ** 2 * each(o, b["y"])
    return getattr(losses, how)()


#: Of (n, 3) outputs and a batch, by the reduction's name; all others are in tests/property.
LOSSES = {
    "cross entropy": lambda o, b, how: F.cross_entropy(o, b["y"], reduction=how),
    "smoothed": lambda o, b, how: F.cross_entropy(o, b["y"], label_smoothing=0.1, reduction=how),
    "binary, logits": lambda o, b, how: F.binary_cross_entropy_with_logits(
        o, b["t"], weight=torch.tensor([1.0, 2.0, 0.5]), reduction=how
    ),
    "divergence": lambda o, b, how: F.kl_div(
        o.log_softmax(1), b["t"].softmax(1), reduction={"mean": "batchmean"}.get(how, how)
    ),
    "gaussian": lambda o, b, how: F.gaussian_nll_loss(
        o, b["t"], F.softplus(o) + 0.1, reduction=how
    ),
    "ranking": lambda o, b, how: F.margin_ranking_loss(
        o[:, 0], o[:, 1], torch.where(b["y"] > 0, 1.0, -1.0), margin=0.1, reduction=how
    ),
    "focal by hand": focal,
}


def classifier():
    layers = linear(8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)
    return randomise(nn.Sequential(*layers))


def features(name, how="mean", autocast=False):
    def loop(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return LOSSES[name](model(batch["x"]), batch, how)

    return loop


@pytest.mark.parametrize("reduction", ["mean", *slow("sum")])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_a_classifier(name, reduction):
    train(classifier(), features(name, reduction), reduction)


@pytest.mark.parametrize("name", ["cross entropy", *slow(*list(LOSSES)[1:])])
def test_losses_under_autocast(name):
    train(classifier(), features(name, autocast=True))


@pytest.mark.parametrize(
    "name", ["divergence", *slow("cross entropy", "gaussian", "focal by hand")]
)
@pytest.mark.parametrize("size", [2, *slow(4)])
def test_losses_of_physical_batches(name, size):
    train(classifier(), features(name), steps=4, max_physical_batch_size=size)


# ---------------------------------------------------------------------- sequences


class Words(nn.Module):
    """Tokens to logits, causal."""

    def __init__(self, kind):
        super().__init__()
        self.table, self.head = nn.Embedding(V, 8), nn.Linear(8, V)
        self.kind, self.mix = kind, nn.LSTM(8, 8, batch_first=True)
        if kind == "attention":
            self.mix = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, words):
        x = self.table(words)
        if self.kind == "attention":
            mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
            return self.head(self.mix(x, src_mask=mask, is_causal=True))
        return self.head(self.mix(x)[0])


def next_word(model, b):
    logits = model(b["words"])[:, :-1]
    return F.cross_entropy(logits.reshape(-1, V), b["words"][:, 1:].reshape(-1))


def next_word_of_each(model, b):
    logits, target = model(b["words"])[:, :-1], b["words"][:, 1:]
    losses, mask = each(logits.transpose(1, 2), target), (target > 2).float()
    return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def next_word_by_counts(model, b):
    n, t = b["words"].shape
    logits = model(b["words"])[:, :-1].contiguous().view(n * (t - 1), V)
    return F.cross_entropy(logits, b["words"][:, 1:].flatten(), reduction="sum") / (n * (t - 1))


def next_word_viewed(model, b):
    """In batches that all have one size nothing tells what a number means."""
    losses = each(model(b["words"]).flatten(0, 1), b["words"].flip(1).flatten())
    return losses.view(b["words"].shape).mean(1).mean()


def connectionist(model, b):
    logs, n = model(b["words"]).log_softmax(-1).transpose(0, 1), len(b["words"])
    lengths = torch.full((n,), T), torch.full((n,), 2)
    return F.ctc_loss(logs, b["words"][:, :2], *lengths, reduction="none").mean()


def joined(rows):
    """Targets of CTC as one tensor of all rows, of which no row alone can be taken."""
    words = torch.stack([row["words"] for row in rows])
    return {"words": words, "targets": words[:, :2].flatten()}


def connectionist_of_joined_rows(model, b):
    logs, n = model(b["words"]).log_softmax(-1).transpose(0, 1), len(b["words"])
    lengths = torch.full((n,), T), torch.full((n,), 2)
    return F.ctc_loss(logs, b["targets"], *lengths, reduction="sum") / n


SEQUENCES = [next_word, next_word_of_each, next_word_by_counts, connectionist]


@pytest.mark.parametrize("kind", ["recurrent", *slow("attention")])
@pytest.mark.parametrize("loop", SEQUENCES)
def test_losses_of_sequences(loop, kind):
    train(randomise(Words(kind)), loop)


def test_rows_that_are_joined_are_a_note():
    *_, (*_, engine) = trained(
        randomise(Words("recurrent")),
        Items(),
        connectionist_of_joined_rows,
        mode="auto",
        collate=joined,
    )
    assert "could not be followed" in engine.ledger.to_json()


def test_shapes_are_read_in_batches_of_one_size():
    train(randomise(Words("recurrent")), next_word_viewed, rows=24, steps=6, poisson_sampling=False)


def padded(rows):
    """Words of their own lengths, as a collate function pads them."""
    lengths = torch.tensor([2 + int(row["y"]) for row in rows])
    words = [row["words"][: 2 + int(row["y"])] for row in rows]
    words = nn.utils.rnn.pad_sequence(words, batch_first=True)
    return {"words": words, "lengths": lengths, "y": torch.stack([row["y"] for row in rows])}


def pooled(self, words, lengths):
    mask = torch.arange(words.shape[1]) < lengths[:, None]
    return self.head((self.table(words) * mask[:, :, None]).sum(1) / lengths[:, None])


def test_words_that_are_padded_by_the_batch():
    def loop(model, b):
        return F.cross_entropy(model(b["words"], lengths=b["lengths"]), b["y"])

    model = Model(pooled, table=nn.Embedding(V, 6, padding_idx=0), head=linear())
    train(model, loop, collate=padded, steps=4)


# ---------------------------------------------------------------------- images


def encoded(self, image):
    return {"features": (z := self.body(image)), "logits": self.head(z)}


def images():
    norm = nn.GroupNorm(2, 4), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten()
    return Model(encoded, body=nn.Sequential(nn.Conv2d(1, 4, 3), *norm), head=nn.Linear(144, 3))


def augmented(model, b):
    image = b["image"] + 0.1 * torch.randn_like(b["image"])
    image = torch.where(torch.rand(len(image), 1, 1, 1) < 0.5, image, image.flip(3))
    found = model(image)
    return F.cross_entropy(found["logits"], b["y"]) + 1e-3 * found["features"].square().mean()


def weighted_by_a_column(model, b):
    return (each(model(b["image"])["logits"], b["y"]) * b["weight"]).mean()


def distilled(model, b):
    student, teacher = model(b["image"])["logits"], b["t"] * 3
    soft = F.kl_div((student / 2).log_softmax(1), (teacher / 2).softmax(1), reduction="batchmean")
    return 0.5 * F.cross_entropy(student, b["y"]) + 2.0 * soft


def taught_by_itself(model, b):
    model.eval()
    with torch.no_grad():
        target = model(b["image"])["logits"].argmax(1)
    model.train()
    return F.cross_entropy(model(b["image"])["logits"], target)


def clipped_in_the_loop(model, b):
    losses = each(model(b["image"])["logits"], b["y"])
    return losses.clamp(max=5.0).where(losses.isfinite(), 0.0).mean()


def logged(model, b):
    """Also a number that equals the weight of the loss."""
    logits = model(b["image"])["logits"]
    correct = (logits.argmax(1) == b["y"]).float().mean().item()
    half = (logits.argmax(1) == logits.argmax(1)).float().mean().mul(0.5).item()
    print(f"accuracy {correct:.2f}", half, logits.argmax(1).tolist(), logits.detach().mean())
    return F.cross_entropy(logits, b["y"]) * 0.5


def in_parts(model, b):
    logits = model(b["image"])["logits"]
    return torch.stack([F.cross_entropy(logits, b["y"]), logits.square().mean()]).sum()


IMAGES = [
    *(augmented, weighted_by_a_column, distilled, taught_by_itself, clipped_in_the_loop),
    *(logged, in_parts),
]


@pytest.mark.parametrize("loop", [*IMAGES[:2], logged, *slow(*IMAGES[2:5], in_parts)])
def test_losses_of_images(loop):
    train(images(), loop, steps=6 if loop is logged else 2)


# ---------------------------------------------------------------------- other models


def variational(self, x):
    """Three outputs; the first is made from the other two and a draw."""
    mean, log_variance = self.encode(x).chunk(2, 1)
    z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
    return self.decode(z), mean, log_variance


def autoencoder():
    return Model(variational, encode=linear(8), decode=nn.Linear(4, 6))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_variational_loss_with_an_annealed_term(reduction):
    beta = iter((0.0, 0.1, 0.2, 0.3, 0.4))

    def loop(model, b):
        found, mean, log_variance = model(b["x"])
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
        squares = F.mse_loss(found, b["x"], reduction="none").sum(1)
        return getattr(squares + next(beta) * divergence, reduction)()

    train(autoencoder(), loop, reduction, steps=4)
