# SPDX-License-Identifier: Apache-2.0
"""Lightning's own programs, made private by one callback."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

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
GIVEN = {"max_grad_norm": 1.0, "noise_multiplier": 1.0}
TARGET = {"max_grad_norm": 1.0, "target_epsilon": 3.0, "target_delta": 1e-4}


class LitAutoEncoder(L.LightningModule):
    """The first program of Lightning's documentation, smaller: several modules."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(16, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16))

    def loss(self, x):
        return F.mse_loss(self.decoder(self.encoder(x)), x)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[0].flatten(1))
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
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class LitOwnLayers(LitClassifier):
    """Layers of its own, as the tutorials write them."""

    def __init__(self):
        super().__init__()
        del self.model
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x.flatten(1))))


def data(shuffle=True, size=8, **options):
    x = torch.randn(ROWS, 4, 4, generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(x, (x.sum((1, 2)) > 0).long())
    return torch.utils.data.DataLoader(dataset, batch_size=size, shuffle=shuffle, **options)


def plan(**changes):
    sizes = {"num_examples": ROWS, "expected_batch_size": 8, "num_steps": STEPS, "delta": 1e-4}
    return dualdp.PrivacyPlan(**{**sizes, **GIVEN, **changes})


def trainer(folder, *callbacks, **options):
    usual = {"max_epochs": 1, "logger": False, "enable_checkpointing": False}
    usual |= {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    usual |= {"default_root_dir": folder, "log_every_n_steps": 1}
    return L.Trainer(callbacks=list(callbacks), **{**usual, **options})


def saves(folder, steps):
    """Options of a trainer that saves after so many steps, and its callback."""
    save = L.pytorch.callbacks.ModelCheckpoint(folder, every_n_train_steps=steps, save_top_k=-1)
    return save, {"enable_checkpointing": True}


def by_hand(lit, **changes):
    """The same run with the engine alone."""
    module = nn.Sequential(lit.encoder, lit.decoder) if hasattr(lit, "encoder") else lit
    found = lit.configure_optimizers()
    optimizer, schedulers = (found[0][0], found[1]) if isinstance(found, tuple) else (found, [])
    engine = dpt.PrivacyEngine()
    _, _, loader = engine.make_private(
        module=module, optimizer=optimizer, data_loader=data(), plan=plan(seed=3, **changes)
    )
    torch.manual_seed(5)
    for x, y in loader:
        step = engine.ledger.position
        optimizer.zero_grad()
        is_classifier = not hasattr(lit, "encoder")
        x = x if is_classifier else x.flatten(1)
        (F.cross_entropy(module(x), y) if is_classifier else F.mse_loss(module(x), x)).backward()
        optimizer.step()
        for each in schedulers if engine.ledger.position > step else ():
            each["scheduler"].step()
    engine.detach()
    return lit.state_dict()


def same(a, b):
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (LitAutoEncoder, {"physical_batch_size": 5}),
        (LitClassifier, {}),
        (LitClassifier, {"physical_batch_size": 5}),
        (LitOwnLayers, {}),
    ],
)
def test_lightning_trains_as_the_engine_alone(kind, changes, tmp_path):
    """With a check of every step, which changes nothing and logs nothing."""
    callback, logged = PrivacyCallback(plan=plan(seed=3, **changes), checks=1.0), []

    class Counts(kind):
        def log(self, name, *args, **kwargs):
            logged.append(name)
            super().log(name, *args, **kwargs)

    fit, lit = trainer(tmp_path, callback), Counts()
    torch.manual_seed(5)
    fit.fit(lit, data())
    assert same(lit.state_dict(), by_hand(kind(), **changes))
    assert len(callback.engine.ledger) == fit.global_step == STEPS
    assert callback.engine.ledger.last_check == STEPS - 1
    assert float(fit.logged_metrics["epsilon"]) == pytest.approx(plan().epsilon(), rel=1e-6)
    assert "training_step" not in vars(lit)
    assert not lit._forward_hooks
    assert fit.accumulate_grad_batches == 1
    if kind is LitAutoEncoder:
        assert logged.count("train_loss") >= STEPS
    if not changes:
        assert logged.count("epsilon") == STEPS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_module_trains_as_the_engine_alone(tmp_path):
    """`fit(torch.compile(module))`, as Lightning's documentation writes it."""
    lit = LitAutoEncoder()
    torch.manual_seed(5)
    fit = trainer(tmp_path, PrivacyCallback(plan=plan(seed=3)))
    fit.fit(torch.compile(lit, backend="eager"), data())
    assert same(lit.state_dict(), by_hand(LitAutoEncoder()))


