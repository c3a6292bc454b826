# SPDX-License-Identifier: Apache-2.0
"""Lightning's own programs, made private by one callback."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dualdp

L = pytest.importorskip("lightning")

import dualdp.torch as dpt  # noqa: E402
from dualdp_torch.integrations.lightning import PrivacyCallback, refuse  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]
ROWS, STEPS = 48, 6
WINDOW = {"correlation": dualdp.correlated.window([1.0, -0.5, 0.2]), "sampler": "fixed_order"}
SAVING = {"enable_checkpointing": True}


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


def test_lightning_trains_with_correlated_noise(tmp_path):
    """And resumes from a checkpoint of Lightning's that holds nothing of it."""
    save = L.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    fit = trainer(tmp_path, PrivacyCallback(plan=plan(seed=3, **WINDOW)), save, **SAVING)
    lit = LitClassifier()
    fit.fit(lit, data())
    assert same(lit.state_dict(), by_hand(LitClassifier(), **WINDOW))
    again, callback = LitClassifier(), PrivacyCallback()
    (saved,) = tmp_path.glob("*step=4.ckpt")
    trainer(tmp_path, callback).fit(again, data(), ckpt_path=str(saved))
    assert not same(lit.state_dict(), again.state_dict()), "the noise began anew"
    assert len(callback.engine.ledger) == STEPS + 2
    assert callback.engine.get_epsilon() > plan(**WINDOW).epsilon()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", [LitAutoEncoder, LitClassifier])
def test_a_compiled_module_trains_as_the_engine_alone(kind, tmp_path):
    """`fit(torch.compile(module))`, as Lightning's documentation writes it."""
    lit = kind()
    torch.manual_seed(5)
    fit = trainer(tmp_path, PrivacyCallback(plan=plan(seed=3)))
    fit.fit(torch.compile(lit, backend="eager"), data())
    assert same(lit.state_dict(), by_hand(kind()))


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
    lines = dualdp.Ledger.read(callback.engine.ledger.to_json())
    assert {"unprotected": ["train_loss"]} in [line.get("note") for line in lines]


def test_only_the_real_step_is_logged(tmp_path):
    class Counts(LitAutoEncoder):
        calls = 0

        def log(self, name, *args, **kwargs):
            self.calls += name == "train_loss"
            super().log(name, *args, **kwargs)

    lit = Counts()
    trainer(tmp_path, PrivacyCallback(plan=plan())).fit(lit, data())
    assert lit.calls == STEPS


@pytest.mark.slow
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
    assert same(lit.state_dict(), again.state_dict()) == (seed is not None)
    assert fit.global_step == STEPS
    if seed is not None:
        assert fit.num_training_batches == whole_fit.num_training_batches, "that of the whole"
    assert len(callback.engine.ledger) == STEPS + 2, "steps 4 and 5 were released twice"
    assert callback.engine.get_epsilon() > plan().epsilon()


@pytest.mark.slow
def test_lightning_resumes_inside_its_second_pass(tmp_path):
    given = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "max_physical_batch_size": 5}
    given["seed"] = 3
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
    assert fit.global_step == 3 * STEPS
    assert len(callback.engine.ledger) == 3 * STEPS + 10
    assert lengths[3:] == lengths[1:3]


