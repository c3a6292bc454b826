# SPDX-License-Identifier: Apache-2.0
r"""Settings of the literature, on your own copies of MNIST, CIFAR-10 and IMDb.

    python examples/literature.py mnist PATH     PATH/MNIST/raw, as torchvision leaves it
    python examples/literature.py cifar10 PATH   PATH/cifar-10-batches-py, as torchvision leaves it
    python examples/literature.py imdb PATH      PATH/aclImdb, unpacked

What the papers report, at delta = 1e-5:

- MNIST, 98.1 % at epsilon 3, and CIFAR-10, 59.2 % at epsilon 3: convolutional networks with tanh,
  trained end to end. Tramer & Boneh 2021 ("Differentially private learning needs better features").
  The accountant here bounds the same runs by 2.38 and 2.40.
- IMDb, 84 %: Bu, Dong, Long & Su 2020 ("Deep learning with Gaussian differential privacy"), whose
  epsilon comes from the central limit theorem, which is no bound; the accountant here gives 19.5.

The words of IMDb come from its file imdb.vocab, taken to be public.
"""

import gzip
import io
import pickle
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import dualdp.torch as dpt

TOY = "--toy" in sys.argv
DELTA = 1e-5
#        noise, C, expected batch size, learning rate, epochs, optimizer
SETTINGS = {
    "mnist": (1.23, 0.1, 512, 0.5, 40, "sgd"),
    "cifar10": (1.54, 0.1, 1024, 1.0, 30, "sgd"),
    "imdb": (0.56, 1.0, 512, 0.02, 25, "adam"),
}
WORDS, LENGTH = 10_000, 256


def read_idx(path):
    """An array of MNIST's format, packed or not."""
    packed = path.with_name(path.name + ".gz")
    data = path.read_bytes() if path.exists() else gzip.decompress(packed.read_bytes())
    sizes = np.frombuffer(data, ">i4", data[3], 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(sizes)


def mnist(folder):
    """Train and test: images (n, 1, 28, 28) in [-1, 1], labels (n,)."""
    for part in ("train", "t10k"):
        images = read_idx(folder / "MNIST/raw" / f"{part}-images-idx3-ubyte")
        labels = read_idx(folder / "MNIST/raw" / f"{part}-labels-idx1-ubyte")
        yield scaled(images[:, None]), torch.from_numpy(labels.astype(np.int64))


class ArraysOnly(pickle.Unpickler):
    """CIFAR-10 comes pickled; nothing but NumPy's arrays may be in it."""

    def find_class(self, module, name):
        """Refuse everything else."""
        if module.split(".")[0] != "numpy":
            raise ValueError(f"{module}.{name} in a file of CIFAR-10. Expected arrays only.")
        return super().find_class(module, name)


def cifar10(folder):
    """Train and test: images (n, 3, 32, 32) in [-1, 1], labels (n,)."""
    for names in ([f"data_batch_{i}" for i in range(1, 6)], ["test_batch"]):
        files = [(folder / "cifar-10-batches-py" / name).read_bytes() for name in names]
        parts = [ArraysOnly(io.BytesIO(file), encoding="latin1").load() for file in files]
        images = np.concatenate([np.asarray(part["data"]) for part in parts])
        labels = np.concatenate([part["labels"] for part in parts]).astype(np.int64)
        yield scaled(images.reshape(-1, 3, 32, 32)), torch.from_numpy(labels)


def scaled(images):
    """Bytes to [-1, 1], a range that is known without the data."""
    return torch.from_numpy(images.astype(np.float32)) / 127.5 - 1


def imdb(folder):
    """Train and test: word numbers (n, LENGTH), 0 is padding; labels (n,)."""
    words = (folder / "aclImdb/imdb.vocab").read_text("utf-8").split()[: WORDS - 2]
    number = {word: i for i, word in enumerate(words, 2)}
    for part in ("train", "test"):
        texts, labels = [], []
        for label, kind in enumerate(("neg", "pos")):
            for path in sorted((folder / "aclImdb" / part / kind).glob("*.txt")):
                found = re.findall(r"[a-z']+", path.read_text("utf-8").lower())[:LENGTH]
                texts.append([number.get(word, 1) for word in found])
                labels.append(label)
        ids = torch.zeros(len(texts), LENGTH, dtype=torch.int64)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        yield ids, torch.tensor(labels)


class MeanOfWords(nn.Module):
    """Embeddings, their mean, and two layers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, ids):
        """(n, t) -> (n, 2) logits."""
        return self.head(self.embedding(ids).mean(1))


def model_for(task):
    """The network of the paper."""
    if task == "imdb":
        return MeanOfWords()
    if task == "mnist":
        return nn.Sequential(
            *(nn.Conv2d(1, 16, 8, 2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1)),
            *(nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1)),
            *(nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)),
        )
    layers, channels = [], 3
    for width in (32, 64, 128):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.Tanh()]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
        channels = width
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(128 * 16, 128), nn.Tanh(), nn.Linear(128, 10)
    )


def toy_folder():
    """A folder of MNIST's format with noise in it, to show that all of this runs."""
    folder, rng = Path(tempfile.mkdtemp()), np.random.default_rng(0)
    (folder / "MNIST/raw").mkdir(parents=True)
    for part, n in (("train", 1024), ("t10k", 64)):
        for kind, sizes in (("images-idx3", (n, 28, 28)), ("labels-idx1", (n,))):
            head = bytes([0, 0, 8, len(sizes)]) + np.array(sizes, ">i4").tobytes()
            values = rng.integers(10, size=sizes, dtype=np.uint8).tobytes()
            (folder / "MNIST/raw" / f"{part}-{kind}-ubyte").write_bytes(head + values)
    return folder


def main():
    task, folder = ("mnist", toy_folder()) if TOY else (sys.argv[1], Path(sys.argv[2]))
    (inputs, labels), (test_inputs, test_labels) = globals()[task](folder)
    noise, bound, size, rate, epochs, kind = SETTINGS[task]
    epochs = 1 if TOY else epochs

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model_for(task).to(device)
    optimizer = (
        torch.optim.Adam(model.parameters(), lr=rate)
        if kind == "adam"
        else torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    )
    engine = dpt.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(inputs, labels), batch_size=size
        ),
        noise_multiplier=noise,
        max_grad_norm=bound,
    )
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        with torch.no_grad():
            rows = test_inputs.to(device).split(1000)
            accuracy = (torch.cat([model(x).argmax(1) for x in rows]).cpu() == test_labels).float()
        epsilon = engine.get_epsilon(delta=DELTA)
        print(f"epoch {epoch + 1}: accuracy {accuracy.mean():.1%} at epsilon {epsilon:.2f}")


if __name__ == "__main__":
    main()
