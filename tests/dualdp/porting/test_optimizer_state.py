# SPDX-License-Identifier: Apache-2.0
"""Optimizer state crosses: 50 updates, half of them on the other stack, are the same updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import dualdp.jax as dpj
import dualdp.torch as dpt
from dualdp import checkpoint, port
from dualdp_jax.checkpoint import single_file as jax_file
from dualdp_torch.checkpoint import single_file as torch_file
from dualdp_torch.checkpoint.optimizer_state import named_state, restorer
from tests.cases import pairs
from tests.dualdp.porting.test_layouts import jax_net
from tests.mistakes import refused

SGD, ADAM, DECAY = torch.optim.SGD, torch.optim.Adam, optax.add_decayed_weights
NESTEROV = optax.sgd(0.01, 0.9, nesterov=True)
BC = {"weight_decay": 0.1, "floor": 0.1}
#: Name -> torch's class and settings, and optax's transformation with the same updates.
CASES = {
    "sgd": (SGD, {}, optax.sgd(0.01)),
    "momentum": (SGD, {"momentum": 0.9}, optax.sgd(0.01, momentum=0.9)),
    "nesterov_decay": (
        SGD,
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        optax.chain(DECAY(0.01), NESTEROV),
    ),
    "dampening": (
        SGD,
        {"momentum": 0.9, "dampening": 0.3},
        optax.chain(optax.scale(0.7), optax.sgd(0.01, 0.9)),
    ),
    "adam": (ADAM, {"betas": (0.8, 0.95), "eps": 1e-3}, optax.adam(0.01, 0.8, 0.95, eps=1e-3)),
    "adam_l2": (ADAM, {"weight_decay": 0.1}, optax.chain(DECAY(0.1), optax.adam(0.01))),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}, optax.adamw(0.01, weight_decay=0.1)),
    "adam_bc": (dpt.AdamBC, BC, dpj.adam_bc(0.01, **BC)),
}
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
STEPS = 50


def noise_for(optimizer):
    """What an optimizer takes beside the gradients."""
    return {"noise_stddev": 0.3} if isinstance(optimizer, dpt.AdamBC) else {}


class Torch:
    """A layer, its optimizer and given gradients."""

    def __init__(self, case, dtype):
        kind, options, self.optax = CASES[case]
        torch.manual_seed(0)
        self.model = nn.Linear(3, 4).to(getattr(torch, dtype))
        self.optimizer = kind(self.model.parameters(), lr=0.01, **options)

    def step(self, grads):
        self.model.weight.grad, self.model.bias.grad = (torch.as_tensor(g) for g in grads)
        self.optimizer.step(**noise_for(self.optimizer))

    def values(self):
        return [p.detach().numpy().copy() for p in self.model.parameters()]


class Jax:
    """The same, with optax: its own transformation, or another one."""

    def __init__(self, twin, optimizer=None):
        like = {"kernel": np.zeros((3, 4), twin.values()[0].dtype), "bias": np.zeros(4)}
        params = port.to_jax(twin.model, like=jax.tree.map(jnp.asarray, like))
        self.optimizer = optax.with_extra_args_support(optimizer or twin.optax)
        self.noise = noise_for(twin.optimizer)
        self.state = dpj.TrainState.create(params, self.optimizer)
        self.update = jax.jit(self._update)

    def _update(self, grads, state):
        updates, new = self.optimizer.update(grads, state.opt_state, state.params, **self.noise)
        params = optax.apply_updates(state.params, updates)
        return state._replace(params=params, opt_state=new)

    def step(self, grads):
        grads = {"kernel": jnp.asarray(grads[0].T), "bias": jnp.asarray(grads[1])}
        self.state = self.update(grads, self.state)

    def values(self):
        return [np.asarray(self.state.params["kernel"]).T, np.asarray(self.state.params["bias"])]


#: What the document of a checkpoint has beside the optimizer's and the model's parts.
DOCUMENT = {
    **dict.fromkeys(checkpoint.RUN),
    "bfloat16": [],
    "settings": {"checks": 0.0},
    "trained": ["bias", "kernel"],
    "parameters": ["bias", "kernel"],
}


def to_jax(model, optimizer, like, position=1):
    """State like `like` of what a checkpoint of torch would hold."""
    tensors, described = torch_file.run_tensors(model, optimizer), named_state(optimizer, model)[1]
    document = DOCUMENT | {
        "stack": "torch",
        "position": position,
        "optimizer": described,
        "layout": dpt.weights.description(model),
        "trained": [name for name, p in model.named_parameters() if p.requires_grad],
    }
    arrays = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
    arrays, _ = jax_file.converted(arrays, document, like, None)
    return jax_file.restored_state(arrays, position, like)


def to_torch(state, twin):
    """Load what a checkpoint of JAX would hold into torch's layer and optimizer."""
    arrays = {name: np.asarray(array) for name, array in jax_file.named_arrays(state).items()}
    like = twin.model, twin.optimizer
    arrays, document = torch_file.converted(arrays, DOCUMENT | {"stack": "jax"}, like, None)
    tensors = {name: torch_file.to_tensor(array, False) for name, array in arrays.items()}
    parts = {
        part: {n.removeprefix(part): t for n, t in tensors.items() if n.startswith(part)}
        for part in ("params/", "optimizer/")
    }
    twin.model.load_state_dict(parts["params/"])
    restorer(twin.optimizer, twin.model, parts["optimizer/"], document["optimizer"])()


def gradients(dtype):
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        yield [rng.normal(size=shape).astype(dtype) for shape in ((4, 3), (4,))]


