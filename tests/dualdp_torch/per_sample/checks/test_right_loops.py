# SPDX-License-Identifier: Apache-2.0
"""Ordinary right loops, with every check at every step: none of them raises anything."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dualdp
import dualdp_torch as dpt
from tests.dualdp_torch.checks import randomise
from tests.dualdp_torch.loop import plan

ROWS, T, V = 26, 5, 7


def train(model, loop, items, reduction="mean", steps=2, collate=None, **changes):
    """A run of a few steps, each of them checked."""
    torch.manual_seed(3)
    run = dualdp.PrivacyPlan(
        **{
            "num_examples": ROWS,
            "expected_batch_size": 9,
            "num_steps": steps,
            "noise_multiplier": 1.0,
            "max_grad_norm": 0.7,
            "delta": 1e-5,
            "seed": 11,
            "accountant": "rdp",
            **changes,
        }
    )
    engine = dpt.PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        data_loader=DataLoader(items, batch_size=9, collate_fn=collate),
        plan=run,
        loss_reduction=reduction,
        checks=1.0,
    )
    for batch in loader.remaining():
        optimizer.zero_grad()
        loop(model, batch).backward()
        optimizer.step()
    assert len(engine.ledger) == steps
    assert engine.ledger.last_check == steps - 1
    assert engine.ledger.failed_check is None
    engine.detach()


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


# ---------------------------------------------------------------------- losses

each = {"reduction": "none"}


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
    "focal by hand": lambda o, b, how: getattr(
        ((1 - o.softmax(1).gather(1, b["y"][:, None])[:, 0]) ** 2)
        * F.cross_entropy(o, b["y"], **each),
        how,
    )(),
}


class Net(nn.Module):
    """A classifier; what it does beside that is said by name."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.tanh(self.norm(self.first(x)))
        if self.kind == "dropout":
            hidden = F.dropout(hidden, 0.3, self.training)
        return self.second(hidden)


def features(loss, how, autocast=False):
    def loop(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss(model(batch["x"]), batch, how)

    return loop


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["plain", "dropout"])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_a_classifier(loss, kind, reduction):
    train(randomise(Net(kind)), features(LOSSES[loss], reduction), Items(), reduction)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_under_autocast(loss):
    train(randomise(Net("plain")), features(LOSSES[loss], "mean", autocast=True), Items())


@pytest.mark.parametrize("loss", ["cross entropy", "divergence", "gaussian", "focal by hand"])
@pytest.mark.parametrize("size", [2, 4])
def test_losses_of_physical_batches(loss, size):
    train(
        randomise(Net("dropout")),
        features(LOSSES[loss], "mean"),
        Items(),
        steps=4,
        physical_batch_size=size,
    )


# ---------------------------------------------------------------------- other models


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
    losses = F.cross_entropy(logits.transpose(1, 2), target, **each)
    mask = (target > 2).float()
    return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def next_word_by_counts(model, b):
    n, t = b["words"].shape
    logits = model(b["words"])[:, :-1].contiguous().view(n * (t - 1), V)
    losses = F.cross_entropy(logits, b["words"][:, 1:].flatten(), reduction="sum")
    return losses / (n * (t - 1))


def connectionist(model, b):
    logs = model(b["words"]).log_softmax(-1).transpose(0, 1)
    n = len(b["words"])
    lengths = torch.full((n,), T), torch.full((n,), 2)
    each_ = F.ctc_loss(logs, b["words"][:, :2], *lengths, reduction="none")
    return each_.mean()


SEQUENCES = [next_word, next_word_of_each, next_word_by_counts, connectionist]


@pytest.mark.parametrize("kind", ["recurrent", "attention"])
@pytest.mark.parametrize("loop", SEQUENCES)
def test_losses_of_sequences(loop, kind):
    train(randomise(Words(kind)), loop, Items())


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten()
        )
        self.head = nn.Linear(144, 3)

    def forward(self, image):
        return {"features": (z := self.body(image)), "logits": self.head(z)}


def augmented(model, b):
    image = b["image"] + 0.1 * torch.randn_like(b["image"])
    image = torch.where(torch.rand(len(image), 1, 1, 1) < 0.5, image, image.flip(3))
    found = model(image)
    return F.cross_entropy(found["logits"], b["y"]) + 1e-3 * found["features"].square().mean()


def weighted_by_a_column(model, b):
    losses = F.cross_entropy(model(b["image"])["logits"], b["y"], **each)
    return (losses * b["weight"]).mean()


def distilled(model, b):
    with torch.no_grad():
        teacher = model(b["image"])["logits"] if False else b["t"] * 3
    student = model(b["image"])["logits"]
    soft = F.kl_div((student / 2).log_softmax(1), (teacher / 2).softmax(1), reduction="batchmean")
    return 0.5 * F.cross_entropy(student, b["y"]) + 2.0 * soft


