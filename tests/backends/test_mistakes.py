# SPDX-License-Identifier: Apache-2.0
"""Mistakes of users with both stacks, in tables: same mistake, same kind of error, same words.

One row for each refusal, not for each way to it. Words that only an engine's plan knows are in
`test_engine_arguments.py`.
"""

from contextlib import suppress

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
from dualdp import AccountingError, port
from tests.mistakes import refused, untidy

N = 24
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
Y = X.sum(1)
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
NUMBERS = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}


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
        self.sums = {"w": torch.zeros(3)}
        self.begun = []

    def begin(self, data=None, **changes):
        model = changes.get("module", nn.Linear(3, 1))
        if isinstance(model, nn.Module) and "optimizer" not in changes:
            weights = list(model.parameters()) or [torch.zeros(1, requires_grad=True)]
            changes["optimizer"] = torch.optim.SGD(weights, lr=0.1)
        loader = DataLoader(TensorDataset(*self.arrays) if data is None else data, batch_size=6)
        numbers = {} if changes.get("plan") else NUMBERS
        self.begun.append(dpt.PrivacyEngine())
        return self.begun[-1], *self.begun[-1].make_private(
            **{"module": model, "data_loader": loader, **numbers, **changes}
        )

    def sum(self, loss=None, *args, **changes):
        loss = loss or (lambda model, x, y: (model(x).squeeze(-1) - y) ** 2)
        args = args or (self.model, *self.arrays)
        return dpt.clipped_grad_sum(loss, *args, **{"max_grad_norm": 1.0, **changes})

    def save(self, name, call=dpt.save_checkpoint, **changes):
        engine, model, optimizer, _ = self.begin()
        parts = {"model": model, "optimizer": optimizer, "engine": engine, **changes}
        call(self.at / name if name else name, **parts)
        engine.detach()

    def load(self, name, like=None, **changes):
        model, optimizer = like or (self.model, self.sgd)
        dpt.load_checkpoint(self.at / name, model=model, optimizer=optimizer, **changes)

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
        self.arrays, self.sums = (X, Y), {"w": jnp.zeros(3)}
        self.state = dpj.TrainState.create(self.model, self.sgd)

    @staticmethod
    def loss(params, x, y):
        return (x @ params["w"] - y) ** 2

    def begin(self, data=None, **changes):
        given = {"loss_fn": self.loss, "params": self.model, "optimizer": self.sgd}
        numbers = {} if changes.get("plan") else {"expected_batch_size": 6, **NUMBERS}
        engine = dpj.PrivacyEngine()
        data = self.arrays if data is None else data
        return engine, *engine.make_private(**{**given, "data": data, **numbers, **changes})

    def sum(self, loss=None, *args, **changes):
        args = (loss or self.loss, *(args or (self.model, *self.arrays)))
        return dpj.clipped_grad_sum(*args, **{"max_grad_norm": 1.0, "check": "off", **changes})

    def save(self, name, call=dpj.save_checkpoint, **changes):
        engine, _, state, _ = self.begin()
        call(self.at / name if name else name, **{"state": state, "engine": engine, **changes})
        engine.detach()

    def load(self, name, like=None, **changes):
        dpj.load_checkpoint(self.at / name, like=like or self.state, **changes)

    def close_and_step(self):
        engine, step, state, loader = self.begin(ledger=self.at / "jax.closed")
        batch = next(iter(loader))
        engine.ledger.close()
        step(state, batch)


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    made = {}
    for kind in (Torch, Jax):
        made[kind] = kit = kind(untidy(tmp_path_factory.mktemp(kind.__name__)))
        for run in ("run", "other", "recordless"):
            kit.save(run)
        (kit.at / "recordless.ledger").unlink()
    return made


@pytest.fixture(autouse=True)
def detached(kits):
    """No run, with its hooks and its twin, outlives a test."""
    yield
    for engine in kits[Torch].begun:
        with suppress(AccountingError):
            engine.detach()
    kits[Torch].begun.clear()


