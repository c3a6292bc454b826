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

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import AccountingError, port
from tests.backends.runs import FACES, START, Linear, Run, X, Y, loss_fn, make_plan
from tests.mistakes import refused, untidy

NUMBERS = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


class Kit:
    """Calls of one stack, each with something wrong, on 60 rows of 5 numbers.

    Args:
        stack: "torch" or "jax".
        at: folder of `untidy`, and of three runs; the ledger of one is missing.
    """

    def __init__(self, stack, at):
        self.stack, self.at, self.face, self.begun = stack, at, FACES[stack], []
        self.arrays, self.sums = (X, Y), {"w": jnp.zeros(3)}
        self.model, self.sgd = {"w": jnp.zeros(5)}, optax.sgd(0.1)
        if stack == "torch":
            self.arrays = torch.from_numpy(X), torch.from_numpy(Y)
            self.model, self.sums = Linear(START), {"w": torch.zeros(3)}
            self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for name in ("run", "other", "recordless"):
            self.save(name)
        (at / "recordless.ledger").unlink()

    def run(self, **changes):
        numbers = {} if changes.get("plan") else NUMBERS
        self.begun.append(Run(self.stack, **numbers, **changes))
        return self.begun[-1]

    def begin(self, data=None, **changes):
        """An engine that has begun a run, on these data."""
        if data is not None and self.stack == "torch":
            changes["data_loader"] = DataLoader(data, batch_size=6)
        elif data is not None:
            changes["data"] = data
        return self.run(**changes).engine

    def sum(self, loss=None, *args, **changes):
        usual = (lambda model, x, y: model(x) - y) if self.stack == "torch" else loss_fn
        args = (loss or usual, *(args or (self.model, *self.arrays)))
        return self.face.clipped_grad_sum(*args, **{"max_grad_norm": 1.0, **changes})

    def save(self, name, call="save_checkpoint", **changes):
        self.run().save(self.at / name if name else name, call, **changes)

    def load(self, name, like=None, **changes):
        model, optimizer = like or (self.model, self.sgd)
        if self.stack == "torch":
            dpt.load_checkpoint(self.at / name, model=model, optimizer=optimizer, **changes)
        else:
            like = dpj.TrainState.create(model, optimizer)
            dpj.load_checkpoint(self.at / name, like=like, **changes)

    def close_and_step(self):
        run = self.run(ledger=self.at / "closed")
        batch = next(iter(run.loader))
        run.engine.ledger.close()
        run.step(batch)


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    return {stack: Kit(stack, untidy(tmp_path_factory.mktemp(stack))) for stack in FACES}


@pytest.fixture(autouse=True)
def detached(kits):
    """No run, with its hooks and its twin, outlives a test."""
    yield
    for kit in kits.values():
        for run in kit.begun:
            with suppress(AccountingError):
                run.engine.detach()
        kit.begun.clear()


