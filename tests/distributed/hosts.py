# SPDX-License-Identifier: Apache-2.0
"""Program of the host tests: Lightning's and Hugging Face's own launchers start it."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dualdp

ROWS, STEPS, SIZE = 48, 6, 8
PLAN = dualdp.PrivacyPlan(
    num_examples=ROWS,
    expected_batch_size=SIZE,
    num_steps=STEPS,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    delta=1e-4,
    seed=3,
)
#: Name -> arguments of the callback: one pass by a plan, and passes by the host's own numbers.
RUNS = {
    "plan": {"plan": PLAN},
    "own": {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "target_delta": 1e-4, "seed": 3},
}


def ended(model, engine):
    """What a process knows at the end."""
    ledger = engine.ledger
    found = {name: p.detach().clone() for name, p in model.state_dict().items()}
    made = engine.plan
    sizes = made.num_steps, made.expected_batch_size_at(0), made.physical_batch_size
    return found, engine.get_epsilon(1e-4), ledger.to_json(), sizes


def lightning(folder, name, processes):
    """A run of Lightning's `Trainer`; the loader's batch size is that of one process."""
    import lightning as L

    from dualdp_torch.lightning import PrivacyCallback

    class Two(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.encoder, self.decoder = nn.Linear(16, 3), nn.Linear(3, 16)

        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.decoder(torch.tanh(self.encoder(batch[0]))), batch[0])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
            steps = self.trainer.estimated_stepping_batches
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=int(steps))
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    rows = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(rows), batch_size=SIZE // 2 // processes, shuffle=True)
    callback, model = PrivacyCallback(**RUNS[name]), Two()
    save = L.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=8, save_top_k=-1)

    def trainer(*callbacks):
        return L.Trainer(
            accelerator="cpu",
            devices=processes,
            strategy="ddp" if processes > 1 else "auto",
            default_root_dir=folder,
            callbacks=list(callbacks),
            max_epochs=1 if name == "plan" else 2,
            accumulate_grad_batches=2,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    trainer(callback, save).fit(model, data)
    found = {"whole": ended(model, callback.engine)}
    if name == "plan":
        return found
    (saved,) = Path(folder).glob("*step=8.ckpt")
    callback, model = PrivacyCallback(), Two()
    trainer(callback).fit(model, data, ckpt_path=str(saved))
    return found | {"resumed": ended(model, callback.engine)}


class Words(Dataset):
    """Token ids and a class."""

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        ids = torch.randint(30, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids[0] % 2}


def trainer(folder, name, processes):
    """A run of the Hugging Face `Trainer`."""
    import transformers

    from dualdp_torch.trainer import PrivacyCallback

    def hosted():
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=30,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return transformers.Trainer(
            transformers.BertForSequenceClassification(config),
            transformers.TrainingArguments(
                folder,
                per_device_train_batch_size=SIZE // 2 // processes,
                gradient_accumulation_steps=2,
                num_train_epochs=2,
                save_strategy="steps",
                save_steps=8,
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=Words(),
        )

    first = hosted()
    callback = PrivacyCallback(**RUNS[name]).attach(first)
    first.train()
    found = {"whole": ended(first.model, callback.engine)}
    if name == "plan":
        return found
    second = hosted()
    callback = PrivacyCallback().attach(second)
    second.train(resume_from_checkpoint=f"{folder}/checkpoint-8")
    return found | {"resumed": ended(second.model, callback.engine)}


def runs(host, folder, processes):
    """Every run of a host, each in a folder of its own."""
    return {n: globals()[host](f"{folder}/{processes}-{n}", n, processes) for n in RUNS}


if __name__ == "__main__":
    host, folder = sys.argv[1:]
    torch.set_num_threads(1)
    kept = runs(host, folder, 2)
    torch.save(kept, f"{folder}/{torch.distributed.get_rank()}.pt")