#: Error -> words of its message (a pattern) -> call with the kit of a stack.
ON_BOTH = {
    FileNotFoundError: {
        "its folder does not exist. Expected a new path": lambda k: k.begin(
            ledger=k.at / "no" / "ledger"
        ),
        "no does not exist. Expect": lambda k: k.load("no"),
        "recordless.ledger does": lambda k: k.load("recordless"),
        "holds no checkpoint. Expected a folder of save_sharded_checkpoint": lambda k: (
            k.face.consolidate_checkpoint(k.at / "folder", k.at / "new")
        ),
    },
    NotADirectoryError: {
        "its folder is a file": lambda k: k.begin(ledger=k.at / "file" / "ledger"),
    },
    ValueError: {
        "closed is closed, so a release": lambda k: k.close_and_step(),
        "has no examples": lambda k: k.begin(k.arrays[0][:0]),
        "The data has 24 examples but the plan has num_examples=23. Both must be the": lambda k: (
            k.begin(plan=plan(num_examples=23))
        ),
        "The plan has unit='user', but users is missing. Expected users=, the id": lambda k: (
            k.begin(plan=plan(unit="user", rows_per_unit=2))
        ),
        "with rows_per_unit=2, the rows of each item; what all rows of an item share": lambda k: (
            next(iter(k.begin(plan=plan(rows_per_unit=2))[-1]))
        ),
        "users came for a plan with unit='example', whose epsilon is that of one row": lambda k: (
            k.begin(users=range(24))
        ),
        "delta=2 is not a prob": lambda k: k.begin()[0].get_epsilon(2),
        "num_steps=-1 is out of": lambda k: k.begin()[0].record(-1),
        "=-1 is out of range": lambda k: k.sum(max_grad_norm=-1),
        "method='ghost' is unknown": lambda k: k.sum(method="ghost"),
        "mask is.*3.*24": lambda k: k.sum(mask=k.arrays[1][:3] > 0),
        "24.*3|3.*24": lambda k: k.sum(lambda m, x, y: x, k.model, k.arrays[0], k.arrays[1][:3]),
        "no tensor|no array": lambda k: k.sum(lambda m: 1, k.model),
        "path='' is no path": lambda k: k.save(""),
        "no safetensors file": lambda k: k.load("file"),
        "Expected the file of the same run": lambda k: k.load("run", ledger=k.at / "other.ledger"),
        "mapping={}": lambda k: k.load("run", mapping={}),
    },
    TypeError: {
        "optimizer is None.*lr|op": lambda k: k.begin(optimizer=None),
        "plan is a str. Expected a dualdp.Pr": lambda k: k.begin(plan="plan"),
        "Expected a one-dimensional array of integers, the id of the user of each row": lambda k: (
            k.begin(users=["a"] * 24)
        ),
        "loss_fn is a str. Expected a func": lambda k: k.sum("mse"),
        r"loss_fn takes \(model, x\), but is called with .*, 3 in all: too many": lambda k: k.sum(
            lambda model, x: x
        ),
        "returned a? ?tuple.*has_aux=True": lambda k: k.sum(lambda model, x, y: (y, 1)),
        "has_aux=True, but loss_fn returned a": lambda k: k.sum(has_aux=True),
        "check=True is a bool. Expected one of alw": lambda k: k.sum(check=True),
        "max_memory='1GB' is a str": lambda k: k.sum(max_memory="1GB"),
        "is an? .*iterator|holds an? .*iterator": lambda k: k.sum(
            lambda m, x, y: x, k.model, iter(X), k.arrays[1]
        ),
        r"grads is a ClippedGradSum. Expected .*clipped_grad_sum\(...\).grads": lambda k: (
            k.face.noisy_mean(k.sum(), plan(), 0)
        ),
        "is a str": lambda k: k.face.noisy_mean({"w": "a"}, plan(), 0),
        "engine is None. Expected the run's PrivacyEngine": lambda k: k.save("new", engine=None),
    },
    AccountingError: {
        "No step was taken": lambda k: k.begin()[0].stages(),
        "no loaded run": lambda k: k.face.PrivacyEngine().resume(
            **({"data_loader": 1} if k.face is dpt else {})
        ),
        "step=4 is past the plan's num_steps=4": lambda k: k.face.noisy_mean(k.sums, plan(), 4),
        "Call make_private first": lambda k: k.save("new", engine=k.face.PrivacyEngine()),
    },
    FileExistsError: {
        "file exists. Expected a new folder, or that of earlier checkpoints": lambda k: k.save(
            "file", k.face.save_sharded_checkpoint
        ),
    },
}


