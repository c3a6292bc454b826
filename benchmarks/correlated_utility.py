# SPDX-License-Identifier: Apache-2.0
"""Train with independent and with correlated noise at the same epsilon; write the report.

    OMP_NUM_THREADS=1 .venv-bench/bin/python -m benchmarks.correlated_utility [--quick]

Two data sets of scikit-learn, a small network each, SGD on both stacks. The learning rate of every
row is the best of a grid on seeds of its own; what is reported are ten other seeds.
"""

import json
import statistics
from pathlib import Path

import numpy as np
import optax
import torch
from sklearn.datasets import load_diabetes
from torch import nn

import dualdp
import dualdp.jax as dpj
import dualdp.torch as dpt
from benchmarks.utility import (
    DELTA,
    EPSILONS,
    QUICK,
    SEEDS,
    TUNING_SEEDS,
    accuracy,
    digits,
    jax_outputs,
    mean_and_error,
    on_one_core,
    split,
    standard_error,
    start,
    torch_network,
    versions,
)
from dualdp_tools.compare.experiment import correlated_noise

FOLDER = Path(__file__).parent / "results" / "2026-11-23-correlated-utility"


def diabetes():
    """Return training and test data of the regression, (n, 10) and targets near [-1, 2]."""
    x, y = load_diabetes(return_X_y=True)
    return split((20 * x).astype(np.float32), ((y - 150) / 100).astype(np.float32), 354)


#: Data, sizes of the network, batch size, steps, C, learning rates, better score.
TASKS = {
    "digits": (digits, (64, 32, 10), 64, 400, 1.0, (0.25, 0.5, 1.0, 2.0), max),
    "diabetes": (diabetes, (10, 16, 1), 16, 400, 1.0, (0.01, 0.03, 0.1, 0.3), min),
}
NOISES = ("independent", "window of 4", "band of 8")


def plan_of(task, noise, epsilon, seed):
    """Return the plan of one run."""
    data, _, size, steps, bound, _, _ = TASKS[task]
    examples = len(data()[0])
    return dualdp.PrivacyPlan.calibrate(
        target_epsilon=epsilon,
        delta=DELTA,
        num_examples=examples,
        expected_batch_size=size,
        num_steps=steps,
        max_grad_norm=bound,
        noise="portable",
        seed=seed,
        **correlated_noise(noise.split()[0], examples, size, steps),
    )


def score(task, outputs, y):
    """Return the accuracy of digits, or the root mean squared error of the regression."""
    if task == "digits":
        return accuracy(outputs, y)
    return float(np.sqrt(((outputs[:, 0] - y) ** 2).mean()))


def with_torch(task, plan, rate, seed):
    """Train on PyTorch and return the test score."""
    data, sizes, *_ = TASKS[task]
    x, y, test_x, test_y = data()
    model, engine = torch_network(start(sizes, seed)), dpt.PrivacyEngine()
    criterion = nn.CrossEntropyLoss() if task == "digits" else nn.MSELoss()
    pairs = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=torch.utils.data.DataLoader(pairs, batch_size=16),
        plan=plan,
    )
    for inputs, labels in loader.remaining():
        optimizer.zero_grad()
        outputs = model(inputs)
        criterion(outputs if task == "digits" else outputs[:, 0], labels).backward()
        optimizer.step()
    with torch.no_grad():
        return score(task, model(torch.tensor(test_x)).numpy(), test_y)


def with_jax(task, plan, rate, seed):
    """Train on JAX and return the test score."""
    data, sizes, *_ = TASKS[task]
    x, y, test_x, test_y = data()

    def loss_fn(params, x, y):
        if task == "digits":
            return optax.softmax_cross_entropy_with_integer_labels(jax_outputs(params, x), y)
        return (jax_outputs(params, x)[0] - y) ** 2

    step, state, loader = dpj.PrivacyEngine().make_private(
        loss_fn=loss_fn,
        params=start(sizes, seed),
        optimizer=optax.sgd(rate),
        data=(x, y),
        plan=plan,
    )
    for batch in loader.remaining():
        state, _ = step(state, batch)
    return score(task, np.asarray(jax_outputs(state.params, test_x)), test_y)


