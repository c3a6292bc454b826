# SPDX-License-Identifier: Apache-2.0
"""Optimizer state crosses: 50 updates, half of them on the other stack, are the same updates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import dualdp.torch as dpt
from dualdp import port

CASES = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "nesterov_decay": (
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    "dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    "adam": (torch.optim.Adam, {"betas": (0.8, 0.95), "eps": 1e-3}),
    "adam_l2": (torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "adam_bc": (dpt.AdamBC, {"weight_decay": 0.1, "floor": 0.1}),
}
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
STEPS = 50


def noise_for(optimizer):
    """What an optimizer takes beside the gradients."""
    return {"noise_stddev": 0.3} if isinstance(optimizer, dpt.AdamBC) else {}


class Torch:
    """A layer, its optimizer and given gradients."""

    def __init__(self, case, dtype):
        kind, options = CASES[case]
        torch.manual_seed(0)
        self.model = nn.Linear(3, 4).to(getattr(torch, dtype))
        self.optimizer = kind(self.model.parameters(), lr=0.01, **options)

    def step(self, grads):
        self.model.weight.grad, self.model.bias.grad = (torch.as_tensor(g) for g in grads)
        self.optimizer.step(**noise_for(self.optimizer))

    def values(self):
        return [p.detach().numpy().copy() for p in self.model.parameters()]


class Jax:
    """The same, with optax."""

    def __init__(self, twin):
        like = {"kernel": np.zeros((3, 4), twin.values()[0].dtype), "bias": np.zeros(4)}
        self.params = port.to_jax(twin.model, like=jax.tree.map(jnp.asarray, like))
        self.optimizer = optax.with_extra_args_support(port.to_optax(twin.optimizer))
        self.noise = noise_for(twin.optimizer)
        self.state = self.optimizer.init(self.params)
        self.update = jax.jit(self._update)

    def _update(self, grads, state, params):
        updates, state = self.optimizer.update(grads, state, params, **self.noise)
        return optax.apply_updates(params, updates), state

    def step(self, grads):
        grads = {"kernel": jnp.asarray(grads[0].T), "bias": jnp.asarray(grads[1])}
        self.params, self.state = self.update(grads, self.state, self.params)

    def values(self):
        return [np.asarray(self.params["kernel"]).T, np.asarray(self.params["bias"])]


def gradients(dtype):
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        yield [rng.normal(size=shape).astype(dtype) for shape in ((4, 3), (4,))]


def assert_close(ours, theirs, dtype):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype == np.dtype(dtype)
        np.testing.assert_allclose(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "float64") for case in CASES), ("adam", "float32")]
)
def test_50_updates_with_two_crossings_are_50_updates(case, dtype):
    """To optax after 1 update, back to torch after 26: at the end, where torch alone would be."""
    with jax.enable_x64(dtype == "float64"):
        pure, run = Torch(case, dtype), Torch(case, dtype)
        for number, grads in enumerate(gradients(dtype)):
            if number == 1:
                here, run = run, Jax(run)
                run.state = port.optimizer_to_jax(
                    here.optimizer, here.model, like=run.state, params=run.params
                )
            if number == 26:
                there, run = run, Torch(case, dtype)
                run.model.load_state_dict(port.to_torch(there.params, like=run.model))
                port.optimizer_to_torch(
                    there.state, there.params, optimizer=run.optimizer, model=run.model
                )
            pure.step(grads)
            run.step(grads)
            assert_close(run.values(), pure.values(), dtype)


@pytest.mark.parametrize("case", ["momentum", "adam_bc"])
def test_a_fresh_optimizer_crosses_too(case):
    with jax.enable_x64(True):
        pure = Torch(case, "float64")
        run = Jax(pure)
        run.state = port.optimizer_to_jax(
            pure.optimizer, pure.model, like=run.state, params=run.params
        )
        for grads in gradients("float64"):
            pure.step(grads)
            run.step(grads)
        assert_close(run.values(), pure.values(), "float64")


def test_a_schedule_counts_on():
    """optax's schedule beside SGD: torch keeps no count, so steps= says it."""
    here = Torch("momentum", "float32")
    there = Jax(here)
    optimizer = optax.sgd(optax.linear_schedule(1.0, 0.0, 10), momentum=0.9)
    like = optimizer.init(there.params)
    here.step(next(gradients("float32")))
    with pytest.raises(ValueError, match=r"optax's 1/count counts updates, .* Expected steps="):
        port.optimizer_to_jax(here.optimizer, here.model, like=like, params=there.params)
    state = port.optimizer_to_jax(
        here.optimizer, here.model, like=like, params=there.params, steps=7
    )
    assert [int(leaf) for leaf in jax.tree.leaves(state) if leaf.shape == ()] == [7]