def test_steps_that_run_again_are_accounted_or_fit_the_target(tmp_path):
    save = L.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    given = {"max_grad_norm": 1.0, "target_epsilon": 8.0, "target_delta": 1e-4}

    class Stops(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step == 5

    callbacks = PrivacyCallback(**given), save, Stops()
    trainer(tmp_path, *callbacks, enable_checkpointing=True).fit(LitClassifier(), data())
    (saved,) = tmp_path.glob("*step=4.ckpt")
    callback = PrivacyCallback(recalibrate=True)
    trainer(tmp_path, callback).fit(LitClassifier(), data(), ckpt_path=str(saved))
    assert len(callback.engine.ledger) == STEPS + 1, "step 4 was released twice"
    assert 7.5 < callback.engine.get_epsilon() <= 8.0


@pytest.mark.parametrize(
    "other",
    [{"max_grad_norm": 0.5}, {"target_epsilon": 1.0}, {"plan": plan(clipping="per_layer")}],
)
def test_a_resumed_callback_may_not_ask_for_another_run(tmp_path, other):
    given = {"max_grad_norm": 1.0, "target_epsilon": 8.0, "target_delta": 1e-4}
    save = L.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    trainer(tmp_path, PrivacyCallback(**given), save, enable_checkpointing=True).fit(
        LitClassifier(), data()
    )
    (saved,) = tmp_path.glob("*step=4.ckpt")
    changed = other if "plan" in other else given | other
    with pytest.raises(ValueError, match="run from a checkpoint, which goes on by its own plan"):
        trainer(tmp_path, PrivacyCallback(**changed)).fit(
            LitClassifier(), data(), ckpt_path=str(saved)
        )
    again = PrivacyCallback(**given)
    with pytest.raises(dualdp.AccountingError, match="would exceed target_epsilon=8.0"):
        trainer(tmp_path, again, max_epochs=2).fit(LitClassifier(), data(), ckpt_path=str(saved))
    assert again.engine.plan.target_epsilon == 8.0


def test_a_spent_budget_ends_the_training(tmp_path):
    given = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "on_budget": "stop"}
    callback = PrivacyCallback(**given, target_epsilon=4.0, target_delta=1e-4)
    fit = trainer(tmp_path, callback, max_epochs=1000)
    fit.fit(LitClassifier(), data())
    ledger = callback.engine.ledger
    assert 6 < fit.global_step == len(ledger) == ledger.end < 100
    assert ledger.get_epsilon() <= 4.0


class LitCentred(LitAutoEncoder):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x - x.mean(0), y


class LitCentredInPlace(LitAutoEncoder):
    def on_train_batch_start(self, batch, batch_idx):
        batch[0].sub_(batch[0].mean(0))


class LitCentredByNumPy(LitAutoEncoder):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        array = batch[0].numpy()
        array -= array.mean(0)
        return batch


class LitCentredData(LitAutoEncoder):
    def on_train_batch_start(self, batch, batch_idx):
        batch[0].data = batch[0] - batch[0].mean(0)


@pytest.mark.parametrize("lit", [LitCentred, LitCentredInPlace, LitCentredByNumPy, LitCentredData])
def test_batches_changed_before_a_step_of_several_modules_are_refused(tmp_path, lit):
    """Nobody sees there whether examples were mixed; 4.9 C by one example in a run."""
    callback = PrivacyCallback(plan=plan())
    with pytest.raises(ValueError, match="not one of the loader's batch, or was changed since"):
        trainer(tmp_path, callback).fit(lit(), data())
    assert len(callback.engine.ledger) == 0


class LitStandardised(LitAutoEncoder):
    """A statistic of the batch reaches the step of several modules beside its arguments."""

    def on_train_batch_start(self, batch, batch_idx):
        self.mean = batch[0].mean(0)

    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0] - self.mean, batch[1]), batch_idx)


def test_statistics_that_a_hook_keeps_are_refused(tmp_path):
    callback = PrivacyCallback(plan=plan())
    with pytest.raises(ValueError, match="when the other rows are replaced or left out"):
        trainer(tmp_path, callback).fit(LitStandardised(), data())
    assert len(callback.engine.ledger) == 0


class LitDiffusion(LitAutoEncoder):
    """Every row has a time of its own."""

    def training_step(self, batch, batch_idx):
        x = batch[0].flatten(1)
        times = torch.randint(1, 10, (len(x), 1))
        noisy = x + times / 10 * torch.randn_like(x)
        return nn.functional.mse_loss(self.decoder(self.encoder(noisy)), x)


@pytest.mark.parametrize(
    ("lit", "precision"), [(LitOwnLayers, "bf16-mixed"), (LitDiffusion, "32-true")]
)
def test_steps_of_several_modules_pass_their_checks(tmp_path, lit, precision):
    """In the autocast that Lightning has around the step; draws that can't be repeated apart."""
    callback = PrivacyCallback(plan=plan(), checks=1.0)
    trainer(tmp_path, callback, precision=precision).fit(lit(), data())
    assert len(callback.engine.ledger) == STEPS


