# SPDX-License-Identifier: Apache-2.0
"""Mistakes of users with both stacks, in tables: same mistake, same kind of error, same words.

Words that only an engine's plan knows are in `test_engine_arguments.py`.
"""

import warnings
from contextlib import suppress
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import dualdp
import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import AccountingError, UnsupportedLayerError, port
from tests.mistakes import refused, untidy

N = 24
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
Y = X.sum(1)
NUMBERS = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
NOWHERE = "lies in no existing folder. Make it first"


def plan(**changes):
    sizes = {"num_examples": N, "expected_batch_size": 6, "num_steps": 4, "delta": 1e-5}
    return dualdp.PrivacyPlan(**{**sizes, **NUMBERS, "seed": 1, **changes})


class Torch:
    """Calls of the PyTorch backend, each with something wrong."""

    face = dpt

    def __init__(self, at):
        self.at, self.model = at, nn.Linear(3, 1)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.arrays = torch.from_numpy(X), torch.from_numpy(Y)
        self.rows = TensorDataset(*self.arrays)
        self.sums = {"w": torch.zeros(3)}
        self.begun = []

    def parts(self, **changes):
        model = changes.get("module", nn.Linear(3, 1))
        if isinstance(model, nn.Module) and "optimizer" not in changes:
            changes["optimizer"] = torch.optim.SGD(list(model.parameters()) or [X0()], lr=0.1)
        loader = DataLoader(self.rows, batch_size=6)
        given = {"module": model, "optimizer": self.sgd, "data_loader": loader}
        return {**given, **NUMBERS, **changes}

    def begin(self, **changes):
        engine = dpt.PrivacyEngine()
        self.begun.append(engine)
        return engine, *engine.make_private(**self.parts(**changes))

    def read(self, data):
        """`make_private` on a loader of these data."""
        self.begin(data_loader=DataLoader(data, batch_size=6))

    def sum(self, *args, **changes):
        loss = lambda model, x, y: (model(x).squeeze(-1) - y) ** 2  # noqa: E731
        args = args or (loss, self.model, *self.arrays)
        return dpt.clipped_grad_sum(*args, **{"max_grad_norm": 1.0, **changes})

    def of_loss(self, loss):
        return self.sum(loss, self.model, *self.arrays)

    def save(self, path, call=dpt.save_checkpoint, **changes):
        engine, model, optimizer, _ = self.begin()
        call(path, **{"model": model, "optimizer": optimizer, "engine": engine, **changes})

    def load(self, name, like=None, **changes):
        model, optimizer = like or (self.model, self.sgd)
        dpt.load_checkpoint(self.at / name, model=model, optimizer=optimizer, **changes)

    def save_run(self, name):
        engine, model, optimizer, _ = self.begin()
        parts = {"model": model, "optimizer": optimizer, "engine": engine}
        dpt.save_checkpoint(self.at / name, **parts)
        engine.detach()

    def close_and_step(self):
        engine, model, optimizer, loader = self.begin(ledger=self.at / "torch.closed")
        x, y = next(iter(loader))
        F.mse_loss(model(x).squeeze(-1), y).backward()
        engine.ledger.close()
        optimizer.step()


class Jax:
    """Calls of the JAX backend, each with something wrong."""

    face = dpj

    def __init__(self, at):
        self.at, self.model, self.sgd = at, {"w": jnp.zeros(3)}, optax.sgd(0.1)
        self.arrays = X, Y
        self.sums = {"w": jnp.zeros(3)}
        self.state = dpj.TrainState.create(self.model, self.sgd)

    @staticmethod
    def loss(params, x, y):
        return (x @ params["w"] - y) ** 2

    def parts(self, **changes):
        given = {"loss_fn": self.loss, "params": self.model, "optimizer": self.sgd}
        sizes = {"data": self.arrays, "expected_batch_size": 6}
        return {**given, **sizes, **NUMBERS, **changes}

    def begin(self, **changes):
        engine = dpj.PrivacyEngine()
        return engine, *engine.make_private(**self.parts(**changes))

    def read(self, data):
        """`make_private` on these data."""
        self.begin(data=data)

    def sum(self, *args, **changes):
        args = args or (self.loss, self.model, *self.arrays)
        return dpj.clipped_grad_sum(*args, **{"max_grad_norm": 1.0, "check": "off", **changes})

    def of_loss(self, loss):
        return self.sum(loss, self.model, *self.arrays)

    def save(self, path, call=dpj.save_checkpoint, **changes):
        engine, _, state, _ = self.begin()
        call(path, **{"state": state, "engine": engine, **changes})

    def load(self, name, like=None, **changes):
        dpj.load_checkpoint(self.at / name, like=like or self.state, **changes)

    def save_run(self, name):
        engine, _, state, _ = self.begin()
        dpj.save_checkpoint(self.at / name, state=state, engine=engine)
        engine.detach()

    def close_and_step(self):
        engine, step, state, loader = self.begin(ledger=self.at / "jax.closed")
        batch = next(iter(loader))
        engine.ledger.close()
        step(state, batch)


