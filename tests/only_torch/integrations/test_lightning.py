# SPDX-License-Identifier: Apache-2.0
"""Lightning's own programs, made private by one callback."""

import stat
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dualdp

L = pytest.importorskip("lightning")

import dualdp.torch as dpt  # noqa: E402
from dualdp.randomness import RootKey  # noqa: E402
from dualdp_torch.integrations.lightning import PrivacyCallback, refuse  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]
ROWS, STEPS = 48, 6


class LitAutoEncoder(L.LightningModule):
    """The first program of Lightning's documentation, smaller."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(16, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x)
        x_hat = self.decoder(z)
        loss = nn.functional.mse_loss(x_hat, x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class LitClassifier(L.LightningModule):
    """One module inside, called by `forward`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class LitSum(LitAutoEncoder):
    """A sum where a mean was declared, in a step that calls two modules."""

    def training_step(self, batch, batch_idx):
        x = batch[0].flatten(1)
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), x, reduction="sum")


class LitMixing(LitClassifier):
    """A criterion that compares the examples, in a step that calls one module."""

    def training_step(self, batch, batch_idx):
        out = self(batch[0])
        return (out - out.detach().mean(0)).square().mean()


class LitTested(LitAutoEncoder):
    def test_step(self, batch, batch_idx):
        self.log("test_loss", LitAutoEncoder.training_step(self, batch, batch_idx))


class LitOwnLayers(LitClassifier):
    """Layers of its own, as the tutorials write them."""

    def __init__(self):
        super().__init__()
        del self.model
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x.flatten(1))))


def data(shuffle=True):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 4, 4, generator=generator)
    dataset = torch.utils.data.TensorDataset(x, (x.sum((1, 2)) > 0).long())
    return torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=shuffle)


def plan(**changes):
    sizes = {"num_examples": ROWS, "expected_batch_size": 8, "num_steps": STEPS, "delta": 1e-4}
    return dualdp.PrivacyPlan(**{**sizes, "noise_multiplier": 1.0, "max_grad_norm": 1.0, **changes})


def trainer(folder, *callbacks, **options):
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **options}
    return L.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **options,
    )


def by_hand(lit, **changes):
    """The same run with the engine alone."""
    module = nn.Sequential(lit.encoder, lit.decoder) if hasattr(lit, "encoder") else lit
    found = lit.configure_optimizers()
    optimizer = found[0][0] if isinstance(found, tuple) else found
    engine = dpt.PrivacyEngine()
    _, _, loader = engine.make_private(
        module=module, optimizer=optimizer, data_loader=data(), plan=plan(seed=3, **changes)
    )
    torch.manual_seed(5)
    for x, y in loader:
        step = engine.ledger.position
        optimizer.zero_grad()
        if hasattr(lit, "encoder"):
            loss = nn.functional.mse_loss(module(x.flatten(1)), x.flatten(1))
        else:
            loss = nn.functional.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
        if isinstance(found, tuple) and engine.ledger.position > step:
            found[1][0]["scheduler"].step()
    engine.detach()
    return lit.state_dict()


def same(a, b):
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("physical", [None, 5])
@pytest.mark.parametrize("kind", [LitAutoEncoder, LitClassifier, LitOwnLayers])
def test_lightning_trains_as_the_engine_alone(kind, physical, tmp_path):
    callback = PrivacyCallback(plan=plan(seed=3, physical_batch_size=physical))
    fit = trainer(tmp_path, callback)
    lit = kind()
    torch.manual_seed(5)
    fit.fit(lit, data())
    assert same(lit.state_dict(), by_hand(kind(), physical_batch_size=physical))
    assert len(callback.engine.ledger) == fit.global_step == STEPS
    assert float(fit.logged_metrics["epsilon"]) == pytest.approx(plan().epsilon(), rel=1e-6)
    assert "training_step" not in vars(lit)
    assert not lit._forward_hooks
    assert fit.accumulate_grad_batches == 1


def test_a_second_fit_is_not_forgotten(tmp_path):
    callback = PrivacyCallback(noise_multiplier=1.0, max_grad_norm=1.0)
    lit = LitClassifier()
    trainer(tmp_path, callback).fit(lit, data())
    with pytest.raises(
        dualdp.AccountingError, match="This callback has trained a run of .* already"
    ):
        trainer(tmp_path, callback).fit(lit, data())


