# SPDX-License-Identifier: Apache-2.0
"""Opacus and jax_privacy behind `dualdp.testing.PrivateStep`, set up as their own examples do."""

import numpy as np

from dualdp.audit.protocol import CANARY_FACTOR, LOSS_FACTOR
from dualdp.testing import Claims, Event, Release

N, INPUTS, HIDDEN, CLASSES = 60, 8, 16, 4
RNG = np.random.default_rng(5)
X = RNG.normal(size=(N, INPUTS)).astype(np.float32)
Y = RNG.integers(0, CLASSES, N)


class OpacusStep:
    """`opacus.PrivacyEngine` with a plain loop; the canaries are an `nn.Embedding`."""

    def __init__(self, grad_sample_mode="hooks"):
        self.claims = Claims(0.9, 0.5)
        self.num_examples = N
        self._mode = grad_sample_mode
        self._history = []

    def _model(self, num_canaries):
        import torch
        from torch import nn

        torch.manual_seed(0)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, CLASSES)
                if num_canaries:
                    self.canaries = nn.Embedding(num_canaries, 1)

            def forward(self, x, row):
                out = self.second(torch.tanh(self.first(x)))
                return out, self.canaries(row)[:, 0] if num_canaries else None

        return Model()

    def _run(self, model, data, *, loss_fn, batch_size, steps, poisson, noise_multiplier):
        import warnings

        import torch
        from opacus import PrivacyEngine

        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(*data), batch_size=batch_size
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = PrivacyEngine(accountant="rdp")
            private, optimizer, loader = engine.make_private(
                module=model,
                optimizer=optimizer,
                data_loader=loader,
                noise_multiplier=noise_multiplier,
                max_grad_norm=self.claims.max_grad_norm,
                poisson_sampling=poisson,
                loss_reduction="sum",
                grad_sample_mode=self._mode,
            )
            done = 0
            while done < steps:
                for batch in loader:
                    optimizer.zero_grad()
                    loss_fn(private, *batch).sum().backward()
                    optimizer.step()
                    self._history = engine.accountant.history
                    yield {n: p.grad.clone() for n, p in model.named_parameters()}, batch
                    done += 1
                    if done == steps:
                        break

    def clipped_sum(self, rows, factors):
        import torch
        from torch.nn import functional

        def loss_fn(model, x, y, factor):
            return functional.cross_entropy(model(x, None)[0], y, reduction="none") * factor

        index = torch.tensor(rows)
        factors = torch.tensor(factors, dtype=torch.float32)
        data = torch.from_numpy(X)[index], torch.from_numpy(Y)[index], factors
        ((grads, _),) = self._run(
            self._model(0),
            data,
            loss_fn=loss_fn,
            batch_size=len(rows),
            steps=1,
            poisson=False,
            noise_multiplier=0.0,
        )
        return torch.cat([g.flatten().double() for g in grads.values()]).numpy()

    def releases(self, num_steps, *, rows, num_canaries, expected_batch_size, seed):
        import torch
        from torch.nn import functional

        if expected_batch_size < 1:
            raise NotImplementedError("its loader has no expected batch size below 1")

        def loss_fn(model, x, y, row, _):
            out, canary = model(x, row)
            own = functional.cross_entropy(out, y, reduction="none")
            return LOSS_FACTOR * own + CANARY_FACTOR * self.claims.max_grad_norm * canary

        index = np.arange(len(rows))
        data = [torch.from_numpy(part) for part in (X[index % N], Y[index % N], rows, index)]
        model = self._model(num_canaries)
        if seed is not None:
            torch.manual_seed(seed)
        for grads, batch in self._run(
            model,
            data,
            loss_fn=loss_fn,
            batch_size=round(expected_batch_size),
            steps=num_steps,
            poisson=True,
            noise_multiplier=self.claims.noise_multiplier,
        ):
            canaries = grads.pop("canaries.weight").numpy()
            yield Release(canaries, [g.numpy() for g in grads.values()], batch[3].numpy())

    def events(self):
        return [Event(sigma, rate) for sigma, rate, n in self._history for _ in range(n)]


class JaxPrivacyStep:
    """`clipped_grad`, `gaussian_privatizer` and `CyclicPoissonSampling` in a plain loop."""

    def __init__(self):
        self.claims = Claims(0.9, 0.5)
        self.num_examples = N
        rng = np.random.default_rng(0)
        self._params = {
            "first": rng.normal(size=(INPUTS, HIDDEN)).astype(np.float32) / 3,
            "second": rng.normal(size=(HIDDEN, CLASSES)).astype(np.float32) / 4,
        }
        self._events = []

    def _own(self, params, x, y):
        import jax
        import jax.numpy as jnp

        return -jax.nn.log_softmax(jnp.tanh(x @ params["first"]) @ params["second"])[y]

    def _clipped(self, loss_fn, num_arguments):
        import jax
        import jax_privacy

        return jax.jit(
            jax_privacy.clipped_grad(
                loss_fn,
                l2_clip_norm=self.claims.max_grad_norm,
                batch_argnums=tuple(range(1, 1 + num_arguments)),
                keep_batch_dim=False,
            )
        )

    def clipped_sum(self, rows, factors):
        import jax

        def loss_fn(params, x, y, factor):
            return self._own(params, x, y) * factor

        rows = list(rows)
        grads = self._clipped(loss_fn, 3)(
            self._params, X[rows], Y[rows], np.array(factors, np.float32)
        )
        return np.concatenate([np.ravel(g).astype(float) for g in jax.tree.leaves(grads)])

    def releases(self, num_steps, *, rows, num_canaries, expected_batch_size, seed):
        import jax
        import jax.numpy as jnp
        from jax_privacy import batch_selection, noise_addition

        def loss_fn(params, x, y, row):
            canary = params["canaries"][row]
            scale = CANARY_FACTOR * self.claims.max_grad_norm
            return LOSS_FACTOR * self._own(params["model"], x, y) + scale * canary

        seed = np.random.SeedSequence().entropy % (1 << 31) if seed is None else seed
        params = {"model": self._params, "canaries": jnp.zeros(num_canaries)}
        clipped = self._clipped(loss_fn, 3)
        privatizer = noise_addition.gaussian_privatizer(
            stddev=self.claims.noise_stddev, prng_key=jax.random.key(seed)
        )
        state, self._events = privatizer.init(params), []
        rate = expected_batch_size / len(rows)
        sampling = batch_selection.CyclicPoissonSampling(sampling_prob=rate, iterations=num_steps)
        update = jax.jit(privatizer.update)
        size = 8  # few shapes, few compilations: padding rows are masked by a gradient of zero
        for batch in sampling.batch_iterator(len(rows), rng=seed):
            batch = np.asarray(batch)
            padded = np.concatenate([batch, np.zeros(-len(batch) % size, batch.dtype)])
            sums = jax.tree.map(jnp.zeros_like, params)
            if len(padded):
                at = padded % N
                sums = clipped(params, X[at], Y[at], rows[padded])
                for _ in range(len(padded) - len(batch)):
                    sums = jax.tree.map(jnp.subtract, sums, clipped(params, X[:1], Y[:1], rows[:1]))
            noisy, state = update(sums, state)
            self._events.append(Event(self.claims.noise_multiplier, rate))
            yield Release(noisy["canaries"], jax.tree.leaves(noisy["model"]), batch)

    def events(self):
        return self._events
