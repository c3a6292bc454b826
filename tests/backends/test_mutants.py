# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the real engines: `check_private_step` finds every one of them."""

import dataclasses
import importlib
from functools import cache

import numpy as np
import pytest

from dualdp import AccountingError, ExactnessError, PrivacyPlan, correlated, exactness
from dualdp.plan import samplers
from dualdp.randomness import fresh_bits
from dualdp.testing import Event, check_private_step
from tests.conftest import BACKENDS
from tests.private_steps import STEPS, torch_step, torch_tied


def engine_step(stack):
    return importlib.import_module(f"dualdp_{stack}.testing").EngineStep


def with_plan(stack, **factors):
    """An engine that runs a plan with other numbers than it accounts."""

    class Mutant(engine_step(stack)):
        def plan_of(self, *make, **sizes):
            plan = super().plan_of(*make, **sizes)
            numbers = {name: getattr(plan, f"{name}_at")(0) * f for name, f in factors.items()}
            return dataclasses.replace(plan, **numbers)

        def events(self):
            sigma = self.claims.noise_multiplier
            return [Event(sigma, event.sample_rate) for event in super().events()]

    return STEPS[stack](Mutant)


def inverted_factors(stack, patch):
    patch.setattr(
        importlib.import_module(f"dualdp_{stack}.per_sample.clip"),
        "factors_for",
        lambda clipping, norms, bound, xp: xp.clip(norms / bound, None, 1.0),
    )
    return STEPS[stack]()


def batches(sampler, factor=1.0):
    """Batches of another sampler, or of another size, than what is accounted."""

    @cache
    def other(plan):
        size = plan.expected_batch_size_at(0) * factor
        sizes = {"accountant": "pld", "sampler": sampler, "expected_batch_size": size}
        if sampler == "fixed_size":
            sizes["neighboring_relation"] = "replace"
        return dataclasses.replace(plan, **sizes)

    def mutant(stack, patch):
        loader = importlib.import_module(f"dualdp_{stack}.training.loader")
        right = loader.drawn_indices
        patch.setattr(
            loader, "drawn_indices", lambda plan, bits, step: right(other(plan), bits, step)
        )
        return STEPS[stack]()

    return mutant


def noise_every_tenth_step(stack, patch):
    """The noise of the tenth step before."""
    bits = {}
    drawn = lambda seed, step: bits.setdefault(step % 10, fresh_bits())  # noqa: E731
    patch.setattr(f"dualdp_{stack}.training.step.noise_bits", drawn)
    return STEPS[stack]()


def mean_taken_for_a_sum(stack, patch):
    """torch: losses are added up, but the engine multiplies by the batch size as for a mean."""
    engine = importlib.import_module("dualdp_torch.training.engine").PrivacyEngine
    right = engine.make_private

    def confused(self, **arguments):
        return right(self, **{**arguments, "loss_reduction": "mean", "checks": 0.0})

    patch.setattr(engine, "make_private", confused)
    return STEPS[stack]()


def without_cross_term(stack, patch):
    """torch: a layer used twice, clipped by the root of the sum of the uses' squared norms."""

    class Mutant(engine_step("torch")):
        def clipped_sum(self, rows, factors):
            self.model = torch_tied(copies=2)
            return super().clipped_sum(rows, factors).reshape(2, -1).sum(0)

    return torch_step(Mutant, tied=True)


def empty_batches_skipped(stack, patch):
    data = importlib.import_module(f"dualdp_{stack}.training.loader")
    if stack == "torch":
        right = data.PlannedLoader.draws
        patch.setattr(
            data.PlannedLoader,
            "draws",
            lambda self, *a: (d for d in right(self, *a) if d.mask.any()),
        )
    else:
        right = data.PlannedLoader.__iter__
        patch.setattr(
            data.PlannedLoader,
            "__iter__",
            lambda self: (b for b in right(self) if any(c.mask.any() for c in b.chunks)),
        )
    return STEPS[stack]()


WINDOW = correlated.window((1.0, -0.6, -0.2))
BAND = correlated.band((1.0, 0.6, 0.3))
FIXED = {"sampler": "fixed_order", "correlation": WINDOW}
CYCLIC = {"sampler": "cyclic_poisson", "correlation": BAND, "min_separation": 4}


def other_rows(change, plan):
    """Correlated noise from other rows than those that were kept."""

    def mutant(stack, patch):
        noise = importlib.import_module(f"dualdp_{stack}.noise.noise")
        right = noise.next_noise
        patch.setattr(
            noise, "next_noise", lambda s, i, z, kept, std: right(s, i, z, change(kept), std)
        )
        return STEPS[stack](**plan)

    return mutant