def crossing(case, optimizer):
    """A torch optimizer after a step into the state of an optax one."""
    here = Torch(case, "float32")
    here.step(next(gradients("float32")))
    there = Jax(Torch("sgd", "float32"))
    return port.optimizer_to_jax(
        here.optimizer, here.model, like=optimizer.init(there.params), params=there.params
    )


@pytest.mark.parametrize(
    ("case", "optimizer", "message"),
    [
        ("adam", optax.sgd(0.1, momentum=0.9), r"Adam keeps \['mu', 'nu'\] .* has \['trace'\]"),
        ("sgd", optax.sgd(0.1, momentum=0.9), r"SGD keeps \[\] .* has \['trace'\]"),
        ("momentum", optax.sgd(0.1), r"SGD keeps \['trace'\] .* has \[\]"),
        (
            "momentum",
            optax.chain(optax.trace(0.9), optax.trace(0.9)),
            r"has \['trace', 'trace'\]",
        ),
        (
            "momentum",
            optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9),
            r"optax's state has hyperparams/learning_rate \(\), which torch.optim does not keep",
        ),
    ],
)
def test_other_optimizers_are_refused(case, optimizer, message):
    with pytest.raises(ValueError, match=message):
        crossing(case, optimizer)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.Adagrad(p), "is a torch.optim.adagrad.Adagrad, whose state|Adagrad"),
        (lambda p: torch.optim.RMSprop(p), "is a RMSprop, whose state can't be carried over"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "has amsgrad=True for 'the parameters'"),
        (lambda p: torch.optim.SGD([{"params": [q]} for q in p], lr=1.0), "has 2 groups"),
    ],
)
def test_to_optax_refuses_what_optax_has_not(make, message):
    with pytest.raises(ValueError, match=message):
        port.to_optax(make(list(nn.Linear(2, 2).parameters())))


def test_half_a_state_and_uneven_counts_are_refused():
    here = Torch("momentum", "float32")
    like = Jax(here)
    here.model.bias.requires_grad_(True)
    here.model.weight.grad = torch.ones(4, 3)
    here.optimizer.step()
    with pytest.raises(ValueError, match=r"lacks 'momentum_buffer' for \['bias'\]"):
        port.optimizer_to_jax(here.optimizer, here.model, like=like.state, params=like.params)
    here = Torch("adam", "float32")
    like = Jax(here)
    here.step(next(gradients("float32")))
    here.optimizer.state[here.model.bias]["step"] += 1
    with pytest.raises(ValueError, match=r"have seen \[1, 2\] updates. Expected one number"):
        port.optimizer_to_jax(here.optimizer, here.model, like=like.state, params=like.params)


def test_dampening_needs_a_first_step():
    here = Torch("dampening", "float32")
    like = Jax(here)
    with pytest.raises(ValueError, match=r"lacks 'momentum_buffer' .* take a step first"):
        port.optimizer_to_jax(here.optimizer, here.model, like=like.state, params=like.params)


def test_two_trained_biases_have_no_one_momentum():
    from tests.cases import pairs
    from tests.dualdp.porting.test_layouts import jax_net

    pair = next(pair for pair in pairs.PAIRS if pair.name == "lstm")
    net = pairs.TorchNet(pair)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    params, _ = jax_net(pair, "linen", jnp.zeros(pair.x))
    like = optax.sgd(0.1, momentum=0.9).init(params)
    with pytest.raises(ValueError, match=r"layer.bias_hh_l0 \(16,\) is trained and has state"):
        port.optimizer_to_jax(optimizer, net, like=like, params=params)
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    nothing = optax.sgd(0.1).init(params)
    assert port.optimizer_to_jax(plain, net, like=nothing, params=params) == nothing


def test_a_state_from_jax_lies_in_rows():
    """Fused kernels read memory in its order: moments of a transposed kernel were wrong there."""
    twin = Torch("adamw", "float32")
    jaxs = Jax(twin)
    grads = [np.ones((4, 3), np.float32), np.ones(4, np.float32)]
    jaxs.step(grads)
    port.optimizer_to_torch(jaxs.state, jaxs.params, optimizer=twin.optimizer, model=twin.model)
    for state in twin.optimizer.state.values():
        assert state["exp_avg"].is_contiguous()
        assert state["exp_avg_sq"].is_contiguous()
    assert all(
        value.is_contiguous() for value in port.to_torch(jaxs.params, like=twin.model).values()
    )


def test_settings_may_be_tensors_and_namesakes_are_refused():
    twin = Torch("sgd", "float32")
    given = port.to_optax(torch.optim.SGD(twin.model.parameters(), lr=torch.tensor(0.5)))
    updates, _ = given.update(jnp.ones(2), given.init(jnp.ones(2)))
    np.testing.assert_allclose(updates, -0.5)
    namesake = type("AdamW", (torch.optim.SGD,), {"__module__": "elsewhere"})
    with pytest.raises(ValueError, match=r"is elsewhere.AdamW. Expected one of torch.optim"):
        port.to_optax(namesake(twin.model.parameters(), lr=0.1))