def plan(**changes):
    return make_plan(**{"num_steps": 4, "noise": "fast", **changes})


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
        "its folder is a file": lambda k: k.begin(ledger=k.at / "file" / "ledger")
    },
    ValueError: {
        "closed is closed, so a release": lambda k: k.close_and_step(),
        "has no examples": lambda k: k.begin(k.arrays[0][:0]),
        "The data has 60 examples but the plan has num_examples=23. Both must be the": lambda k: (
            k.begin(plan=plan(num_examples=23))
        ),
        "The plan has unit='user', but users is missing. Expected users=, the id": lambda k: (
            k.begin(plan=plan(unit="user", rows_per_unit=2))
        ),
        "with rows_per_unit=2, the rows of each item; what all rows of an item share": lambda k: (
            next(iter(k.run(plan=plan(rows_per_unit=2)).loader))
        ),
        "users came for a plan with unit='example', whose epsilon is that of one row": lambda k: (
            k.begin(users=range(60))
        ),
        "delta=2 is not a prob": lambda k: k.begin().get_epsilon(2),
        "num_steps=-1 is out of": lambda k: k.begin().record(-1),
        "=-1 is out of range": lambda k: k.sum(max_grad_norm=-1),
        "method='ghost' is unknown": lambda k: k.sum(method="ghost"),
        "mask is.*3.*60": lambda k: k.sum(mask=k.arrays[1][:3] > 0),
        "60.*3|3.*60": lambda k: k.sum(lambda m, x, y: x, k.model, k.arrays[0], k.arrays[1][:3]),
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
            k.begin(users=["a"] * 60)
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
        "No step was taken": lambda k: k.begin().stages(),
        "no loaded run": lambda k: k.face.PrivacyEngine().resume(
            **({"data_loader": 1} if k.stack == "torch" else {})
        ),
        "step=4 is past the plan's num_steps=4": lambda k: k.face.noisy_mean(k.sums, plan(), 4),
        "Call make_private first": lambda k: k.save("new", engine=k.face.PrivacyEngine()),
    },
    FileExistsError: {
        "file exists. Expected a new folder, or that of earlier checkpoints": lambda k: k.save(
            "file", "save_sharded_checkpoint"
        )
    },
}


def without_forward(kit):
    run = kit.run()
    next(iter(run.loader))
    run.optimizer.step()


def another_batch(kit):
    run = kit.run()
    x, y = next(iter(run.loader))
    run.step((x[:1], y[:1]))


class Endless(IterableDataset):
    """A stream."""

    def __iter__(self):
        return iter(X)


def like(inputs, kind=torch.optim.SGD):
    """A model of so many inputs, with its optimizer."""
    model = Linear(np.zeros(inputs, np.float32))
    return model, kind(model.parameters(), lr=0.1)


