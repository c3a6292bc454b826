# SPDX-License-Identifier: Apache-2.0
"""An accountant of one's own: zero-concentrated differential privacy, without amplification.

It knows nothing of sampling, so it charges every release as if everyone had joined the batch. That
is sound, and far from tight: what the built-in accountant saves is the point of Poisson sampling.
"""

import math

import dualdp
from dualdp import accountants, mechanisms

RUN = {
    "num_examples": 10_000,
    "expected_batch_size": 200,
    "num_steps": 500,
    "noise_multiplier": 5.0,
    "max_grad_norm": 1.0,
    "delta": 1e-5,
}


class ConcentratedAccountant(accountants.Accountant):
    """rho of zCDP: a Gaussian release with noise multiplier z costs 1 / (2 z^2); rho adds up.

    Source: Bun & Steinke 2016 ("Concentrated differential privacy"), propositions 1.3 and 1.6.
    """

    name = "concentrated"

    def _check(self, event):
        if not isinstance(event, mechanisms.Gaussian | mechanisms.PoissonSubsampledGaussian):
            raise dualdp.AccountingError(
                f"{event} is not a Gaussian release. Expected sampler='poisson'."
            )

    def rho(self):
        """The sum over all releases."""
        shift = self.group_size * (2.0 if self.neighboring_relation == "replace" else 1.0)
        pairs = [(event.noise_multiplier / shift, count) for event, count in self.history]
        return sum(count / (2 * z * z) if z else math.inf for z, count in pairs)

    def get_delta(self, *, epsilon):
        """The smallest delta at which rho gives this epsilon."""
        rho = self.rho()
        return (
            math.exp(-((epsilon - rho) ** 2) / (4 * rho)) if 0 < rho < epsilon else float(rho > 0)
        )

    def epsilon_bounds(self, *, delta, rtol=None):
        """(0, e, e)."""
        rho = self.rho()
        bound = rho + 2 * math.sqrt(rho * math.log(1 / delta))
        return 0.0, bound, bound


def main():
    accountants.register("concentrated", ConcentratedAccountant)
    ours = dualdp.PrivacyPlan(**RUN, accountant="concentrated").epsilon()
    tight = dualdp.PrivacyPlan(**RUN, accountant="pld").epsilon()
    print(f"epsilon {ours:.2f} without amplification, {tight:.2f} with: both hold")


if __name__ == "__main__":
    main()