def X0():
    return torch.zeros(1, requires_grad=True)


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    made = {}
    for name, kind in (("torch", Torch), ("jax", Jax)):
        at = untidy(tmp_path_factory.mktemp(name))
        made[name] = kit = kind(at)
        for run in ("run", "other", "recordless"):
            kit.save_run(run)
        (at / "recordless.ledger").unlink()
    return SimpleNamespace(**made)


@pytest.fixture(autouse=True)
def detached(kits):
    """No run, with its hooks and its tape, outlives a test."""
    yield
    for engine in kits.torch.begun:
        with suppress(AccountingError):
            engine.detach()
    kits.torch.begun.clear()


#: Mistake -> (call with the kit of a stack, error, words).
ON_BOTH = {
    # engines
    "ledger nowhere": (
        lambda k: k.begin(ledger=k.at / "no" / "ledger"),
        FileNotFoundError,
        "its folder does not exist. Expected a new path",
    ),
    "folder as ledger": (
        lambda k: k.begin(ledger=k.at / "folder"),
        FileExistsError,
        "folder exists. Expected a new path",
    ),
    "ledger in a file": (
        lambda k: k.begin(ledger=k.at / "file" / "ledger"),
        NotADirectoryError,
        "its folder is a file",
    ),
    "open file as ledger": (lambda k: k.begin(ledger=3.5), TypeError, "ledger=3.5 is a float"),
    "ledger of no name": (lambda k: k.begin(ledger=""), ValueError, "ledger='' is no path"),
    "closed ledger": (lambda k: k.close_and_step(), ValueError, "closed is closed, so a release"),
    "no data": (lambda k: k.read([x[:0] for x in k.arrays][0]), ValueError, "has no examples"),
    "optimizer of None": (lambda k: k.begin(optimizer=None), TypeError, "optimizer is None.*lr|op"),
    "name of an optimizer": (lambda k: k.begin(optimizer="sgd"), TypeError, "is a str.*sgd|SGD"),
    "dict as plan": (lambda k: k.begin(plan={}), TypeError, "plan is a dict. Expected a dualdp.Pr"),
    "plan of other data": (
        lambda k: k.begin(
            plan=plan(num_examples=23),
            **dict.fromkeys(NUMBERS),
            **({"expected_batch_size": None} if isinstance(k, Jax) else {}),
        ),
        ValueError,
        "The data has 24 examples but the plan has num_examples=23. Both must be the same",
    ),
    "plan of users": (
        lambda k: k.begin(
            plan=plan(unit="user", rows_per_unit=2),
            **dict.fromkeys(NUMBERS),
            **({"expected_batch_size": None} if isinstance(k, Jax) else {}),
        ),
        ValueError,
        "The plan has unit='user', but users is missing. Expected users=, the id of the user",
    ),
    "plan of items of two rows": (
        lambda k: next(
            iter(
                k.begin(
                    plan=plan(rows_per_unit=2),
                    **dict.fromkeys(NUMBERS),
                    **({"expected_batch_size": None} if isinstance(k, Jax) else {}),
                )[-1]
            )
        ),
        ValueError,
        "with rows_per_unit=2, the rows of each item; what all rows of an item share is repeated",
    ),
    "users of an ordinary run": (
        lambda k: k.begin(users=range(24)),
        ValueError,
        "users came for a plan with unit='example', whose epsilon is that of one row. Expected",
    ),
    "names of users": (
        lambda k: k.begin(users=["a"] * 24),
        TypeError,
        "Expected a one-dimensional array of integers, the id of the user of each row; for names",
    ),
    "checks as a word": (lambda k: k.begin(checks="first"), TypeError, "checks='first' is a str"),
    "delta of 2": (lambda k: k.begin()[0].get_epsilon(2), ValueError, "delta=2 is not a prob"),
    "delta as text": (lambda k: k.begin()[0].get_epsilon("1"), TypeError, "delta='1' is a str"),
    "no delta": (lambda k: k.begin()[0].get_epsilon(), ValueError, "delta is missing. Expected"),
    "stages before a step": (lambda k: k.begin()[0].stages(), AccountingError, "No step was taken"),
    "steps as text": (lambda k: k.begin()[0].record("3"), TypeError, "num_steps='3' is a str"),
    "negative steps": (lambda k: k.begin()[0].record(-1), ValueError, "num_steps=-1 is out of"),
    "nothing to resume": (
        lambda k: k.face.PrivacyEngine().resume(**({"data_loader": 1} if k.face is dpt else {})),
        AccountingError,
        "no loaded run",
    ),
    "accountant": (
        lambda k: k.face.PrivacyEngine(accountant=3),
        TypeError,
        "accountant=3 is an int. Expected one of",
    ),
    # sums
    "no loss": (lambda k: k.of_loss(None), TypeError, "loss_fn is None. Expected a function of"),
    "name of a loss": (lambda k: k.of_loss("mse"), TypeError, "loss_fn is a str. Expected a func"),
    "loss without labels": (
        lambda k: k.of_loss(lambda model, x: x),
        TypeError,
        r"loss_fn takes \(model, x\), but is called with .*, 3 in all: too many",
    ),
    "loss of more": (
        lambda k: k.of_loss(lambda model, x, y, z: x),
        TypeError,
        "missing a required argument: 'z'",
    ),
    "loss of aux": (
        lambda k: k.of_loss(lambda model, x, y: (y, 1)),
        TypeError,
        "returned a? ?tuple.*has_aux=True",
    ),
    "loss of None": (lambda k: k.of_loss(lambda m, x, y: None), TypeError, "loss_fn returned"),
    "no aux": (lambda k: k.sum(has_aux=True), TypeError, "has_aux=True, but loss_fn returned a"),
    "no bound": (lambda k: k.sum(max_grad_norm=None), TypeError, "^max_grad_norm=None. Expected"),
    "bound as text": (lambda k: k.sum(max_grad_norm="1"), TypeError, "max_grad_norm='1' is a str"),
    "bound below 0": (lambda k: k.sum(max_grad_norm=-1), ValueError, "=-1 is out of range"),
    "method of Opacus": (lambda k: k.sum(method="ghost"), ValueError, "method='ghost' is unknown"),
    "check": (lambda k: k.sum(check=True), TypeError, "check=True is a bool. Expected one of alw"),
    "short mask": (lambda k: k.sum(mask=k.arrays[1][:3] > 0), ValueError, "mask is.*3.*24"),
    "mask of numbers": (lambda k: k.sum(mask=k.arrays[1]), ValueError, "mask is.*float32"),
    "chunks of 0": (lambda k: k.sum(physical_batch_size=0), ValueError, "physical_batch_size=0"),
    "memory as text": (lambda k: k.sum(max_memory="1GB"), TypeError, "max_memory='1GB' is a str"),
    "unequal": (
        lambda k: k.sum(lambda m, x, y: x, k.model, k.arrays[0], k.arrays[1][:3]),
        ValueError,
        "24.*3|3.*24",
    ),
    "no batch": (lambda k: k.sum(lambda m: 1, k.model), ValueError, "no tensor|no array"),
    "stream": (
        lambda k: k.sum(lambda m, x, y: x, k.model, iter(X), k.arrays[1]),
        TypeError,
        "is an? .*iterator|holds an? .*iterator",
    ),
    # noise
    "no sum": (lambda k: k.face.noisy_mean(None, plan(), 0), TypeError, "grads is None. Expected"),
    "more than the sum": (
        lambda k: k.face.noisy_mean(k.sum(), plan(), 0),
        TypeError,
        r"grads is a ClippedGradSum. Expected .*clipped_grad_sum\(...\).grads",
    ),
    "sum of text": (lambda k: k.face.noisy_mean({"w": "a"}, plan(), 0), TypeError, "is a str"),
    "noise of no plan": (lambda k: k.face.noisy_mean(k.sums, 1.1, 0), TypeError, "plan is a float"),
    "noise past the plan": (
        lambda k: k.face.noisy_mean(k.sums, plan(), 4),
        AccountingError,
        "step=4 is past the plan's num_steps=4",
    ),
    "noise before it": (
        lambda k: k.face.noisy_mean(k.sums, plan(), -1),
        ValueError,
        "step=-1 is out of range",
    ),
    "noise of a word": (
        lambda k: k.face.noisy_mean(k.sums, plan(), "0"),
        TypeError,
        "step='0' is a str. Expected an integer",
    ),
    # checkpoints
    "saved to a folder": (
        lambda k: k.save(k.at / "folder"),
        IsADirectoryError,
        "is a folder. Expected the name of a file",
    ),
    "saved nowhere": (lambda k: k.save(k.at / "no" / "run"), FileNotFoundError, NOWHERE),
    "saved to None": (lambda k: k.save(None), TypeError, "path=None. Expected a path"),
    "saved to no name": (lambda k: k.save(""), ValueError, "path='' is no path"),
    "saved without engine": (
        lambda k: k.save(k.at / "new", engine=None),
        TypeError,
        "engine is None. Expected the run's PrivacyEngine",
    ),
    "saved before the run": (
        lambda k: k.save(k.at / "new", engine=k.face.PrivacyEngine()),
        AccountingError,
        "Call make_private first",
    ),
    "shards into a file": (
        lambda k: k.save(k.at / "file", k.face.save_sharded_checkpoint),
        FileExistsError,
        "file exists. Expected a new folder, or that of earlier checkpoints",
    ),
    "loaded from nothing": (lambda k: k.load("no"), FileNotFoundError, "no does not exist. Expect"),
    "loaded from a folder": (lambda k: k.load("folder"), IsADirectoryError, "folder is a folder"),
    "loaded from text": (lambda k: k.load("file"), ValueError, "no safetensors file"),
    "ledger missing": (lambda k: k.load("recordless"), FileNotFoundError, "recordless.ledger does"),
    "ledger of another run": (
        lambda k: k.load("run", ledger=k.at / "other.ledger"),
        ValueError,
        "Expected the file of the same run",
    ),
    "folder as ledger of a run": (
        lambda k: k.load("run", ledger=k.at / "folder"),
        IsADirectoryError,
        "folder is a folder. Expected the file of a run's ledger",
    ),
    "mapping of its own stack": (
        lambda k: k.load("run", mapping={}),
        ValueError,
        "mapping={}",
    ),
    "shards of nothing": (
        lambda k: k.face.consolidate_checkpoint(k.at / "folder", k.at / "new"),
        FileNotFoundError,
        "holds no checkpoint. Expected a folder of save_sharded_checkpoint",
    ),
}