def other_sensitivity(number, plan):
    """Noise for another sensitivity than that of the unit's participations."""

    def mutant(stack, patch):
        patch.setattr(PrivacyPlan, "sensitivity", property(number))
        return STEPS[stack](**plan)

    return mutant


def of_one_column(plan):
    return float(np.linalg.norm(plan.correlation.strategy(plan.num_steps)))


def of_another_order(stack, patch):
    """A new order in each pass, accounted as one order for the run."""
    patch.setitem(samplers.SAMPLERS, "fixed_order", samplers.shuffle)
    return STEPS[stack](**FIXED)


def of_no_class(stack, patch):
    """Poisson batches of everybody, accounted as classes that take turns."""
    patch.setitem(samplers.SAMPLERS, "cyclic_poisson", samplers.poisson)
    return STEPS[stack](**CYCLIC)


#: Fault -> (how it is planted, the check that finds it).
MUTANTS = {
    "window lacks its last draw": (other_rows(lambda kept: kept[:-1], FIXED), "run"),
    "window shifted by a step": (other_rows(lambda kept: (*kept[1:], *kept[-1:]), FIXED), "run"),
    "band without its rows": (other_rows(lambda kept: (), CYCLIC), "run"),
    "sensitivity of one participation": (other_sensitivity(of_one_column, FIXED), "run"),
    "sensitivity 1 for a band": (other_sensitivity(lambda plan: 1.0, CYCLIC), "run"),
    "another order in each pass": (of_another_order, "run"),
    "Poisson batches as classes": (of_no_class, "run"),
    "noise x 0.98": (lambda stack, _: with_plan(stack, noise_multiplier=0.98), "run"),
    "clip + 5 %": (
        lambda stack, _: with_plan(stack, max_grad_norm=1.05, noise_multiplier=1 / 1.05),
        "sensitivity",
    ),
    "clip by min(norm / C, 1)": (inverted_factors, "sensitivity"),
    "tied norm without cross term": (without_cross_term, "sensitivity"),
    "q x 1.2": (batches("poisson", 1.2), "run"),
    "shuffled batches as Poisson": (batches("shuffle"), "run"),
    "fixed-size batches as Poisson": (batches("fixed_size"), "run"),
    "noise reused every tenth step": (noise_every_tenth_step, "run"),
    "mean taken for a sum": (mean_taken_for_a_sum, "sensitivity"),
    "empty batch skipped": (empty_batches_skipped, "empty"),
}
#: In JAX a loss belongs to one example and a tied weight is one array: these can't be written.
ONLY_TORCH = ("mean taken for a sum", "tied norm without cross term")
CASES = [
    *((name, "torch") for name in MUTANTS),
    *(
        pytest.param(name, "jax", marks=pytest.mark.slow)
        for name in MUTANTS
        if name not in ONLY_TORCH
    ),
]


@pytest.mark.parametrize(("name", "stack"), CASES)
def test_every_mutant_is_killed(name, stack, monkeypatch):
    """Those of clipping without the spot checks of the engine."""
    plant, check = MUTANTS[name]
    if check == "sensitivity":
        monkeypatch.setattr(exactness, "RATE", 0.0)
    step = plant(stack, monkeypatch)
    try:
        report = check_private_step(step, checks=[check], seed=0)
    except (AccountingError, ExactnessError):  # the ledger refuses a skipped step, a check a sum
        assert check != "sensitivity"
    else:
        assert not report.passed, name


@pytest.mark.parametrize("stack", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_the_correct_implementation_passes(stack):
    """All checks together."""
    report = check_private_step(STEPS[stack](), seed=0)
    assert report.passed, report
    assert all(check.passed for check in report.checks)


@pytest.mark.slow
@pytest.mark.parametrize("stack", BACKENDS)
@pytest.mark.parametrize(
    "changes",
    [
        {"noise": "portable", "physical_batch_size": 7},
        {"noise": "secure", "seed": None},
        {"sampler": "fixed_size", "neighboring_relation": "replace"},
        {"sampler": "balls_in_bins"},
        {"sampler": "shuffle"},
        FIXED,
        CYCLIC,
        {"sampler": "fixed_order", "correlation": correlated.blt(decays=(0.8,), scales=(0.4,))},
    ],
    ids=str,
)
def test_other_noise_and_samplers_pass_too(stack, changes):
    seed = None if changes.get("noise") == "secure" else 0
    step = STEPS[stack](**changes)
    report = check_private_step(step, checks=["sensitivity", "run"], seed=seed)
    assert report.passed, report