def test_lightning_accumulates_and_calibrates(tmp_path):
    callback = PrivacyCallback(max_grad_norm=1.0, target_epsilon=3.0, target_delta=1e-4)
    lengths = []

    class Watch(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
            lengths.append((done, trainer.num_training_batches))

    fit = trainer(tmp_path, Watch(), callback, max_epochs=3, accumulate_grad_batches=2)
    fit.fit(LitAutoEncoder(), data())
    made = callback.engine.plan
    assert (made.num_steps, made.expected_batch_size_at(0)) == (3 * 3, 16)
    assert made.physical_batch_size == 8
    assert callback.engine.get_epsilon() <= 3.0
    assert all(done == length for done, length in lengths)
    assert len(lengths) == 3
    assert sum(done for done, _ in lengths) > 9
    assert fit.global_step == 9
    assert fit.accumulate_grad_batches == 2
    notes = [n for n in dualdp.Ledger.read(callback.engine.ledger.to_json()) if "unprotected" in n]
    assert notes[0]["unprotected"] == ["train_loss"]


def test_only_the_real_step_is_logged(tmp_path):
    class Counts(LitAutoEncoder):
        calls = 0

        def log(self, name, *args, **kwargs):
            self.calls += name == "train_loss"
            super().log(name, *args, **kwargs)

    lit = Counts()
    trainer(tmp_path, PrivacyCallback(plan=plan())).fit(lit, data())
    assert lit.calls == STEPS


@pytest.mark.parametrize("physical", [None, 5])
@pytest.mark.parametrize("seed", [3, None])
def test_lightning_resumes(seed, physical, tmp_path):
    whole = plan(seed=seed, physical_batch_size=physical)
    save = L.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    first = PrivacyCallback(plan=whole)
    lit = LitAutoEncoder()
    torch.manual_seed(5)
    whole_fit = trainer(tmp_path, first, save, enable_checkpointing=True)
    whole_fit.fit(lit, data())

    again, callback = LitAutoEncoder(), PrivacyCallback()
    (saved,) = tmp_path.glob("*step=4.ckpt")
    fit = trainer(tmp_path, callback)
    fit.fit(again, data(), ckpt_path=str(saved))
    assert same(lit.state_dict(), again.state_dict())
    assert fit.global_step == STEPS
    assert fit.num_training_batches == whole_fit.num_training_batches, "the bar is of the whole"
    assert len(callback.engine.ledger) == STEPS, "the same release twice costs nothing"
    assert callback.engine.get_epsilon() == pytest.approx(plan().epsilon())
    keys = list(tmp_path.glob("*.key"))
    assert len(keys) == (seed is None)
    assert all(stat.S_IMODE(key.stat().st_mode) == 0o600 for key in keys)
    for secret in (RootKey.load(key).secret for key in keys):
        assert not any(x in saved.read_bytes() for x in (secret, secret.hex().encode()))


def test_lightning_resumes_inside_its_second_pass(tmp_path):
    given = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "max_physical_batch_size": 5}
    save = L.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    lit, lengths = LitAutoEncoder(), []

    class Watch(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            lengths.append(trainer.num_training_batches)

    callbacks = PrivacyCallback(**given), save, Watch()
    torch.manual_seed(5)
    trainer(tmp_path, *callbacks, max_epochs=3, enable_checkpointing=True).fit(lit, data())

    again, callback = LitAutoEncoder(), PrivacyCallback()
    (saved,) = tmp_path.glob("*step=8.ckpt")
    fit = trainer(tmp_path, callback, Watch(), max_epochs=3)
    fit.fit(again, data(), ckpt_path=str(saved))
    assert same(lit.state_dict(), again.state_dict())
    assert len(callback.engine.ledger) == fit.global_step == 3 * STEPS
    assert lengths[3:] == lengths[1:3]


def test_a_changed_resume_is_accounted(tmp_path):
    save = L.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    trainer(tmp_path, PrivacyCallback(plan=plan(seed=3)), save, enable_checkpointing=True).fit(
        LitClassifier(), data()
    )
    (saved,) = tmp_path.glob("*step=4.ckpt")
    changed, callback = LitClassifier(), PrivacyCallback()
    forward = changed.forward
    changed.forward = lambda x: 2 * forward(x)
    trainer(tmp_path, callback).fit(changed, data(), ckpt_path=str(saved))
    assert len(callback.engine.ledger) == STEPS + 2, "steps 4 and 5 were released twice"
    assert callback.engine.get_epsilon() > plan().epsilon()


def test_a_spent_budget_ends_the_training(tmp_path):
    given = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "on_budget": "stop"}
    callback = PrivacyCallback(**given, target_epsilon=4.0, target_delta=1e-4)
    fit = trainer(tmp_path, callback, max_epochs=1000)
    fit.fit(LitClassifier(), data())
    ledger = callback.engine.ledger
    assert 6 < fit.global_step == len(ledger) == ledger.end < 100
    assert ledger.get_epsilon() <= 4.0


