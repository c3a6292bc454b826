# SPDX-License-Identifier: Apache-2.0
"""DP-SGD in NumPy behind `dualdp.testing.PrivateStep`, with faults that can be switched on."""

import math

import numpy as np

from dualdp.audit.protocol import CANARY_FACTOR, LOSS_FACTOR
from dualdp.testing import Claims, Event, Release
from tests.closeness import factors_of

#: Faults, each of which a released or published implementation has had, and the checks that see it.
FAULTS = {
    "noise x 0.98": "run",
    "clipping off": "sensitivity",
    "clip + 5 %": "sensitivity",
    "clip by min(norm / C, 1)": "sensitivity",
    "tied norm without cross term": "sensitivity",
    "q x 1.2": "run",
    "shuffled batches as Poisson": "run",
    "fixed-size batches as Poisson": "run",
    "noise reused every tenth step": "run",
    "one noise for two parameters": "run",
    "no noise in one parameter": "run",
    "mean taken for a sum": "sensitivity",
    "noise divided twice": "run",
    "empty batch skipped": "empty",
    "empty batch without noise": "empty",
    "step not accounted": "run",
    "step not released": "run",
    "accounted with more noise": "run",
    "nan lets everything through": "sensitivity",
    "batch repeats every tenth step": "run",
    "pairs drawn together": "run",
    "uniform noise": "run",
    "another batch than drawn": "run",
}


class NumpyStep:
    """A model whose two uses of one weight give each example the gradient u + v."""

    def __init__(self, fault="", sampler="poisson", noise_multiplier=1.0, max_grad_norm=0.7):
        self.fault = fault
        self.claims = Claims(noise_multiplier, max_grad_norm, sampler)
        rng = np.random.default_rng(7)
        self.num_examples = 40
        self.uses = rng.normal(size=(2, 40, 30)) + 0.5  # the uses point the same way
        self._events = []

    # ------------------------------------------------------------------ clipping

    def _factors(self, norms):
        bound = self.claims.max_grad_norm * (1.05 if self.fault == "clip + 5 %" else 1)
        if self.fault == "clipping off":
            return np.ones_like(norms)
        if self.fault == "clip by min(norm / C, 1)":
            return np.minimum(norms / bound, 1)
        factors = factors_of(norms, bound)
        return factors if self.fault.startswith("nan") else np.where(np.isfinite(norms), factors, 0)

    def clipped_sum(self, rows, factors):
        with np.errstate(all="ignore"):
            uses = self.uses[:, list(rows)] * np.asarray(factors)[:, None]
            grads = uses.sum(0)
            norms = np.linalg.norm(grads, axis=1)
            if self.fault == "tied norm without cross term":
                norms = np.sqrt((uses**2).sum((0, 2)))
            scale = len(rows) if self.fault == "mean taken for a sum" else 1.0
            clipped = grads * self._factors(norms)[:, None]
        if not self.fault.startswith("nan"):
            clipped = np.where(np.isfinite(norms)[:, None], clipped, 0)
        return scale * clipped.sum(0)

    # ------------------------------------------------------------------ a run

    def _draw(self, rng, step, count, size):
        rate = size / count
        sampler = self.claims.sampler
        if self.fault == "q x 1.2":
            rate *= 1.2
        if self.fault == "shuffled batches as Poisson" or sampler in ("shuffle", "balls_in_bins"):
            bins = math.ceil(1 / rate - 1e-9)
            if step % bins == 0:
                self._order = rng.permutation(count)
                self._bin = rng.integers(bins, size=count)
            if sampler == "balls_in_bins":
                return np.flatnonzero(self._bin == step % bins)
            return np.sort(np.array_split(self._order, bins)[step % bins])
        if self.fault == "fixed-size batches as Poisson" or sampler == "fixed_size":
            return np.sort(rng.choice(count, round(size), replace=False))
        if self.fault == "batch repeats every tenth step":
            return np.flatnonzero(np.random.default_rng(step % 10).random(count) < rate)
        coins = rng.random(count)
        if self.fault == "pairs drawn together":
            coins[1::2] = coins[: len(coins[1::2]) * 2 : 2]
        return np.flatnonzero(coins < rate)

    def _noise(self, rng, step, length):
        noise = rng.normal(size=length)
        if self.fault == "uniform noise":
            noise = rng.uniform(-math.sqrt(3), math.sqrt(3), size=length)
        if self.fault == "noise reused every tenth step":
            noise = np.random.default_rng(step % 10).normal(size=length)
        if self.fault == "one noise for two parameters":
            noise[-30:] = noise[:30]
        if self.fault == "no noise in one parameter":
            noise[-30:] = 0
        return noise * (0.98 if self.fault == "noise x 0.98" else 1.0)

    def releases(self, num_steps, *, rows, num_canaries, expected_batch_size, seed):
        rng = np.random.default_rng(seed)
        count, bound, self._events = len(rows), self.claims.max_grad_norm, []
        own = LOSS_FACTOR * self.uses.sum(0)[np.arange(count) % self.num_examples]
        norms = np.sqrt((own**2).sum(1) + (CANARY_FACTOR * bound) ** 2)
        factors = self._factors(norms)
        for step in range(num_steps):
            batch = self._draw(rng, step, count, expected_batch_size)
            if self.fault == "empty batch skipped" and not len(batch):
                continue
            if self.fault != "step not accounted" or step != 3:
                extra = 1.1 if self.fault == "accounted with more noise" else 1.0
                sigma = self.claims.noise_multiplier * extra
                self._events.append(Event(sigma, expected_batch_size / count))
            if self.fault == "step not released" and step == 3:
                continue
            total = np.zeros(num_canaries + 30)
            total[rows[batch]] = CANARY_FACTOR * bound * factors[batch]
            total[num_canaries:] = (own[batch] * factors[batch, None]).sum(0)
            noise = self.claims.noise_stddev * self._noise(rng, step, len(total))
            if self.fault == "noise divided twice":
                noise = noise / expected_batch_size
            if self.fault != "empty batch without noise" or len(batch):
                total = total + noise
            if self.fault == "another batch than drawn":
                batch = (batch + 1) % count
            yield Release(total[:num_canaries], [total[num_canaries:]], batch)

    def events(self):
        return self._events