def row(task, noise, epsilon):
    """Return the scores of one row on both stacks, at the best learning rate."""
    *_, rates, better = TASKS[task]
    tuned = {
        rate: statistics.mean(
            with_torch(task, plan_of(task, noise, epsilon, seed), rate, seed)
            for seed in TUNING_SEEDS
        )
        for rate in rates
    }
    rate = better(tuned, key=tuned.get)
    found = {"task": task, "noise": noise, "epsilon": epsilon, "learning_rate": rate}
    for name, train in (("torch", with_torch), ("jax", with_jax)):
        plans = ((seed, plan_of(task, noise, epsilon, seed)) for seed in SEEDS)
        found[name] = [train(task, plan, rate, seed) for seed, plan in plans]
    advice = dualdp.correlated.advise(plan_of(task, "independent", epsilon, 0))
    sampler = plan_of(task, noise, epsilon, 0).sampler
    kinds = {(o.name, o.sampler): o.relative_error for o in advice.options}
    computed = [kinds[noise, sampler]] if (noise, sampler) in kinds else []
    found["computed"] = computed[0] if computed else None
    mean = statistics.mean
    print(f"{task} {noise} {epsilon:g}: {mean(found['torch']):.4f} {mean(found['jax']):.4f}")
    return found


def report(rows):
    """Return the page, and draw its picture."""
    from matplotlib.figure import Figure

    lines = [
        "# Independent and correlated noise at the same epsilon",
        "",
        f"`python -m benchmarks.correlated_utility`: {versions()}; delta {DELTA:g}, {len(SEEDS)} "
        "seeds, 400 steps of SGD. Digits: 1,437 images, batches of 64, accuracy on 360 others "
        "(higher is better). Diabetes: 354 patients, batches of 16, root mean squared error on 88 "
        "others, in units of 100 (lower is better). Learning rates: the best of four on three "
        "other seeds. Computed: noise in the model to that of independent noise (`dualdp "
        "calibrate --advise`).",
        "",
        "| data | epsilon | noise | computed | learning rate | PyTorch | JAX |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        scores = [mean_and_error(r[s]) for s in ("torch", "jax")]
        computed = "" if r["computed"] is None else f"{r['computed']:.2f}"
        cells = [r["task"], f"{r['epsilon']:g}", r["noise"], computed, f"{r['learning_rate']:g}"]
        lines.append(f"| {' | '.join([*cells, *scores])} |")
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    for axes, task in zip(figure.subplots(1, 2), TASKS, strict=True):
        for place, noise in enumerate(NOISES):
            of_noise = [r for r in rows if (r["task"], r["noise"]) == (task, noise)]
            heights = [statistics.mean(r["torch"]) for r in of_noise]
            errors = [standard_error(r["torch"]) for r in of_noise]
            at = np.arange(len(heights)) + 0.27 * (place - 1)
            axes.bar(at, heights, 0.25, yerr=errors, capsize=3, label=noise)
        axes.set_xticks(range(len(EPSILONS)), [f"epsilon {e:g}" for e in EPSILONS])
        axes.set_title("digits: accuracy" if task == "digits" else "diabetes: error")
        axes.grid(axis="y", alpha=0.3)
    low = min(statistics.mean(r["torch"]) for r in rows if r["task"] == "digits")
    figure.axes[0].set_ylim(bottom=max(0.0, low - 0.1))
    figure.axes[0].legend(loc="lower right")
    figure.savefig(FOLDER / "utility.png", dpi=110)
    return "\n".join([*lines, "", "![Scores of the table, PyTorch](utility.png)", ""])


def main():
    """Run all rows and write the results."""
    on_one_core()
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = [row(t, n, e) for t in TASKS for e in EPSILONS for n in NOISES]
    if not QUICK:
        (FOLDER / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
        (FOLDER / "report.md").write_text(report(rows))


if __name__ == "__main__":
    main()
