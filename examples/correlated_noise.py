# SPDX-License-Identifier: Apache-2.0
"""Independent or correlated noise: what each would give for one run, before it begins.

Computes the noise in the model for DP-SGD and four kinds of correlated noise, all at the same
epsilon and delta, and draws it against epsilon.
"""

import sys
from pathlib import Path

from matplotlib.figure import Figure

import dualdp

RUN = {
    **{"num_examples": 60_000, "expected_batch_size": 512, "num_steps": 2_400},
    **{"max_grad_norm": 1.0, "delta": 1e-6},
}
SHOWN = (
    ("independent", "poisson"),
    ("window of 8", "fixed_order"),
    ("window of 8", "balls_in_bins"),
    ("blt of 3", "fixed_order"),
    ("band of 16", "cyclic_poisson"),
)


def errors_at(epsilons):
    """Noise in the model of each shown kind, one number for each epsilon."""
    curves = {kind: [] for kind in SHOWN}
    for epsilon in epsilons:
        plan = dualdp.PrivacyPlan.calibrate(target_epsilon=epsilon, **RUN)
        advice = dualdp.correlated.advise(plan)
        for option in advice.options:
            if (option.name, option.sampler) in curves:
                curves[option.name, option.sampler].append(option.error)
        print(advice.verdict)
    return curves


def draw(epsilons, curves):
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for (name, sampler), errors in curves.items():
        is_independent = name == "independent"
        label = f"{name}, {sampler}" + " (DP-SGD)" * is_independent
        axes.plot(epsilons, errors, "--" if is_independent else "-", marker="o", label=label)
    axes.set(
        xlabel=f"epsilon at delta = {RUN['delta']:g}",
        ylabel="noise in the model, per coordinate",
        title="60,000 examples, batches of 512, 2,400 steps",
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    return figure


def main():
    epsilons = [1.0] if "--toy" in sys.argv else [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
    curves = errors_at(epsilons)
    if "--toy" not in sys.argv:
        folder = Path(__file__).parents[1] / "docs" / "images"
        draw(epsilons, curves).savefig(folder / "correlated_noise.png", dpi=110)
    independent, *_, band = curves.values()
    shares = [one / other for one, other in zip(band, independent, strict=True)]
    print("band of 16 / independent:", [round(share, 2) for share in shares])


if __name__ == "__main__":
    main()