def without_forward(kit):
    _, _, optimizer, loader = kit.begin()
    next(iter(loader))
    optimizer.step()


def another_batch(kit):
    _, model, optimizer, loader = kit.begin()
    x, y = next(iter(loader))
    F.mse_loss(model(x[:1]).squeeze(-1), y[:1]).backward()
    optimizer.step()


class Endless(IterableDataset):
    """A stream."""

    def __iter__(self):
        return iter(X)


def like(inputs, kind=torch.optim.SGD):
    """A model of so many inputs, with its optimizer."""
    model = nn.Linear(inputs, 1)
    return model, kind(model.parameters(), lr=0.1)


LEAVES = {"kernel": jnp.zeros((3, 1)), "bias": jnp.zeros(1)}
ON_TORCH = {
    TypeError: {
        "module is the class Linear. Exp": lambda k: k.begin(module=nn.Linear, optimizer=k.sgd),
        r"made by torch.jit.script, and takes no hooks. Expected nn.Sequential\(it\)": lambda k: (
            k.begin(module=torch.jit.script(nn.Linear(3, 1)))
        ),
        "is a TensorDataset. Exp": lambda k: k.begin(data_loader=TensorDataset(*k.arrays)),
        "is an Endless.*map-style one": lambda k: k.begin(Endless()),
        r"is a tuple, whose items are columns, not examples.*TensorDataset\(x, y\)": lambda k: (
            k.begin(k.arrays)
        ),
        "is a DataLoader. Expected the loader that make_private returned": lambda k: (
            dpt.BatchMemoryManager(
                data_loader=DataLoader(X), max_physical_batch_size=3, optimizer=k.sgd
            )
        ),
        r"a NumPy array of shape \(24, 3\). Expected torch tensors; use torch.as_ten": lambda k: (
            k.sum(lambda m, x: x, k.model, X)
        ),
        "is not callable": lambda k: dpt.register_rule("linear", None),
        "mapping is a list. Expected a mapping from torch names": lambda k: port.to_jax(
            k.model, like={"v": jnp.zeros((3, 1))}, mapping=["weight"]
        ),
        "'(bias|weight)' is a Tensor. Expected an array": lambda k: port.to_torch(
            k.model.state_dict(), like=k.model
        ),
    },
    ValueError: {
        r"not hold the trainable parameters \['weight', 'bias'\]. Give it all": lambda k: k.begin(
            module=nn.Linear(3, 1), optimizer=k.sgd
        ),
        "no trainable parameter. Expected at least one with requires_grad": lambda k: k.begin(
            module=nn.ReLU()
        ),
        r"'weight' has no numbers: it is on the meta device.*to_empty\(device=\)": lambda k: (
            k.begin(module=nn.Linear(3, 1, device="meta"))
        ),
        "'weight' has no numbers: it is not made before the first batch.*run a batch": lambda k: (
            k.begin(module=nn.LazyLinear(1))
        ),
        "batch_size=None.*Expected a plain DataLoader": lambda k: k.begin(
            data_loader=DataLoader(X, batch_size=None)
        ),
        r'shape \(\). Expected \(24,\).*reduction="none"': lambda k: k.sum(
            lambda m, x, y: F.mse_loss(m(x)[:, 0], y)
        ),
        "on the meta device, which has no numbers": lambda k: k.sum(
            lambda m, x: x, k.model, torch.ones(3, 3, device="meta")
        ),
        "pass numbers as Python floats": lambda k: k.sum(
            lambda m, x, y: x, k.model, k.arrays[0], torch.tensor(0.5)
        ),
        r"max_grad_norm has shape \(2,\)": lambda k: k.sum(max_grad_norm=torch.ones(2)),
        "model is not the one that this engine trains": lambda k: k.save("new", model=k.model),
        r"'params/weight' is \(1, 3\).* in the checkpoint and \(1, 4\)": lambda k: k.load(
            "run", like(4)
        ),
        "Expected the same class": lambda k: k.load("run", like(3, torch.optim.Adam)),
        "Expected the optimizer of this model": lambda k: k.load("run", (nn.Linear(3, 1), k.sgd)),
        "is a checkpoint of torch already": lambda k: port.checkpoint(
            k.at / "run", k.at / "new", to="torch", like=None
        ),
        "layout='o i' has no '->'. Expected torch's axes and JAX's": lambda k: port.to_jax(
            k.model, like=LEAVES, mapping={"weight": ("kernel", "o i")}
        ),
        r"weight \(1, 3\) in torch would be \(3, 1\) in JAX, but kernel is \(4, 1\)": lambda k: (
            port.to_jax(k.model, like={**LEAVES, "kernel": jnp.zeros((4, 1))})
        ),
    },
    RuntimeError: {
        r"No forward was recorded. Call the model on the batch.*then loss.back": without_forward,
        "Expected the whole batch, once": another_batch,
    },
}