def taught_by_itself(model, b):
    model.eval()
    with torch.no_grad():
        target = model(b["image"])["logits"].argmax(1)
    model.train()
    return F.cross_entropy(model(b["image"])["logits"], target)


def clipped_in_the_loop(model, b):
    losses = F.cross_entropy(model(b["image"])["logits"], b["y"], **each)
    return losses.clamp(max=5.0).where(losses.isfinite(), 0.0).mean()


def logged(model, b):
    logits = model(b["image"])["logits"]
    correct = (logits.argmax(1) == b["y"]).float().mean().item()
    predicted = logits.argmax(1).tolist()
    assert 0 <= correct <= 1
    assert len(predicted) == len(b["y"])
    print(f"accuracy {correct:.2f}", logits.detach().mean())
    return F.cross_entropy(logits, b["y"]) * 0.5


def in_parts(model, b):
    logits = model(b["image"])["logits"]
    return torch.stack([F.cross_entropy(logits, b["y"]), logits.square().mean()]).sum()


IMAGES = [
    *(augmented, weighted_by_a_column, distilled, taught_by_itself, clipped_in_the_loop),
    *(logged, in_parts),
]


@pytest.mark.parametrize("loop", IMAGES)
def test_losses_of_images(loop):
    train(randomise(Images()), loop, Items())


class Variational(nn.Module):
    """Three outputs; the first is made from the other two and a draw."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decode(z), mean, log_variance


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_variational_loss(reduction):
    beta = iter((0.0, 0.1, 0.2, 0.3, 0.4))

    def loop(model, b):
        found, mean, log_variance = model(b["x"])
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
        losses = F.mse_loss(found, b["x"], **each).sum(1) + next(beta) * divergence
        return getattr(losses, reduction)()

    train(randomise(Variational()), loop, Items(), reduction, steps=4)


@pytest.mark.parametrize("kind", ["masked", "causal", "classes"])
def test_models_of_hugging_face(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.BertConfig(
        vocab_size=V, intermediate_size=16, max_position_embeddings=T, num_labels=3, **sizes
    )
    gpt = transformers.GPT2Config(vocab_size=V, n_positions=T, n_embd=8, n_layer=1, n_head=2)
    torch.manual_seed(0)
    model = {
        "masked": lambda: transformers.BertForMaskedLM(bert),
        "causal": lambda: transformers.GPT2LMHeadModel(gpt),
        "classes": lambda: transformers.BertForSequenceClassification(bert),
    }[kind]()
    if kind == "masked":
        model.cls.predictions.decoder.weight = nn.Parameter(
            model.cls.predictions.decoder.weight.detach().clone()
        )

    def loop(model, b):
        attended = (b["words"] > 1).long()
        attended[:, 0] = 1
        logits = model(input_ids=b["words"], attention_mask=attended).logits
        if kind == "classes":
            return F.cross_entropy(logits, b["y"])
        if kind == "causal":
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), b["words"][:, 1:].flatten())
        return F.cross_entropy(logits.transpose(1, 2), b["words"])

    train(model, loop, Items())


def padded(rows):
    """Words of their own lengths, as a collate function pads them."""
    lengths = torch.tensor([2 + int(row["y"]) for row in rows])
    words = [row["words"][: 2 + int(row["y"])] for row in rows]
    words = nn.utils.rnn.pad_sequence(words, batch_first=True)
    return {"words": words, "lengths": lengths, "y": torch.stack([row["y"] for row in rows])}


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(V, 8, padding_idx=0), nn.Linear(8, 3)

    def forward(self, words, lengths):
        mask = torch.arange(words.shape[1]) < lengths[:, None]
        summed = (self.table(words) * mask[:, :, None]).sum(1)
        return self.head(summed / lengths[:, None])


def test_words_that_are_padded_by_the_batch():
    def loop(model, b):
        return F.cross_entropy(model(b["words"], lengths=b["lengths"]), b["y"])

    train(randomise(Pooled()), loop, Items(), collate=padded, steps=4)


def test_shapes_are_read_in_batches_of_one_size():
    """Nothing tells what a number means where all batches have one size: it stays a guess."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 20)), torch.randint(20, (16, 5))
    _, optimizer, loader = dpt.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, x.flip(1)), batch_size=8),
        plan=plan(num_examples=16, expected_batch_size=8, num_steps=12, sampler="shuffle"),
        checks=1.0,
    )
    for ids, targets in loader.remaining():
        each = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="none")
        each.view(targets.shape).mean(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
