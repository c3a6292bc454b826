# SPDX-License-Identifier: Apache-2.0
"""Program of the host tests: Lightning's and Hugging Face's own launchers start it."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

ROWS, SIZE = 48, 8
GIVEN = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "target_delta": 1e-4, "seed": 3}


def ended(model, engine):
    """What a process knows at the end."""
    plan = engine.plan
    found = {name: p.detach().clone() for name, p in model.state_dict().items()}
    sizes = plan.num_steps, plan.expected_batch_size_at(0), plan.physical_batch_size
    return found, engine.get_epsilon(1e-4), len(engine.ledger), sizes


def lightning(folder, processes):
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
            steps = int(self.trainer.estimated_stepping_batches)
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    rows = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(rows), batch_size=SIZE // 2 // processes, shuffle=True)
    options = {"accelerator": "cpu", "devices": processes, "default_root_dir": folder}
    options |= {"strategy": "ddp" if processes > 1 else "auto", "logger": False}
    options |= {"max_epochs": 2, "accumulate_grad_batches": 2}

    def fit(callback, *others, **words):
        model = Two()
        quiet = {"enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(callbacks=[callback, *others], **quiet, **options)
        trainer.fit(model, data, **words)
        return ended(model, callback.engine)

    save = L.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=8, save_top_k=-1)
    whole = fit(PrivacyCallback(**GIVEN), save)
    (saved,) = Path(folder).glob("*step=8.ckpt")
    return whole, fit(PrivacyCallback(), ckpt_path=str(saved))


class Words(Dataset):
    """Token ids and a class."""

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        ids = torch.randint(30, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids[0] % 2}


def trainer(folder, processes):
    """A run of the Hugging Face `Trainer`."""
    import transformers

    from dualdp_torch.trainer import PrivacyCallback

    sizes = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 8, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0}
    options = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 8}
    options |= {"per_device_train_batch_size": SIZE // 2 // processes, "report_to": "none"}
    options |= {"gradient_accumulation_steps": 2, "use_cpu": True, "disable_tqdm": True}

    def train(callback, **words):
        torch.manual_seed(0)
        config = transformers.BertConfig(**sizes, attention_probs_dropout_prob=0.0)
        model = transformers.BertForSequenceClassification(config)
        arguments = transformers.TrainingArguments(folder, **options)
        hosted = transformers.Trainer(model, arguments, train_dataset=Words())
        callback.attach(hosted)
        hosted.train(**words)
        return ended(model, callback.engine)

    whole = train(PrivacyCallback(**GIVEN))
    return whole, train(PrivacyCallback(), resume_from_checkpoint=f"{folder}/checkpoint-8")


def runs(host, folder, processes):
    """What a run and one that was resumed after 8 of its 12 steps ended with."""
    return {"lightning": lightning, "trainer": trainer}[host](f"{folder}/{processes}", processes)


if __name__ == "__main__":
    host, folder = sys.argv[1:]
    torch.set_num_threads(1)
    kept = runs(host, folder, 2)
    torch.save(kept, f"{folder}/{torch.distributed.get_rank()}.pt")