def test_a_second_fit_is_not_forgotten(tmp_path):
    callback, lit = PrivacyCallback(**GIVEN), LitClassifier()
    trainer(tmp_path, callback).fit(lit, data())
    text = "This callback has trained a run of .* already"
    with pytest.raises(dualdp.AccountingError, match=text):
        trainer(tmp_path, callback).fit(lit, data())


class Watch(L.Callback):
    """Batches that were done in each pass, and the number that Lightning showed."""

    def __init__(self):
        self.lengths = []

    def on_train_epoch_end(self, trainer, pl_module):
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        self.lengths.append((done, trainer.num_training_batches))


def test_lightning_accumulates_and_calibrates(tmp_path):
    callback, watch = PrivacyCallback(**TARGET), Watch()
    fit = trainer(tmp_path, watch, callback, max_epochs=3, accumulate_grad_batches=2)
    fit.fit(LitAutoEncoder(), data())
    made = callback.engine.plan
    assert (made.num_steps, made.expected_batch_size_at(0)) == (3 * 3, 16)
    assert made.physical_batch_size == 8
    assert callback.engine.get_epsilon() <= 3.0
    assert all(done == length for done, length in watch.lengths)
    assert len(watch.lengths) == 3
    assert sum(done for done, _ in watch.lengths) > 9
    assert fit.global_step == 9
    assert fit.accumulate_grad_batches == 2
    lines = dualdp.Ledger.read(callback.engine.ledger.to_json())
    assert {"unprotected": ["train_loss"]} in [line.get("note") for line in lines]


# ---------------------------------------------------------------------- checkpoints


def test_lightning_resumes(tmp_path):
    """Inside its second pass, with physical batches; the steps that run again are paid."""
    save, options = saves(tmp_path, 4)
    given, lit, watch = (
        {**GIVEN, "max_physical_batch_size": 5, "seed": 3},
        LitAutoEncoder(),
        Watch(),
    )
    torch.manual_seed(5)
    whole = trainer(tmp_path, PrivacyCallback(**given), save, watch, max_epochs=3, **options)
    whole.fit(lit, data())

    again, callback = LitAutoEncoder(), PrivacyCallback()
    (saved,) = tmp_path.glob("*step=8.ckpt")
    fit = trainer(tmp_path, callback, watch, max_epochs=3)
    fit.fit(again, data(), ckpt_path=str(saved))
    assert same(lit.state_dict(), again.state_dict())
    assert fit.global_step == 3 * STEPS
    assert len(callback.engine.ledger) == 3 * STEPS + 10
    assert [length for _, length in watch.lengths[3:]] == [n for _, n in watch.lengths[1:3]]


def test_lightning_trains_with_correlated_noise(tmp_path):
    """And resumes from a checkpoint of Lightning's that holds nothing of it."""
    save, options = saves(tmp_path, 2)
    lit, callback = LitClassifier(), PrivacyCallback(plan=plan(seed=3, **WINDOW))
    trainer(tmp_path, callback, save, **options).fit(lit, data())
    assert same(lit.state_dict(), by_hand(LitClassifier(), **WINDOW))
    again, callback = LitClassifier(), PrivacyCallback()
    (saved,) = tmp_path.glob("*step=4.ckpt")
    trainer(tmp_path, callback).fit(again, data(), ckpt_path=str(saved))
    assert not same(lit.state_dict(), again.state_dict()), "the noise began anew"
    assert len(callback.engine.ledger) == STEPS + 2
    assert callback.engine.get_epsilon() > plan(**WINDOW).epsilon()


@pytest.fixture
def stopped(tmp_path):
    """A checkpoint after step 4 of a run with a target that was stopped after step 5."""

    class Stops(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step == 5

    save, options = saves(tmp_path, 4)
    callbacks = PrivacyCallback(**TARGET | {"target_epsilon": 8.0}), save, Stops()
    trainer(tmp_path, *callbacks, **options).fit(LitClassifier(), data())
    (saved,) = tmp_path.glob("*step=4.ckpt")
    return str(saved)


def go_on(path, folder, callback, **options):
    trainer(folder, callback, **options).fit(LitClassifier(), data(), ckpt_path=path)


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({**TARGET, "max_grad_norm": 0.5}, ValueError, "which goes on by its own plan"),
        ({"plan": plan(clipping="per_layer")}, ValueError, "which goes on by its own plan"),
        ({}, dualdp.AccountingError, "would exceed target_epsilon=8.0"),
    ],
)
def test_a_resumed_callback_may_not_ask_for_another_run(changed, error, match, stopped, tmp_path):
    with pytest.raises(error, match=match):
        go_on(stopped, tmp_path, PrivacyCallback(**changed), max_epochs=2)