def test_what_lightning_would_do_to_gradients_is_refused(tmp_path):
    def refused(text, lit=None, module=None, other=None, **options):
        callbacks = [PrivacyCallback(plan=plan(), module=module), other][: 1 + (other is not None)]
        with pytest.raises(ValueError, match=text):
            trainer(tmp_path, *callbacks, **options).fit(lit or LitAutoEncoder(), data())

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
    refused("2 optimizers hold parameters of module='encoder'", two, module="encoder")
    refused("module='critic' is no submodule of LitAutoEncoder", two, module="critic")
    manual = LitAutoEncoder()
    manual.automatic_optimization = False
    refused("training_step optimizes manually and calls several modules", manual)
    refused("LearningRateFinder trains on batches", other=L.pytorch.callbacks.LearningRateFinder())
    steps = L.pytorch.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})
    refused("GradientAccumulationScheduler changes the size", other=steps)
    endless = PrivacyCallback(max_grad_norm=1.0, target_epsilon=3.0, target_delta=1e-4)
    with pytest.raises(ValueError, match="target_epsilon came with a loop that has no end"):
        trainer(tmp_path, endless, max_epochs=-1).fit(LitAutoEncoder(), data())


def test_scalers_and_other_strategies_are_refused(tmp_path):
    def refused(text, name, value):
        fit = trainer(tmp_path)
        setattr(fit.strategy, name, value)
        with pytest.raises(ValueError, match=text):
            refuse(fit, LitAutoEncoder())

    scaler = SimpleNamespace(precision="16-mixed")
    refused("precision='16-mixed' scales the loss", "_precision_plugin", scaler)
    refused("starts processes that end with fit", "_start_method", "spawn")
    refused("lets each process train by itself", "_model_averaging_period", 2)
    fit = trainer(tmp_path)
    type(fit.strategy).__name__, name = "FSDPStrategy", type(fit.strategy).__name__
    try:
        with pytest.raises(ValueError, match="strategy FSDPStrategy is not known here"):
            refuse(fit, LitAutoEncoder())
    finally:
        type(fit.strategy).__name__ = name


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
        trainer(tmp_path, PrivacyCallback(plan=plan(seed=3))).fit(lit, data())
    ghost = PrivacyCallback(plan=plan(), grad_sample_mode="ghost")
    with pytest.raises(ValueError, match="grad_sample_mode='ghost' with a training_step that"):
        trainer(tmp_path, ghost).fit(LitAutoEncoder(), data())


def test_a_callback_that_comes_late_is_refused():
    with pytest.raises(RuntimeError, match="was added during training"):
        PrivacyCallback(plan=plan()).on_after_backward(None, None)


@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        (LitSum, dualdp.ExactnessError, "taken for a mean over the batch. If it is not, declare"),
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
    assert '"checks":0' in callback.engine.ledger.to_json().replace("0.0", "0")


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