class Endless(IterableDataset):
    """A stream."""

    def __iter__(self):
        return iter(X)


class Unsized:
    """Rows without a length."""

    def __getitem__(self, index):
        return X[index]


def frozen():
    return nn.Linear(3, 1).requires_grad_(False)


def scripted():
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return torch.jit.script(nn.Linear(3, 1))


def fixed_too_late():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"module": dpt.fix(model), "optimizer": optimizer}


def without_forward(kit):
    _, _, optimizer, loader = kit.begin()
    next(iter(loader))
    optimizer.step()


def another_batch(kit):
    _, model, optimizer, loader = kit.begin()
    x, y = next(iter(loader))
    F.mse_loss(model(x[:1]).squeeze(-1), y[:1]).backward()
    optimizer.step()


def after_detach(kit):
    engine, *_, loader = kit.begin()
    engine.detach()
    next(iter(loader))


def like(*shape, kind=torch.optim.SGD):
    """A model whose weight has this shape, with its optimizer."""
    model = nn.Linear(*reversed(shape))
    return model, kind(model.parameters(), lr=0.1)


ON_TORCH = {
    "class as module": (lambda k: k.begin(module=nn.Linear), TypeError, "is the class Linear. Exp"),
    "weights as module": (
        lambda k: k.begin(module=k.model.state_dict()),
        TypeError,
        "module is an OrderedDict. Expected a torch.nn.Module",
    ),
    "no module": (lambda k: k.begin(module=None), TypeError, "module is None. Expected a torch"),
    "function as module": (lambda k: k.begin(module=frozen), TypeError, "module is a function"),
    "class as optimizer": (
        lambda k: k.begin(optimizer=torch.optim.SGD),
        TypeError,
        r"optimizer is the class SGD. Expected one of torch, such as .*model.parameters\(\)",
    ),
    "scheduler as optimizer": (
        lambda k: k.begin(optimizer=torch.optim.lr_scheduler.StepLR(k.sgd, 1)),
        TypeError,
        "optimizer is a StepLR",
    ),
    "optimizer of another": (
        lambda k: k.begin(module=nn.Linear(3, 1), optimizer=k.sgd),
        ValueError,
        r"not hold the trainable parameters \['weight', 'bias'\]. Give it all",
    ),
    "fix after the optimizer": (
        lambda k: k.begin(**fixed_too_late()),
        ValueError,
        "after the last change of the model .fix makes new parameters",
    ),
    "everything frozen": (
        lambda k: k.begin(module=frozen()),
        ValueError,
        "no trainable parameter. Expected at least one with requires_grad",
    ),
    "nothing to train": (lambda k: k.begin(module=nn.ReLU()), ValueError, "no trainable parameter"),
    "weights on meta": (
        lambda k: k.begin(module=nn.Linear(3, 1, device="meta")),
        ValueError,
        r"'weight' has no numbers: it is on the meta device.*to_empty\(device=\)",
    ),
    "lazy": (
        lambda k: k.begin(module=nn.LazyLinear(1)),
        ValueError,
        "'weight' has no numbers: it is not made before the first batch.*run a batch through it",
    ),
    "scripted": (
        lambda k: k.begin(module=scripted()),
        TypeError,
        r"made by torch.jit.script, and takes no hooks. Expected nn.Sequential\(it\)",
    ),
    "a tensor to validate on": (
        lambda k: dpt.validate(k.model, loss_fn=lambda m, x: x, batch=k.arrays[0]),
        TypeError,
        r"loss_fn takes \(m, x\), but is called with \(model, \*batch\), 25 in all",
    ),
    "batch norm": (
        lambda k: k.begin(module=nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))),
        UnsupportedLayerError,
        r"BatchNorm1d \(layer '1'\).*fix\(model\) does",
    ),
    "reduction": (lambda k: k.begin(loss_reduction="none"), ValueError, "Expected one of mean, s"),
    "no loader": (lambda k: k.begin(data_loader=None), TypeError, "data_loader is None. Expected"),
    "data as loader": (lambda k: k.begin(data_loader=k.rows), TypeError, "is a TensorDataset. Exp"),
    "batches as loader": (lambda k: k.begin(data_loader=[k.arrays]), TypeError, "loader is a list"),
    "generator as loader": (
        lambda k: k.begin(data_loader=(row for row in X)),
        TypeError,
        "data_loader is a generator. Expected a torch DataLoader over a map-style data set",
    ),
    "stream of data": (lambda k: k.read(Endless()), TypeError, "is an Endless.*map-style one"),
    "no length": (
        lambda k: k.begin(data_loader=DataLoader(Unsized(), sampler=range(3))),
        TypeError,
        "is a Unsized, which can't be drawn from by index.*__getitem__ and __len__",
    ),
    "tuple of columns": (
        lambda k: k.read(k.arrays),
        TypeError,
        r"is a tuple, whose items are columns, not examples.*TensorDataset\(x, y\)",
    ),
    "tuple of NumPy columns": (lambda k: k.read((X, Y)), TypeError, "columns, not examples"),
    "dict of columns": (lambda k: k.read({"x": X, "y": Y}), TypeError, "is a dict, whose items"),
    "batch_size=None": (
        lambda k: k.begin(data_loader=DataLoader(k.rows, batch_size=None)),
        ValueError,
        "batch_size=None.*Expected a plain DataLoader",
    ),
    "plain loader in the manager": (
        lambda k: dpt.BatchMemoryManager(
            data_loader=DataLoader(k.rows), max_physical_batch_size=3, optimizer=k.sgd
        ),
        TypeError,
        "is a DataLoader. Expected the loader that make_private returned",
    ),
    "step without forward": (
        without_forward,
        RuntimeError,
        r"No forward was recorded. Call the model on the batch.*then loss.backward\(\)",
    ),
    "part of a batch": (another_batch, RuntimeError, "Expected the whole batch, once"),
    "a loader after detach": (
        after_detach,
        AccountingError,
        "after detach.. the loader that it re",
    ),
    # sums
    "criterion as loss": (
        lambda k: k.of_loss(nn.MSELoss()),
        TypeError,
        r"loss_fn takes \(input, target\), but is called with \(model, \*batch\), 3 in all",
    ),
    "parameters as model": (
        lambda k: k.sum(lambda m, x, y: y, dict(k.model.named_parameters()), *k.arrays),
        TypeError,
        "The model is a dict. Expected a torch.nn.Module",
    ),
    "mean of the batch": (
        lambda k: k.of_loss(lambda m, x, y: F.mse_loss(m(x)[:, 0], y)),
        ValueError,
        r'shape \(\). Expected \(24,\).*reduction="none"',
    ),
    "NumPy batch": (
        lambda k: k.sum(lambda m, x: x, k.model, X),
        TypeError,
        r"a NumPy array of shape \(24, 3\). Expected torch tensors; use torch.as_tensor",
    ),
    "JAX batch": (
        lambda k: k.sum(lambda m, x: x, k.model, jnp.asarray(X)),
        TypeError,
        "holds a JAX array of shape .*use torch.as_tensor",
    ),
    "batch on meta": (
        lambda k: k.sum(lambda m, x: x, k.model, torch.ones(3, 3, device="meta")),
        ValueError,
        "on the meta device, which has no numbers",
    ),
    "number in a tensor": (
        lambda k: k.sum(lambda m, x, y: x, k.model, k.arrays[0], torch.tensor(0.5)),
        ValueError,
        "pass numbers as Python floats",
    ),
    "bounds in a tensor": (
        lambda k: k.sum(max_grad_norm=torch.ones(2)),
        ValueError,
        r"max_grad_norm has shape \(2,\)",
    ),
    "mask as list": (lambda k: k.sum(mask=[True] * N), ValueError, "Expected a bool tensor of sh"),
    "module to validate": (lambda k: dpt.validate(None), TypeError, "model is None. Expected a t"),
    "module to fix": (lambda k: dpt.fix("resnet"), TypeError, "model is a str. Expected a torch"),
    "module to record": (
        lambda k: dpt.record_per_sample(None, loss_reduction="mean").__enter__(),
        TypeError,
        "model is None. Expected a torch.nn.Module",
    ),
    "rule of a name": (lambda k: dpt.register_rule("linear", None), TypeError, "is not callable"),
    "sum as tensor": (
        lambda k: dpt.noisy_mean(torch.zeros(3), plan(), 0),
        TypeError,
        "grads is a Tensor. Expected a mapping from name to tensor",
    ),
    "NumPy sum": (
        lambda k: dpt.noisy_mean({"w": X}, plan(), 0),
        TypeError,
        r"grads\['w'\] is a NumPy array. Expected a torch tensor",
    ),
    "sum on meta": (
        lambda k: dpt.noisy_mean({"w": torch.zeros(3, device="meta")}, plan(), 0),
        TypeError,
        r"grads\['w'\] is a Tensor on meta",
    ),
    # checkpoints
    "saved without model": (lambda k: k.save(k.at / "x", model=None), TypeError, "model is None"),
    "saved of another": (
        lambda k: k.save(k.at / "new", model=k.model),
        ValueError,
        "model is not the one that this engine trains",
    ),
    "loaded into None": (
        lambda k: k.load("run", (None, k.sgd)),
        TypeError,
        "model is None. Expected a torch.nn.Module",
    ),
    "loaded into another shape": (
        lambda k: k.load("run", like(1, 4)),
        ValueError,
        r"'params/weight' is \(1, 3\).* in the checkpoint and \(1, 4\)",
    ),
    "loaded into another optimizer": (
        lambda k: k.load("run", like(1, 3, kind=torch.optim.Adam)),
        ValueError,
        "Expected the same class",
    ),
    "loaded with another's optimizer": (
        lambda k: k.load("run", (nn.Linear(3, 1), k.sgd)),
        ValueError,
        "Expected the optimizer of this model",
    ),
    # porting
    "no model to port": (
        lambda k: port.match(None, {"w": jnp.zeros(3)}),
        TypeError,
        "The torch model is None. Expected a torch.nn.Module",
    ),
    "other shapes": (
        lambda k: port.to_jax(k.model, like={"kernel": jnp.zeros((4, 1)), "bias": jnp.zeros(1)}),
        ValueError,
        r"weight \(1, 3\) in torch would be \(3, 1\) in JAX, but kernel is \(4, 1\)",
    ),
    "other names": (
        lambda k: port.to_jax(k.model, like={"v": jnp.zeros((3, 1))}),
        ValueError,
        "pass mapping=",
    ),
    "names in a list": (
        lambda k: port.to_jax(k.model, like={"v": jnp.zeros((3, 1))}, mapping=["weight"]),
        TypeError,
        "mapping is a list. Expected a mapping from torch names",
    ),
    "layout": (
        lambda k: port.to_jax(
            k.model,
            like={"kernel": jnp.zeros((3, 1)), "bias": jnp.zeros(1)},
            mapping={"weight": ("kernel", "o i")},
        ),
        ValueError,
        "layout='o i' has no '->'. Expected torch's axes and JAX's",
    ),
    "weights to torch": (
        lambda k: port.to_torch(k.model.state_dict(), like=k.model),
        TypeError,
        "'(bias|weight)' is a Tensor. Expected an array",
    ),
    "stack to port to": (
        lambda k: port.checkpoint(k.at / "run", k.at / "new", to="tf", like=None),
        ValueError,
        "to='tf' is unknown. Expected one of jax, torch",
    ),
    "port of its own stack": (
        lambda k: port.checkpoint(k.at / "run", k.at / "new", to="torch", like=None),
        ValueError,
        "is a checkpoint of torch already",
    ),
    "port like nothing": (
        lambda k: port.checkpoint(k.at / "run", k.at / "new", to="jax", like=None),
        TypeError,
        "like is None. Expected dpj.TrainState.create",
    ),
}