def test_steps_that_run_again_fit_the_target(stopped, tmp_path):
    callback = PrivacyCallback(recalibrate=True)
    go_on(stopped, tmp_path, callback)
    assert len(callback.engine.ledger) == STEPS + 1, "step 4 was released twice"
    assert 7.5 < callback.engine.get_epsilon() <= 8.0


class LitTested(LitClassifier):
    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.training_step(batch, batch_idx))


def test_a_checkpoint_of_a_finished_run_goes_on(tmp_path):
    """One of a public run is tested and not resumed; a test spends nothing."""
    fit, path = trainer(tmp_path), str(tmp_path / "public.ckpt")
    fit.fit(LitTested(), data())
    fit.save_checkpoint(path)
    with pytest.raises(ValueError, match="saved without a PrivacyCallback"):
        go_on(path, tmp_path, PrivacyCallback(plan=plan()))
    callback = PrivacyCallback(**GIVEN)
    fit = trainer(tmp_path, callback)
    fit.fit(LitTested(), data())
    fit.save_checkpoint(tmp_path / "final.ckpt")
    for tested in (path, str(tmp_path / "final.ckpt")):
        trainer(tmp_path, callback).test(LitTested(), data(False), ckpt_path=tested, verbose=False)
    assert callback.engine.ledger.position == STEPS
    again = PrivacyCallback()
    go_on(str(tmp_path / "final.ckpt"), tmp_path, again, max_epochs=2)
    assert len(again.engine.ledger) == 2 * STEPS


def test_training_may_stop_within_a_logical_batch(tmp_path):
    """A half batch is not released, and a checkpoint of that moment is not one to resume."""

    class Stop(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            progress = trainer.fit_loop.epoch_loop.batch_progress
            trainer.should_stop = progress.current.ready == 4

    callback = PrivacyCallback(plan=plan(seed=3, physical_batch_size=3))
    fit, lit, path = trainer(tmp_path, callback, Stop()), LitClassifier(), tmp_path / "half.ckpt"
    fit.fit(lit, data())
    assert len(callback.engine.ledger) == fit.global_step < STEPS
    assert not lit.model._forward_hooks
    fit.save_checkpoint(path)
    with pytest.raises(ValueError, match="or within a logical batch, so what it spent is unknown"):
        go_on(str(path), tmp_path, PrivacyCallback())


# ---------------------------------------------------------------------- numbers of steps


def test_a_spent_budget_ends_the_training(tmp_path):
    callback = PrivacyCallback(**GIVEN | TARGET | {"target_epsilon": 4.0}, on_budget="stop")
    fit = trainer(tmp_path, callback, max_epochs=1000)
    fit.fit(LitClassifier(), data())
    ledger = callback.engine.ledger
    assert 6 < fit.global_step == len(ledger) == ledger.end < 100
    assert ledger.get_epsilon() <= 4.0
    assert fit.current_epoch <= ledger.end


@pytest.mark.parametrize(
    ("size", "times", "drop_last", "limit", "steps"),
    [
        (8, 2, False, 1.0, 6),
        (8, 1, False, 4, 8),
        (10, 2, True, 1.0, 4),
        (10, 2, False, 1.0, 6),
        (64, 1, True, 1.0, 2),
    ],
)
def test_estimated_steps_are_those_that_are_taken(size, times, drop_last, limit, steps, tmp_path):
    """known_failures 87: OneCycleLR as Lightning's documentation writes it."""

    class Cycle(LitClassifier):
        def configure_optimizers(self):
            self.estimated = self.trainer.estimated_stepping_batches
            self.times = self.trainer.accumulate_grad_batches
            optimizer, steps = torch.optim.SGD(self.parameters(), lr=0.1), int(self.estimated)
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=steps)
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    callback, lit = PrivacyCallback(**TARGET), Cycle()
    options = {"max_epochs": 2, "accumulate_grad_batches": times, "limit_train_batches": limit}
    fit = trainer(tmp_path, callback, **options)
    fit.fit(lit, data(size=size, drop_last=drop_last))
    made = callback.engine.plan
    assert lit.estimated == fit.global_step == len(callback.engine.ledger) == steps
    assert (lit.times, made.num_steps) == (times, steps), "noise for the steps that are taken"
    assert made.expected_batch_size_at(0) == min(size * times, ROWS)
    assert fit.lr_scheduler_configs[0].scheduler.last_epoch == steps