def one_cycle(lit, total_steps):
    optimizer = torch.optim.SGD(lit.parameters(), lr=0.1)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=total_steps)
    return [optimizer], [{"scheduler": cycle, "interval": "step"}]


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("limit", [1.0, 4])
def test_estimated_steps_are_those_that_are_taken(limit, times, tmp_path):
    """known_failures 87: OneCycleLR as Lightning's documentation writes it."""

    class Cycle(LitClassifier):
        def configure_optimizers(self):
            self.estimated = self.trainer.estimated_stepping_batches
            self.times = self.trainer.accumulate_grad_batches
            return one_cycle(self, int(self.estimated))

    given = {"max_grad_norm": 1.0, "target_epsilon": 3.0, "target_delta": 1e-4, "seed": 3}
    callback = PrivacyCallback(**given)
    options = {"max_epochs": 2, "accumulate_grad_batches": times, "limit_train_batches": limit}
    fit, lit = trainer(tmp_path, callback, **options), Cycle()
    if limit == 4 and times == 2:  # would cut a logical batch
        with pytest.raises(ValueError, match="limit_train_batches=4 would cut"):
            fit.fit(lit, data())
        return
    fit.fit(lit, data())
    steps = 2 * (4 if limit == 4 else STEPS // times)
    assert lit.estimated == fit.global_step == len(callback.engine.ledger) == steps
    assert lit.times == times
    assert callback.engine.plan.num_steps == steps, "noise for the steps that are taken"

    again = LitClassifier()
    (optimizer,), (cycle,) = one_cycle(again, steps)
    engine = dpt.PrivacyEngine()
    source = torch.utils.data.DataLoader(data().dataset, batch_size=8 * times)
    whole = {"module": again, "optimizer": optimizer, "data_loader": source}
    _, _, loader = engine.make_private_with_epsilon(
        **whole, **given, num_steps=steps, max_physical_batch_size=8 if times > 1 else None
    )
    while engine.ledger.position < steps:
        for x, y in loader:
            step = engine.ledger.position
            if step == steps:
                break
            optimizer.zero_grad()
            nn.functional.cross_entropy(again(x), y).backward()
            optimizer.step()
            if engine.ledger.position > step:
                cycle["scheduler"].step()
    assert same(lit.state_dict(), again.state_dict())


@pytest.mark.parametrize(
    ("size", "times", "drop_last", "steps"), [(10, 2, True, 4), (10, 2, False, 6), (64, 1, True, 2)]
)
def test_an_incomplete_batch_is_dropped_as_the_loader_says(size, times, drop_last, steps, tmp_path):
    given = {"max_grad_norm": 1.0, "target_epsilon": 3.0, "target_delta": 1e-4}
    callback, lit = PrivacyCallback(**given), LitClassifier()
    lit.configure_optimizers = lambda: one_cycle(lit, int(lit.trainer.estimated_stepping_batches))
    loader = torch.utils.data.DataLoader(data().dataset, batch_size=size, drop_last=drop_last)
    fit = trainer(tmp_path, callback, max_epochs=2, accumulate_grad_batches=times)
    fit.fit(lit, loader)
    made = callback.engine.plan
    assert fit.global_step == len(callback.engine.ledger) == made.num_steps == steps
    assert made.expected_batch_size_at(0) == min(size * times, ROWS)


class LitManual(LitClassifier):
    """Manual optimization, as Lightning's documentation writes it."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        opt.zero_grad()
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.manual_backward(loss)
        opt.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class LitTwo(LitManual):
    """A private classifier, and a public model with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.public = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        private, public = self.optimizers()
        self.toggle_optimizer(private)
        private.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self.model(batch[0]), batch[1]))
        private.step()
        self.untoggle_optimizer(private)
        self.toggle_optimizer(public)
        public.zero_grad()
        self.manual_backward(self.public(torch.ones(2, 3)).square().mean())
        public.step()
        self.untoggle_optimizer(public)

    def configure_optimizers(self):
        private = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        return [private, torch.optim.SGD(self.public.parameters(), lr=0.1)]


@pytest.mark.parametrize("physical", [None, 5])
@pytest.mark.parametrize("kind", [LitManual, LitTwo])
def test_manual_optimization_trains_as_the_engine_alone(kind, physical, tmp_path):
    callback = PrivacyCallback(
        plan=plan(seed=3, physical_batch_size=physical),
        module="model" if kind is LitTwo else None,
    )
    lit, twin = kind(), kind()
    torch.manual_seed(5)
    trainer(tmp_path, callback).fit(lit, data())
    alone = LitClassifier()
    alone.configure_optimizers = partial(LitManual.configure_optimizers, alone)
    by_hand(alone, physical_batch_size=physical)
    assert same(lit.model.state_dict(), alone.model.state_dict())
    assert len(callback.engine.ledger) == STEPS
    if kind is LitTwo:
        public, steps = (
            torch.optim.SGD(twin.public.parameters(), lr=0.1),
            lit.trainer.global_step // 2,
        )
        for _ in range(steps):
            public.zero_grad()
            twin.public(torch.ones(2, 3)).square().mean().backward()
            public.step()
        assert same(lit.public.state_dict(), twin.public.state_dict())
    assert not any(name in vars(lit) for name in ("toggle_optimizer", "untoggle_optimizer"))
    assert not any(p._post_accumulate_grad_hooks for p in lit.parameters())


def test_other_modules_get_no_gradient_of_an_example(tmp_path):
    """A head with an optimizer of its own would be trained on the examples without privacy."""

    class Head(LitTwo):
        def training_step(self, batch, batch_idx):
            private, public = self.optimizers()
            out = self.model(batch[0])
            private.zero_grad()
            loss = nn.functional.cross_entropy(out, batch[1])
            self.manual_backward(loss + self.public(torch.cat([out, out[:, :1]], 1)).mean())
            private.step()
            public.step()

    callback, lit = PrivacyCallback(plan=plan(), module="model"), Head()
    before = {name: p.clone() for name, p in lit.public.named_parameters()}
    with pytest.raises(dualdp.UnsupportedLayerError, match="A module of another optimizer got a"):
        trainer(tmp_path, callback).fit(lit, data())
    assert same(before, lit.public.state_dict())
    assert all(p.grad is None for p in lit.public.parameters())
    assert len(callback.engine.ledger) == 0