def test_what_lightning_would_do_to_gradients_is_refused(tmp_path):
    def refused(text, lit=None, **options):
        with pytest.raises(ValueError, match=text):
            trainer(tmp_path, PrivacyCallback(plan=plan()), **options).fit(
                lit or LitAutoEncoder(), data()
            )

    refused("gradient_clip_val=0.5 clips whole batches", gradient_clip_val=0.5)
    refused("overfit_batches=2", overfit_batches=2)
    limits = {"limit_train_batches": 3, "accumulate_grad_batches": 2}
    given = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    with pytest.raises(ValueError, match="limit_train_batches=3 would cut a logical batch"):
        trainer(tmp_path, PrivacyCallback(**given), **limits).fit(LitAutoEncoder(), data())
    whole = trainer(tmp_path, PrivacyCallback(**given), max_epochs=2, limit_train_batches=3)
    whole.fit(LitAutoEncoder(), data())
    assert whole.global_step == 6
    two = LitAutoEncoder()
    two.configure_optimizers = lambda: [torch.optim.SGD(two.parameters(), 0.1) for _ in "ab"]
    two.automatic_optimization = False
    refused("returned 2 optimizers", two)
    manual = LitAutoEncoder()
    manual.automatic_optimization = False
    refused("automatic_optimization is False", manual)
    endless = PrivacyCallback(max_grad_norm=1.0, target_epsilon=3.0, target_delta=1e-4)
    with pytest.raises(ValueError, match="target_epsilon came with a loop that has no end"):
        trainer(tmp_path, endless, max_epochs=-1).fit(LitAutoEncoder(), data())


def test_a_scaler_is_refused(tmp_path):
    fit = trainer(tmp_path)
    fit.strategy.optimizers = [torch.optim.SGD(LitAutoEncoder().parameters(), 0.1)]
    fit.strategy._precision_plugin = SimpleNamespace(precision="16-mixed")
    with pytest.raises(ValueError, match="precision='16-mixed' scales the loss"):
        refuse(fit, LitAutoEncoder())


def test_a_checkpoint_of_a_public_run_is_refused(tmp_path):
    fit = trainer(tmp_path)
    fit.fit(LitTested(), data())
    fit.save_checkpoint(tmp_path / "public.ckpt")
    tests = trainer(tmp_path, PrivacyCallback(plan=plan()))
    tests.test(LitTested(), data(False), ckpt_path=str(tmp_path / "public.ckpt"), verbose=False)
    with pytest.raises(ValueError, match="saved without a PrivacyCallback"):
        trainer(tmp_path, PrivacyCallback(plan=plan())).fit(
            LitAutoEncoder(), data(), ckpt_path=str(tmp_path / "public.ckpt")
        )


def test_a_checkpoint_of_a_finished_run_goes_on(tmp_path):
    given = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
    callback = PrivacyCallback(**given)
    fit = trainer(tmp_path, callback)
    fit.fit(LitTested(), data())
    fit.save_checkpoint(tmp_path / "final.ckpt")
    other = trainer(tmp_path, callback, max_epochs=2)
    other.test(LitTested(), data(False), ckpt_path=str(tmp_path / "final.ckpt"), verbose=False)
    assert callback.engine.ledger.position == STEPS, "a test spends nothing"
    again = PrivacyCallback()
    more = trainer(tmp_path, again, max_epochs=2)
    more.fit(LitTested(), data(), ckpt_path=str(tmp_path / "final.ckpt"))
    assert len(again.engine.ledger) == 2 * STEPS


def test_modules_without_rules_need_one_call(tmp_path):
    class Scattered(nn.Linear):
        def forward(self, x):
            n, d = x.shape
            return super().forward(x.t().reshape(n, d, 1)).reshape(d, n).t()

    lit = LitAutoEncoder()
    lit.encoder.append(Scattered(1, 1))
    with pytest.raises(dualdp.UnsupportedLayerError, match="Put them into one module"):
        trainer(tmp_path, PrivacyCallback(plan=plan())).fit(lit, data())
    ghost = PrivacyCallback(plan=plan(), grad_sample_mode="ghost")
    with pytest.raises(ValueError, match="grad_sample_mode='ghost' with a training_step that"):
        trainer(tmp_path, ghost).fit(LitAutoEncoder(), data())


def test_a_callback_that_comes_late_is_refused():
    with pytest.raises(RuntimeError, match="was added during training"):
        PrivacyCallback(plan=plan()).on_after_backward(None, None)


@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        (LitSum, dualdp.ExactnessError, "A spot check failed"),
        (LitMixing, ValueError, "The loss mixes the examples"),
    ],
)
def test_steps_of_lightning_are_checked(kind, error, match, tmp_path):
    callback = PrivacyCallback(plan=plan(), loss_reduction="mean")
    with pytest.raises(error, match=match):
        trainer(tmp_path, callback).fit(kind(), data())
    assert len(callback.engine.ledger) == 0
    callback = PrivacyCallback(plan=plan(), checks=0)
    trainer(tmp_path, callback).fit(kind(), data())  # nobody looks
    assert '"checks": 0' in callback.engine.ledger.to_json().replace("0.0", "0")


@pytest.mark.parametrize("kind", [LitAutoEncoder, LitClassifier, LitOwnLayers])
def test_every_step_of_lightning_may_be_checked(kind, tmp_path):
    ends = []
    for checks in (0.0, 1.0):
        torch.manual_seed(5)
        callback = PrivacyCallback(plan=plan(seed=3), checks=checks)
        lit = kind()
        trainer(tmp_path / str(checks), callback).fit(lit, data())
        ends.append(lit.state_dict())
    assert callback.engine.ledger.last_check == STEPS - 1
    assert same(*ends)