# ---------------------------------------------------------------------- checks and refusals


class LitSum(LitAutoEncoder):
    """A sum where a mean was declared, in a step that calls two modules."""

    def loss(self, x):
        return F.mse_loss(self.decoder(self.encoder(x)), x, reduction="sum")


class LitMixing(LitClassifier):
    """A criterion that compares the examples, in a step that calls one module."""

    def training_step(self, batch, batch_idx):
        out = self(batch[0])
        return (out - out.detach().mean(0)).square().mean()


class LitStandardised(LitAutoEncoder):
    """A statistic of the batch reaches the step of several modules beside its arguments."""

    def on_train_batch_start(self, batch, batch_idx):
        self.mean = batch[0].flatten(1).mean(0)

    def loss(self, x):
        return super().loss(x - self.mean)


class LitScattered(LitAutoEncoder):
    """A module without rules among several."""

    class Scattered(nn.Linear):
        def forward(self, x):
            n, d = x.shape
            return super().forward(x.t().reshape(n, d, 1)).reshape(d, n).t()

    def __init__(self):
        super().__init__()
        self.encoder.append(self.Scattered(1, 1))


def changed_by(change):
    """A module that changes batches before a step of several modules sees them."""

    class Changed(LitAutoEncoder):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            x = batch[0]
            change(batch, x - x.mean(0))
            return batch

    return Changed


CHANGED = "not one of the loader's batch, or was changed since"
STEPS_REFUSED = {
    "sum": (LitSum, dualdp.ExactnessError, "taken for a mean over the batch. If it is not, decla"),
    "mixing": (LitMixing, ValueError, "The loss mixes the examples"),
    "hook": (LitStandardised, ValueError, "when the other rows are replaced or left out"),
    "rules": (LitScattered, dualdp.UnsupportedLayerError, "Put them into one module"),
    "new": (changed_by(lambda batch, x: batch.__setitem__(0, x)), ValueError, CHANGED),
    "in place": (changed_by(lambda batch, x: batch[0].copy_(x)), ValueError, CHANGED),
    "data": (changed_by(lambda batch, x: setattr(batch[0], "data", x)), ValueError, CHANGED),
    "numpy": (
        changed_by(lambda batch, x: batch[0].numpy().__setitem__(..., x.numpy())),
        ValueError,
        CHANGED,
    ),
}


@pytest.mark.parametrize("name", STEPS_REFUSED)
def test_steps_of_lightning_are_checked(name, tmp_path):
    """A changed batch of several modules moved the sum by 4.9 C by one example."""
    kind, error, match = STEPS_REFUSED[name]
    callback = PrivacyCallback(plan=plan(), loss_reduction="mean")
    with pytest.raises(error, match=match):
        trainer(tmp_path, callback).fit(kind(), data())
    assert len(callback.engine.ledger) == 0


class LitDiffusion(LitAutoEncoder):
    """Every row has a time of its own."""

    def loss(self, x):
        times = torch.randint(1, 10, (len(x), 1))
        return super().loss(x + times / 10 * torch.randn_like(x))


@pytest.mark.parametrize(
    ("lit", "precision"), [(LitOwnLayers, "bf16-mixed"), (LitDiffusion, "32-true")]
)
def test_steps_of_several_modules_pass_their_checks(tmp_path, lit, precision):
    """In the autocast that Lightning has around the step; draws that can't be repeated apart."""
    callback = PrivacyCallback(plan=plan(), checks=1.0)
    trainer(tmp_path, callback, precision=precision).fit(lit(), data())
    assert len(callback.engine.ledger) == STEPS


def manual():
    lit = LitAutoEncoder()
    lit.automatic_optimization = False
    return lit


def two():
    lit = manual()
    lit.configure_optimizers = lambda: [torch.optim.SGD(lit.parameters(), 0.1) for _ in "ab"]
    return lit