LEAVES = {"kernel": jnp.zeros((3, 1)), "bias": jnp.zeros(1)}
ON_TORCH = {
    TypeError: {
        "module is the class Linear. Exp": lambda k: k.begin(module=nn.Linear, optimizer=k.sgd),
        r"made by torch.jit.script, and takes no hooks. Expected nn.Sequential\(it\)": lambda k: (
            k.begin(module=torch.jit.script(nn.Linear(3, 1)), optimizer=k.sgd)
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
        r"a NumPy array of shape \(60, 5\). Expected torch tensors; use torch.as_ten": lambda k: (
            k.sum(lambda m, x: x, k.model, X)
        ),
        "is not callable": lambda k: dpt.register_rule("linear", None),
        "mapping is a list. Expected a mapping from torch names": lambda k: port.to_jax(
            nn.Linear(3, 1), like=LEAVES, mapping=["weight"]
        ),
        "'w' is a Tensor. Expected an array": lambda k: port.to_torch(
            k.model.state_dict(), like=k.model
        ),
    },
    ValueError: {
        r"not hold the trainable parameters \['w'\]. Give it all": lambda k: k.begin(
            module=Linear(START), optimizer=k.sgd
        ),
        "no trainable parameter. Expected at least one with requires_grad": lambda k: k.begin(
            module=nn.ReLU(), optimizer=k.sgd
        ),
        r"'weight' has no numbers: it is on the meta device.*to_empty\(device=\)": lambda k: (
            k.begin(module=nn.Linear(3, 1, device="meta"), optimizer=k.sgd)
        ),
        "'weight' has no numbers: it is not made before the first batch.*run a batch": lambda k: (
            k.begin(module=nn.LazyLinear(1), optimizer=k.sgd)
        ),
        "batch_size=None.*Expected a plain DataLoader": lambda k: k.begin(
            data_loader=DataLoader(X, batch_size=None)
        ),
        r'shape \(\). Expected \(60,\).*reduction="none"': lambda k: k.sum(
            lambda m, x, y: F.mse_loss(m(x), y)
        ),
        "on the meta device, which has no numbers": lambda k: k.sum(
            lambda m, x: x, k.model, torch.ones(3, 3, device="meta")
        ),
        "pass numbers as Python floats": lambda k: k.sum(
            lambda m, x, y: x, k.model, k.arrays[0], torch.tensor(0.5)
        ),
        r"max_grad_norm has shape \(2,\)": lambda k: k.sum(max_grad_norm=torch.ones(2)),
        "model is not the one that this engine trains": lambda k: k.save("new", model=k.model),
        r"'params/w' is \(5,\).* in the checkpoint and \(4,\)": lambda k: k.load("run", like(4)),
        "Expected the same class": lambda k: k.load("run", like(5, torch.optim.Adam)),
        "Expected the optimizer of this model": lambda k: k.load("run", (Linear(START), k.sgd)),
        "is a checkpoint of torch already": lambda k: port.checkpoint(
            k.at / "run", k.at / "new", to="torch", like=None
        ),
        "layout='o i' has no '->'. Expected torch's axes and JAX's": lambda k: port.to_jax(
            nn.Linear(3, 1), like=LEAVES, mapping={"weight": ("kernel", "o i")}
        ),
        r"weight \(1, 3\) in torch would be \(3, 1\) in JAX, but kernel is \(4, 1\)": lambda k: (
            port.to_jax(nn.Linear(3, 1), like={**LEAVES, "kernel": jnp.zeros((4, 1))})
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
        r"'params/w' is float32\[5\] in the checkpoint but float32\[4\] in `like`": lambda k: (
            k.load("run", ({"w": jnp.zeros(4)}, k.sgd))
        ),
        "The checkpoint lacks .'optimizer/0.count'": lambda k: k.load(
            "run", (k.model, optax.adam(0.1))
        ),
    },
    TypeError: {
        "'n' is int32. Expected a real floating array; freeze it": lambda k: k.begin(
            params={"w": jnp.zeros(5), "n": jnp.int32(1)}
        ),
        "trainable holds 'w'": lambda k: k.begin(trainable="w"),
        "generator, which can't be drawn from by index.*np.asarray": lambda k: k.begin(
            row for row in X
        ),
        "DataLoader, which can't be drawn from by index as the sampler does": lambda k: k.begin(
            DataLoader(TensorDataset(torch.from_numpy(X)), batch_size=4)
        ),
        "torch.Tensor, which can't be drawn from by index as the sampler does": lambda k: k.begin(
            (torch.from_numpy(X), torch.from_numpy(Y))
        ),
        "data is a list of tuples.*an array for each argument of loss_fn": lambda k: k.begin(
            [(row, 1.0) for row in X]
        ),
        "has dtype object. Expected numbers": lambda k: k.begin((np.array([None] * 60), Y)),
        "keyword argument 'key'.*comes with needs_key=True": lambda k: k.begin(needs_key=True),
        "state is a dict. Expected the TrainState that make_private or the step before": lambda k: (
            k.run().train_step(k.model, None)
        ),
        "batch is a tuple": lambda k: k.run().step((X, Y)),
        "step was called inside jit, scan or grad": lambda k: jax.vmap(k.run().step)(jnp.arange(2)),
        r"key=0 is not one random key. Expected jax.random.key": lambda k: k.sum(
            lambda p, x, y, key: y, key=0
        ),
        "'dot' and None. Expected": lambda k: dpj.register_rule("dot", None),
        "is a dict. Exp": lambda k: k.save("new", state=k.model),
        "like is a dict. Expected dpj.TrainState.create": lambda k: dpj.load_checkpoint(
            k.at / "run", like=k.model
        ),
        "like is a Linear. Expected .model, optimizer": lambda k: port.checkpoint(
            k.at / "run", k.at / "new", to="torch", like=nn.Linear(3, 1)
        ),
    },
    AccountingError: {
        "The engine is detached": lambda k: [engine.detach() for engine in [k.begin()] * 2]
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
    refused(lambda: call(kits["torch"]), error, words)


@rows(ON_JAX)
def test_a_mistake_on_jax_is_answered(error, words, call, kits):
    refused(lambda: call(kits["jax"]), error, words)