ON_JAX = {
    "name of a loss for the engine": (
        lambda k: k.begin(loss_fn="mse"),
        TypeError,
        "loss_fn is a str. Expected a function of .params, .example.",
    ),
    "torch weights": (
        lambda k: k.begin(params={"w": torch.zeros(3)}),
        ValueError,
        "it holds a Tensor. Expected a floating JAX or NumPy array",
    ),
    "torch model": (lambda k: k.begin(params=nn.Linear(3, 1)), ValueError, "it holds a Linear"),
    "no parameters": (lambda k: k.begin(params={}), ValueError, "it holds nothing"),
    "integers": (
        lambda k: k.begin(params={"w": jnp.zeros(3), "n": jnp.int32(1)}),
        TypeError,
        "'n' is int32. Expected a real floating array; freeze it",
    ),
    "frozen names": (lambda k: k.begin(trainable="w"), TypeError, "trainable holds 'w'"),
    "frozen others": (lambda k: k.begin(trainable={"v": True}), ValueError, "structure of the par"),
    "function as optimizer": (
        lambda k: k.begin(optimizer=optax.sgd),
        TypeError,
        r"optimizer is a function. Expected an optax transformation, such as optax.sgd\(0.1\)",
    ),
    "torch optimizer": (
        lambda k: k.begin(optimizer=torch.optim.SGD([X0()], lr=0.1)),
        TypeError,
        "optimizer is a? ?.*SGD. Expected an optax",
    ),
    "optimizer of other parameters": (
        lambda k: k.begin(optimizer=optax.multi_transform({"a": k.sgd}, {"v": "a"})),
        ValueError,
        "optimizer.init failed on params: .*labels and masks have its structure",
    ),
    "loader as data": (
        lambda k: k.begin(data=DataLoader(TensorDataset(torch.zeros(4, 3)))),
        TypeError,
        "DataLoader, which can't be drawn from by index",
    ),
    "generator as data": (
        lambda k: k.begin(data=(row for row in X)),
        TypeError,
        "generator, which can't be drawn from by index.*np.asarray",
    ),
    "list of examples as data": (
        lambda k: k.begin(data=[(row, 1.0) for row in X]),
        TypeError,
        "data is a list of tuples.*an array for each argument of loss_fn",
    ),
    "torch data": (
        lambda k: k.begin(data=(torch.zeros(4, 3), torch.zeros(4))),
        TypeError,
        "holds a torch.Tensor.*np.asarray",
    ),
    "unequal data": (
        lambda k: k.begin(data=(X, Y[:3])),
        ValueError,
        r"batch\[0\]: 24, batch\[1\]: 3",
    ),
    "objects": (
        lambda k: k.begin(data=(np.array([None] * N), Y)),
        TypeError,
        "has dtype object. Expected numbers",
    ),
    "mesh": (lambda k: k.begin(data_sharding="data"), ValueError, "NamedSharding.mesh, Partition"),
    "key of nothing": (
        lambda k: k.begin(needs_key=True),
        TypeError,
        "keyword argument 'key'.*comes with needs_key=True",
    ),
    "parameters for a state": (
        lambda k: k.begin()[1](k.model, None),
        TypeError,
        "state is a dict. Expected the TrainState that make_private or the step before returned",
    ),
    "state for a batch": (
        lambda k: k.begin()[1](k.state, k.state),
        TypeError,
        "batch is a TrainState that this engine's loader did not draw",
    ),
    "rows for a batch": (lambda k: k.begin()[1](k.state, (X, Y)), TypeError, "batch is a tuple"),
    "jitted step": (
        lambda k: jax.vmap(lambda i: k.begin()[1](k.state, i))(jnp.arange(2)),
        TypeError,
        "step was called inside jit, scan or grad",
    ),
    "detached twice": (
        lambda k: [k.detach() for k in [k.begin()[0]] * 2],
        AccountingError,
        "The engine is detached",
    ),
    "torch batch": (
        lambda k: k.sum(lambda p, x: x, k.model, torch.zeros(4, 3)),
        TypeError,
        r"batch\[0\] is a Tensor. Expected a JAX or NumPy array",
    ),
    "key as number": (
        lambda k: k.sum(lambda p, x, y, key: y, k.model, X, Y, key=0),
        TypeError,
        r"key=0 is not one random key. Expected jax.random.key",
    ),
    "key left out": (
        lambda k: k.sum(lambda p, x, y, key: y, k.model, X, Y),
        TypeError,
        "missing a required argument: 'key'",
    ),
    "rule of nothing": (
        lambda k: dpj.register_rule("dot", None),
        TypeError,
        "'dot' and None. Expected",
    ),
    "torch sum": (
        lambda k: dpj.noisy_mean({"w": torch.zeros(3)}, plan(), 0),
        TypeError,
        r"grads\['w'\] is a Tensor. Expected a JAX or NumPy array",
    ),
    "noise of a number": (
        lambda k: dpj.add_noise(1.1),
        TypeError,
        "plan is a float. Expected a du",
    ),
    "state of no optimizer": (
        lambda k: dpj.TrainState.create(k.model, None),
        TypeError,
        "optimizer is None. Expected an optax transformation",
    ),
    "saved parameters": (
        lambda k: k.save(k.at / "new", state=k.model),
        TypeError,
        "is a dict. Exp",
    ),
    "loaded like parameters": (
        lambda k: k.load("run", k.model),
        TypeError,
        "like is a dict. Expected dpj.TrainState.create",
    ),
    "loaded like another shape": (
        lambda k: k.load("run", dpj.TrainState.create({"w": jnp.zeros(4)}, k.sgd)),
        ValueError,
        r"'params/w' is float32\[3\] in the checkpoint but float32\[4\] in `like`",
    ),
    "loaded like another optimizer": (
        lambda k: k.load("run", dpj.TrainState.create(k.model, optax.adam(0.1))),
        ValueError,
        "The checkpoint lacks .'optimizer/0.count'",
    ),
    "port to torch like a model": (
        lambda k: port.checkpoint(k.at / "run", k.at / "new", to="torch", like=nn.Linear(3, 1)),
        TypeError,
        "like is a Linear. Expected .model, optimizer",
    ),
}


@pytest.mark.parametrize("mistake", ON_BOTH)
def test_a_mistake_is_answered_alike_on_both_stacks(mistake, kits):
    call, error, words = ON_BOTH[mistake]
    for kit in (kits.torch, kits.jax):
        refused(lambda kit=kit: call(kit), error, words)


@pytest.mark.parametrize("mistake", ON_TORCH)
def test_a_mistake_on_torch_is_answered(mistake, kits):
    call, error, words = ON_TORCH[mistake]
    refused(lambda: call(kits.torch), error, words)


@pytest.mark.parametrize("mistake", ON_JAX)
def test_a_mistake_on_jax_is_answered(mistake, kits):
    call, error, words = ON_JAX[mistake]
    refused(lambda: call(kits.jax), error, words)