HOOKS = L.pytorch.callbacks
#: Text of the error -> module, options of the callback and of the trainer, another callback.
REFUSED = {
    "gradient_clip_val=0.5 clips whole batches": {"gradient_clip_val": 0.5},
    "overfit_batches=2": {"overfit_batches": 2},
    "limit_train_batches=3 would cut a logical batch": {
        "limit_train_batches": 3,
        "accumulate_grad_batches": 2,
        "given": GIVEN,
    },
    "target_epsilon came with a loop that has no end": {"max_epochs": -1, "given": TARGET},
    "returned 2 optimizers": {"lit": two},
    "2 optimizers hold parameters of module='encoder'": {"lit": two, "module": "encoder"},
    "module='critic' is no submodule of LitAutoEncoder": {"lit": two, "module": "critic"},
    "training_step optimizes manually and calls several modules": {"lit": manual},
    "grad_sample_mode='ghost' with a training_step that": {
        "given": {"plan": plan(), "grad_sample_mode": "ghost"}
    },
    "LearningRateFinder trains on batches": {"other": HOOKS.LearningRateFinder},
    "GradientAccumulationScheduler changes the size": {
        "other": lambda: HOOKS.GradientAccumulationScheduler({0: 1, 1: 2})
    },
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_lightning_would_do_to_gradients_is_refused(text, tmp_path):
    options = dict(REFUSED[text])
    lit, given = options.pop("lit", LitAutoEncoder)(), options.pop("given", {"plan": plan()})
    callbacks = [PrivacyCallback(**given, module=options.pop("module", None))]
    if "other" in options:
        callbacks.append(options.pop("other")())
    with pytest.raises(ValueError, match=text):
        trainer(tmp_path, *callbacks, **options).fit(lit, data())


class FSDPStrategy(L.pytorch.strategies.SingleDeviceStrategy):
    """One whose name is not known."""


def test_scalers_and_other_strategies_are_refused(tmp_path):
    for text, name, value in (
        ("='16-mixed' scales the loss", "_precision_plugin", SimpleNamespace(precision="16-mixed")),
        ("starts processes that end with fit", "_start_method", "spawn"),
        ("lets each process train by itself", "_model_averaging_period", 2),
        ("strategy FSDPStrategy is not known here", "__class__", FSDPStrategy),
    ):
        fit = trainer(tmp_path)
        setattr(fit.strategy, name, value)
        with pytest.raises(ValueError, match=text):
            refuse(fit, LitAutoEncoder())
    with pytest.raises(RuntimeError, match="was added during training"):
        PrivacyCallback(plan=plan()).on_after_backward(None, None)


# ---------------------------------------------------------------------- manual optimization


class LitManual(LitClassifier):
    """Manual optimization, as Lightning's documentation writes it."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(F.cross_entropy(self.model(batch[0]), batch[1]))
        opt.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)


class LitTwo(LitManual):
    """A private classifier, and a public model with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.public = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        private, public = self.optimizers()
        self.toggle_optimizer(private)
        private.zero_grad()
        self.manual_backward(F.cross_entropy(self.model(batch[0]), batch[1]))
        private.step()
        self.untoggle_optimizer(private)
        self.toggle_optimizer(public)
        public.zero_grad()
        self.manual_backward(self.public(torch.ones(2, 3)).square().mean())
        public.step()
        self.untoggle_optimizer(public)

    def configure_optimizers(self):
        private = LitManual.configure_optimizers(self)
        return [private, torch.optim.SGD(self.public.parameters(), lr=0.1)]


@pytest.mark.parametrize(("kind", "physical"), [(LitManual, 5), (LitTwo, None), (LitTwo, 5)])
def test_manual_optimization_trains_as_the_engine_alone(kind, physical, tmp_path):
    run, module = plan(seed=3, physical_batch_size=physical), "model" if kind is LitTwo else None
    callback, lit, twin = PrivacyCallback(plan=run, module=module), kind(), kind()
    trainer(tmp_path, callback).fit(lit, data())
    by_hand(alone := LitManual(), physical_batch_size=physical)
    assert same(lit.model.state_dict(), alone.model.state_dict())
    assert len(callback.engine.ledger) == STEPS
    if kind is LitTwo:
        public = torch.optim.SGD(twin.public.parameters(), lr=0.1)
        for _ in range(lit.trainer.global_step // 2):
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
            loss = F.cross_entropy(out, batch[1])
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
