# SPDX-License-Identifier: Apache-2.0
"""Small models behind `PrivateStep` on both stacks, for the tests of trust."""

import numpy as np

from dualdp import PrivacyPlan

N, INPUTS, HIDDEN, CLASSES = 60, 8, 16, 4
RNG = np.random.default_rng(5)
X = RNG.normal(size=(N, INPUTS)).astype(np.float32)
Y = RNG.integers(0, CLASSES, N)


def plan_of(**changes):
    """A plan whose numbers at step 0 are tested."""
    plain = {"num_examples": N, "expected_batch_size": 10, "num_steps": 5, "seed": 1}
    numbers = {"noise_multiplier": 0.9, "max_grad_norm": 0.5, "delta": 1e-5}
    return PrivacyPlan(**{**plain, **numbers, **changes})


def torch_step(cls=None, tied=False, mode="auto", **changes):
    """The torch engine on an MLP, or on a layer that is used twice."""
    import torch
    from torch import nn

    from dualdp_torch.testing import EngineStep

    torch.manual_seed(0)
    if tied:
        model, loss_fn = torch_tied(), lambda m, x, y: m(x)
    else:
        model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))

        def loss_fn(model, x, y):
            return nn.functional.cross_entropy(model(x), y, reduction="none")

    data = torch.from_numpy(X), torch.from_numpy(Y)
    return (cls or EngineStep)(model, loss_fn, data, plan_of(**changes), grad_sample_mode=mode)


def torch_tied(copies=1):
    """Sum of two uses of one layer; with two copies each use has its own."""
    import torch
    from torch import nn

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.uses = nn.ModuleList(nn.Linear(INPUTS, 1, bias=False) for _ in range(copies))

        def forward(self, x):
            first, second = self.uses[0], self.uses[-1]
            return (torch.exp(0.1 * first(x)) + second(x + 1))[:, 0]

    torch.manual_seed(0)
    tied = Tied()
    for use in tied.uses:
        use.load_state_dict(tied.uses[0].state_dict())
    return tied


def jax_step(cls=None, method="auto", **changes):
    """The JAX engine on the same MLP."""
    import jax
    import jax.numpy as jnp

    from dualdp_jax.testing import EngineStep

    rng = np.random.default_rng(0)
    params = {
        "first": rng.normal(size=(INPUTS, HIDDEN)).astype(np.float32) / 3,
        "bias": np.zeros(HIDDEN, np.float32),
        "second": rng.normal(size=(HIDDEN, CLASSES)).astype(np.float32) / 4,
    }

    def loss_fn(params, x, y):
        hidden = jnp.tanh(x @ params["first"] + params["bias"])
        return -jax.nn.log_softmax(hidden @ params["second"])[y]

    return (cls or EngineStep)(params, loss_fn, (X, Y), plan_of(**changes), method=method)


STEPS = {"torch": torch_step, "jax": jax_step}
