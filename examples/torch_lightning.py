# SPDX-License-Identifier: Apache-2.0
"""Lightning: the module stays as it is, a callback makes `fit` private."""

import logging
import sys
import tempfile
import warnings

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn

from dualdp_torch.lightning import PrivacyCallback

EPOCHS = 1 if "--toy" in sys.argv else 20
TARGET_EPSILON, TARGET_DELTA = 8.0, 1e-4
BATCH_SIZE, ACCUMULATE, MAX_GRAD_NORM, LEARNING_RATE = 64, 2, 1.0, 0.01


class LitDigits(L.LightningModule):
    """A small classifier."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        """The mean loss of a batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def validation_step(self, batch, batch_idx):
        """The accuracy on held-out images."""
        images, labels = batch
        self.log("accuracy", (self.model(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        """Any one optimizer."""
        return torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)


def main():
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    data = torch.utils.data.TensorDataset((images / 16).float(), labels)
    train, test = torch.utils.data.random_split(
        data, [1500, len(data) - 1500], torch.Generator().manual_seed(0)
    )
    privacy = PrivacyCallback(
        max_grad_norm=MAX_GRAD_NORM, target_epsilon=TARGET_EPSILON, target_delta=TARGET_DELTA
    )
    trainer = L.Trainer(
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATE,  # a logical batch of 128, in physical ones of 64
        accelerator="cpu",
        callbacks=[privacy],
        default_root_dir=tempfile.mkdtemp(),
        enable_progress_bar=sys.stdout.isatty(),
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(
        LitDigits(),
        torch.utils.data.DataLoader(train, batch_size=BATCH_SIZE, shuffle=True),
        torch.utils.data.DataLoader(test, batch_size=len(test)),
    )
    accuracy, epsilon = trainer.callback_metrics["accuracy"], privacy.engine.get_epsilon()
    print(f"{len(privacy.engine.ledger)} releases in {trainer.global_step} steps of Lightning's")
    print(f"accuracy {accuracy:.1%} at epsilon {epsilon:.2f}, delta {TARGET_DELTA}")


if __name__ == "__main__":
    main()