class LitGAN(LitManual):
    """Lightning's manual GAN; the generator's step is toggled, on a fixed number of images."""

    def __init__(self):
        super().__init__()
        self.generator, self.zs = nn.Linear(2, 16), torch.Generator().manual_seed(7)

    def noise(self, n):
        return torch.randn(n, 2, generator=self.zs)

    def training_step(self, batch, batch_idx):
        g_opt, d_opt = self.optimizers()
        criterion, x = nn.functional.cross_entropy, batch[0]
        real, fake = torch.ones(len(x)).long(), torch.zeros(len(x)).long()
        errors = criterion(self.model(x), real)
        errors = errors + criterion(self.model(self.generator(self.noise(len(x))).detach()), fake)
        d_opt.zero_grad()
        self.manual_backward(errors)
        d_opt.step()
        self.toggle_optimizer(g_opt)
        error = criterion(self.model(self.generator(self.noise(8))), torch.ones(8).long())
        g_opt.zero_grad()
        self.manual_backward(error)
        g_opt.step()
        self.untoggle_optimizer(g_opt)

    def configure_optimizers(self):
        g_opt = torch.optim.SGD(self.generator.parameters(), lr=0.1)
        return [g_opt, torch.optim.SGD(self.model.parameters(), lr=0.1)]


def test_a_gan_is_clipped_once_per_example(tmp_path):
    """Against autograd of each example's loss on its real and its fake image, by hand."""
    callback = PrivacyCallback(plan=plan(seed=3, noise_multiplier=1e-4), module="model")
    lit, twin = LitGAN(), LitGAN()
    trainer(tmp_path, callback).fit(lit, data())

    rows, made = data().dataset, plan(seed=3)
    d_params, criterion = list(twin.model.parameters()), nn.functional.cross_entropy
    g_opt = torch.optim.SGD(twin.generator.parameters(), lr=0.1)
    for step in range(STEPS):
        drawn = made.batch_indices(step)
        fakes = twin.generator(twin.noise(max(len(drawn), 1))).detach()
        total = [torch.zeros_like(p) for p in d_params]
        for i, fake in zip(drawn, fakes, strict=False):
            loss = criterion(twin.model(rows[i][0][None]), torch.tensor([1]))
            loss = loss + criterion(twin.model(fake[None]), torch.tensor([0]))
            grads = torch.autograd.grad(loss, d_params)
            norm = torch.cat([g.flatten() for g in grads]).norm() * (1 + 1e-4)
            total = [t + g * (1 / norm).clamp(max=1) for t, g in zip(total, grads, strict=True)]
        with torch.no_grad():
            for p, t in zip(d_params, total, strict=True):
                p -= 0.1 * t / 8
        g_opt.zero_grad()
        criterion(twin.model(twin.generator(twin.noise(8))), torch.ones(8).long()).backward()
        g_opt.step()
    for name, p in twin.state_dict().items():
        torch.testing.assert_close(lit.state_dict()[name], p, rtol=1e-4, atol=1e-5)


def test_training_may_stop_within_a_logical_batch(tmp_path):
    """A half batch is not released, and a checkpoint of that moment is not one to resume."""

    class Stop(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            progress = trainer.fit_loop.epoch_loop.batch_progress
            trainer.should_stop = progress.current.ready == 4

    callback = PrivacyCallback(plan=plan(seed=3, physical_batch_size=3))
    fit, lit = trainer(tmp_path, callback, Stop()), LitClassifier()
    fit.fit(lit, data())
    assert len(callback.engine.ledger) == fit.global_step < STEPS
    assert not lit.model._forward_hooks
    fit.save_checkpoint(tmp_path / "half.ckpt")
    with pytest.raises(ValueError, match="or within a logical batch, so what it spent is unknown"):
        trainer(tmp_path, PrivacyCallback()).fit(
            LitClassifier(), data(), ckpt_path=str(tmp_path / "half.ckpt")
        )