def assert_close(ours, theirs, dtype):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype == np.dtype(dtype)
        np.testing.assert_allclose(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("case", "dtype", "first"),
    [
        *((case, "float64", 1) for case in CASES),
        ("adam", "float32", 1),
        *((case, "float64", 0) for case in ("momentum", "adam_bc")),  # a fresh optimizer
    ],
)
def test_50_updates_with_two_crossings_are_50_updates(case, dtype, first):
    """To optax after 1 update, back to torch after 26: at the end, where torch alone would be."""
    with jax.enable_x64(dtype == "float64"):
        pure, run = Torch(case, dtype), Torch(case, dtype)
        for number, grads in enumerate(gradients(dtype)):
            if number == first:
                here, run = run, Jax(run)
                run.state = to_jax(here.model, here.optimizer, run.state, position=number)
            if number == 26:
                there, run = run, Torch(case, dtype)
                to_torch(there.state, run)
            pure.step(grads)
            run.step(grads)
            assert_close(run.values(), pure.values(), dtype)


@pytest.mark.parametrize(("case", "expected"), [("momentum", 7), ("adam", 1)])
def test_counters_are_torchs_or_the_position(case, expected):
    """SGD counts nothing, so a schedule beside it goes on at the run's position."""
    here = Torch(case, "float32")
    rate = optax.linear_schedule(1.0, 0.0, 10)
    optimizer = optax.adam(rate) if case == "adam" else optax.sgd(rate, momentum=0.9)
    like = Jax(here, optimizer).state
    here.step(next(gradients("float32")))
    state = to_jax(here.model, here.optimizer, like, position=7)
    counts = {int(leaf) for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == ()}
    assert counts == {expected}


TWO = optax.chain(optax.trace(0.9), optax.trace(0.9))
RATES = optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9)
RATE = r"optax's state has hyperparams/learning_rate \(\), which torch.optim does not keep"


@pytest.mark.parametrize(
    ("case", "optimizer", "message"),
    [
        ("adam", optax.sgd(0.1, momentum=0.9), r"Adam keeps \['mu', 'nu'\] .* has \['trace'\]"),
        ("sgd", optax.sgd(0.1, momentum=0.9), r"SGD keeps \[\] .* has \['trace'\]"),
        ("momentum", optax.sgd(0.1), r"SGD keeps \['trace'\] .* has \[\]"),
        ("momentum", TWO, r"has \['trace', 'trace'\]"),
        ("momentum", RATES, RATE),
    ],
)
def test_other_optimizers_are_refused(case, optimizer, message):
    here = Torch(case, "float32")
    here.step(next(gradients("float32")))
    state = Jax(here, optimizer).state
    refused(lambda: to_jax(here.model, here.optimizer, state), ValueError, message)


NAMESAKE = type("AdamW", (torch.optim.SGD,), {"__module__": "elsewhere"})


def test_what_optax_has_not_is_refused():
    here, kinds = Torch("sgd", "float32"), torch.optim
    like, parameters = Jax(here).state, list(here.model.parameters())
    for other, words in (
        (kinds.Adagrad(parameters), "is a Adagrad, whose state can't be carried over"),
        (kinds.RMSprop(parameters), "is a RMSprop, whose state can't be carried over"),
        (kinds.Adam(parameters, amsgrad=True), "has amsgrad=True for 'weight'"),
        (NAMESAKE(parameters, lr=0.1), "is a elsewhere.AdamW, whose state can't be carried over"),
    ):
        refused(lambda: to_jax(here.model, other, like), ValueError, words)  # noqa: B023


def test_half_a_state_and_uneven_counts_are_refused():
    def cross(here):
        return to_jax(here.model, here.optimizer, Jax(here).state)

    half, uneven = Torch("momentum", "float32"), Torch("adam", "float32")
    half.model.weight.grad = torch.ones(4, 3)
    half.optimizer.step()
    refused(lambda: cross(half), ValueError, r"lacks 'momentum_buffer' for \['bias'\]")
    uneven.step(next(gradients("float32")))
    uneven.optimizer.state[uneven.model.bias]["step"] += 1
    refused(lambda: cross(uneven), ValueError, r"have seen \[1, 2\] updates. Expected one number")
    fresh = Torch("dampening", "float32")
    refused(lambda: cross(fresh), ValueError, r"lacks 'momentum_buffer' .* take a step first")


def test_two_trained_biases_have_no_one_momentum():
    pair = next(pair for pair in pairs.PAIRS if pair.name == "lstm")
    net = pairs.TorchNet(pair)
    params, _ = jax_net(pair, "linen", jnp.zeros(pair.x))
    like = dpj.TrainState.create(params, optax.sgd(0.1, momentum=0.9))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    words = r"layer.bias_hh_l0 \(16,\) is trained and has state"
    refused(lambda: to_jax(net, optimizer, like), ValueError, words)
    nothing = dpj.TrainState.create(params, optax.sgd(0.1))
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    assert to_jax(net, plain, nothing).opt_state == nothing.opt_state


def test_a_state_from_jax_lies_in_rows():
    """Fused kernels read memory in its order: moments of a transposed kernel were wrong there."""
    twin = Torch("adamw", "float32")
    jaxs = Jax(twin)
    jaxs.step([np.ones((4, 3), np.float32), np.ones(4, np.float32)])
    to_torch(jaxs.state, twin)
    for state in twin.optimizer.state.values():
        assert state["exp_avg"].is_contiguous()
        assert state["exp_avg_sq"].is_contiguous()
    back = port.to_torch(jaxs.state.params, like=twin.model)
    assert all(value.is_contiguous() for value in back.values())