ON_JAX = {
    ValueError: {
        "it holds a Tensor. Expected a floating JAX or NumPy array": lambda k: k.begin(
            params={"w": torch.zeros(3)}
        ),
        "structure of the par": lambda k: k.begin(trainable={"v": True}),
        "optimizer.init failed on params: .*labels and masks have its structure": lambda k: k.begin(
            optimizer=optax.multi_transform({"a": k.sgd}, {"v": "a"})
        ),
        "NamedSharding.mesh, Partition": lambda k: k.begin(data_sharding="data"),
        r"'params/w' is float32\[3\] in the checkpoint but float32\[4\] in `like`": lambda k: (
            k.load("run", dpj.TrainState.create({"w": jnp.zeros(4)}, k.sgd))
        ),
        "The checkpoint lacks .'optimizer/0.count'": lambda k: k.load(
            "run", dpj.TrainState.create(k.model, optax.adam(0.1))
        ),
    },
    TypeError: {
        "'n' is int32. Expected a real floating array; freeze it": lambda k: k.begin(
            params={"w": jnp.zeros(3), "n": jnp.int32(1)}
        ),
        "trainable holds 'w'": lambda k: k.begin(trainable="w"),
        "generator, which can't be drawn from by index.*np.asarray": lambda k: k.begin(
            row for row in X
        ),
        "data is a list of tuples.*an array for each argument of loss_fn": lambda k: k.begin(
            [(row, 1.0) for row in X]
        ),
        "has dtype object. Expected numbers": lambda k: k.begin((np.array([None] * N), Y)),
        "keyword argument 'key'.*comes with needs_key=True": lambda k: k.begin(needs_key=True),
        "state is a dict. Expected the TrainState that make_private or the step before": lambda k: (
            k.begin()[1](k.model, None)
        ),
        "batch is a tuple": lambda k: k.begin()[1](k.state, (X, Y)),
        "step was called inside jit, scan or grad": lambda k: jax.vmap(
            lambda i: k.begin()[1](k.state, i)
        )(jnp.arange(2)),
        r"key=0 is not one random key. Expected jax.random.key": lambda k: k.sum(
            lambda p, x, y, key: y, key=0
        ),
        "'dot' and None. Expected": lambda k: dpj.register_rule("dot", None),
        "is a dict. Exp": lambda k: k.save("new", state=k.model),
        "like is a dict. Expected dpj.TrainState.create": lambda k: k.load("run", k.model),
        "like is a Linear. Expected .model, optimizer": lambda k: port.checkpoint(
            k.at / "run", k.at / "new", to="torch", like=nn.Linear(3, 1)
        ),
    },
    AccountingError: {
        "The engine is detached": lambda k: [k.detach() for k in [k.begin()[0]] * 2],
    },
}


def rows(table):
    """The cases of a table, under their words."""
    cases = [(error, *row) for error, calls in table.items() for row in calls.items()]
    return pytest.mark.parametrize(("error", "words", "call"), cases, ids=[c[1] for c in cases])


@rows(ON_BOTH)
def test_a_mistake_is_answered_alike_on_both_stacks(error, words, call, kits):
    for kit in kits.values():
        refused(lambda kit=kit: call(kit), error, words)


@rows(ON_TORCH)
def test_a_mistake_on_torch_is_answered(error, words, call, kits):
    refused(lambda: call(kits[Torch]), error, words)


@rows(ON_JAX)
def test_a_mistake_on_jax_is_answered(error, words, call, kits):
    refused(lambda: call(kits[Jax]), error, words)
