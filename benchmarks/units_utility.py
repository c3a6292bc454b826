# SPDX-License-Identifier: Apache-2.0
"""Train with views of an example and with users of five rows at the same epsilon; write the report.

    OMP_NUM_THREADS=1 .venv-bench/bin/python -m benchmarks.units_utility [--quick]

Handwritten digits and a small network, SGD on both stacks. The learning rate of every row is the
best of a grid on seeds of its own, by the averaged model's accuracy on a fifth of the training data
that these runs do not see; what is reported are ten other seeds, trained on all of it and scored on
test data.
"""

import functools
import json
import statistics
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

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
    standard_error,
    start,
    torch_network,
    versions,
)

SIZES, STEPS, BOUND = (64, 32, 10), 10 if QUICK else 100, 1.0
SAMPLE_RATE = 256 / 1437  # of a row of the data, whatever the unit
ROWS_OF_A_USER = 5
RATES = (0.5, 1.0, 2.0, 4.0, 8.0)
STACKS, KINDS = ("torch", "jax"), ("last", "average")
FOLDER = Path(__file__).parent / "results" / "2026-11-23-units-utility"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "units_utility.png"


class Setting(NamedTuple):
    """One way to train: whom epsilon protects, what is drawn, and rows of it in a step."""

    protects: str  # "image" or "user"
    draws: str  # "example" or "user"
    rows: int  # K: views of an image, or rows of a user
    is_augmented: bool = False
    is_one_digit: bool = False  # a user's five images show one digit, not five random ones


SETTINGS = {
    "images as they are": Setting("image", "example", 1),
    "1 view": Setting("image", "example", 1, is_augmented=True),
    "4 views": Setting("image", "example", 4, is_augmented=True),
    "16 views": Setting("image", "example", 16, is_augmented=True),
    "rows, of which a user has 5": Setting("user", "example", 1),
    "users, 1 row each": Setting("user", "user", 1),
    "users, 5 rows each": Setting("user", "user", 5),
    "users of one digit, 1 row each": Setting("user", "user", 1, is_one_digit=True),
    "users of one digit, 5 rows each": Setting("user", "user", 5, is_one_digit=True),
}


@functools.cache
def data_of(setting, is_tuning):
    """Return training and scored data; rows 5 u .. 5 u + 4 are those of user u."""
    x, y, test_x, test_y = digits()
    x, y = x[:1435], y[:1435]
    if setting.is_one_digit:
        users = np.argsort(y, kind="stable").reshape(-1, ROWS_OF_A_USER)
        order = np.random.default_rng(0).permutation(users).reshape(-1)
        x, y = x[order], y[order]
    cut = 1150
    return (x[:cut], y[:cut], x[cut:], y[cut:]) if is_tuning else (x, y, test_x, test_y)


@functools.cache
def noise_of(setting, epsilon, sample_rate):
    """Return the noise multiplier at which a unit of the setting has this epsilon."""
    has_groups = setting.protects != "image" and setting.draws == "example"
    return dualdp.get_noise_multiplier(
        target_epsilon=epsilon,
        target_delta=DELTA,
        sample_rate=sample_rate,
        num_steps=STEPS,
        group_size=ROWS_OF_A_USER if has_groups else 1,
    )


def plan_of(setting, epsilon, seed, num_rows):
    """Return the plan of one run: as many rows in a step, whatever is drawn."""
    extra, num_units, size = {}, num_rows, SAMPLE_RATE * num_rows
    if setting.draws == "user":
        extra = {"unit": "user", "rows_per_unit": setting.rows}
        num_units, size = num_rows // ROWS_OF_A_USER, size / setting.rows
    return dualdp.PrivacyPlan(
        num_examples=num_units,
        expected_batch_size=size,
        num_steps=STEPS,
        noise_multiplier=noise_of(setting, epsilon, size / num_units),
        max_grad_norm=BOUND,
        delta=DELTA,
        noise="portable",
        seed=seed,
        **extra,
    )


def batches(setting, plan, x, y, seed):
    """Yield rows (U K, 64), labels and weights (U K,) of each step."""
    users = dualdp.units.user_rows(np.arange(len(x)) // ROWS_OF_A_USER)
    for step in range(STEPS):
        units, k = plan.batch_indices(step), setting.rows
        if setting.draws == "user":
            rows, weights = dualdp.units.draw_rows(plan, step, units, users, k)
        else:
            rows = np.repeat(units[:, None], k, axis=1)
            weights = np.full(rows.shape, 1 / k)
        shown = x[rows.reshape(-1)]
        if setting.is_augmented:
            shown = view(shown, np.random.default_rng((seed, step)))
        yield shown, y[rows.reshape(-1)], weights.reshape(-1).astype(np.float32)


def view(images, rng):
    """Mix each image of (n, 64) with up to one half of itself, moved by at most one pixel."""
    squares = images.reshape(-1, 8, 8)
    padded = np.pad(squares, ((0, 0), (1, 1), (1, 1)), constant_values=-1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (8, 8), axis=(1, 2))
    down, right = rng.integers(3, size=(2, len(images)))
    share = rng.uniform(0, 0.5, (len(images), 1, 1)).astype(np.float32)
    moved = windows[np.arange(len(images)), down, right]
    return (squares + share * (moved - squares)).reshape(-1, 64)


def with_torch(setting, plan, rate, seed, data):
    """Train on PyTorch; return the scores of the last parameters and of their average."""
    x, y, test_x, test_y = data
    model = torch_network(start(SIZES, seed))
    parameters = dict(model.named_parameters())
    optimizer = dpt.with_ema(torch.optim.SGD(model.parameters(), lr=rate))

    def loss_fn(model, x, y):
        return torch.nn.functional.cross_entropy(model(x), y, reduction="none")

    for step, batch in enumerate(batches(setting, plan, x, y, seed)):
        images, labels, weights = map(torch.tensor, batch)
        found = dpt.clipped_grad_sum(
            *(loss_fn, model, images, labels),
            max_grad_norm=BOUND,
            rows_per_unit=setting.rows,
            row_weights=weights,
        )
        for name, mean in dpt.noisy_mean(found.grads, plan, step).items():
            parameters[name].grad = mean
        optimizer.step()
    averages = {name: optimizer.state[p]["ema"] for name, p in parameters.items()}
    with torch.no_grad():
        outputs = [
            torch.func.functional_call(model, weights, torch.tensor(test_x)).numpy()
            for weights in (parameters, averages)
        ]
    return [accuracy(found, test_y) for found in outputs]


@functools.partial(jax.jit, static_argnames="k")
def jax_sum(params, images, labels, weights, mask, k):
    """Return the clipped sum over units of k rows."""

    def loss_fn(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(jax_outputs(params, x), y)

    units = {"rows_per_unit": k, "row_weights": weights, "mask": mask}
    return dpj.clipped_grad_sum(loss_fn, params, images, labels, max_grad_norm=BOUND, **units).grads


@functools.cache
def jax_optimizer(rate):
    """Return the optimizer, and its compiled update."""
    optimizer = dpj.with_ema(optax.sgd(rate))

    @jax.jit
    def update(params, state, mean):
        updates, state = optimizer.update(mean, state, params)
        return optax.apply_updates(params, updates), state

    return optimizer, update


def with_jax(setting, plan, rate, seed, data):
    """Train on JAX; return the scores of the last parameters and of their average."""
    x, y, test_x, test_y = data
    optimizer, update = jax_optimizer(rate)
    params = jax.tree.map(jnp.asarray, start(SIZES, seed))
    state, k = optimizer.init(params), setting.rows
    for step, batch in enumerate(batches(setting, plan, x, y, seed)):
        num_units = len(batch[1]) // k
        padded = 64 * -(-max(1, num_units) // 64)  # few shapes, few compilations
        rows = (padded - num_units) * k
        batch = [np.pad(part, [(0, rows), *[(0, 0)] * (part.ndim - 1)]) for part in batch]
        total = jax_sum(params, *batch, np.arange(padded) < num_units, k)
        params, state = update(params, state, dpj.noisy_mean(total, plan, step))
    outputs = [np.asarray(jax_outputs(found, test_x)) for found in (params, state.average)]
    return [accuracy(found, test_y) for found in outputs]


def train(stack, setting, epsilon, rate, seed, is_tuning=False):
    """Return the scores of one run."""
    data = data_of(setting, is_tuning)
    plan = plan_of(setting, epsilon, seed, len(data[0]))
    return {"torch": with_torch, "jax": with_jax}[stack](setting, plan, rate, seed, data)


def row(name, epsilon):
    """Return the scores of one row on both stacks, at the best learning rate."""
    setting = SETTINGS[name]
    plan = plan_of(setting, epsilon, 0, 1435)
    tuned = {
        rate: statistics.mean(
            train("jax", setting, epsilon, rate, seed, True)[-1] for seed in TUNING_SEEDS
        )
        for rate in RATES
    }
    rate = max(tuned, key=tuned.get)
    found = {
        "setting": name,
        "epsilon": epsilon,
        "noise": plan.noise_multiplier_at(0) / plan.expected_batch_size_at(0),
        "learning_rate": rate,
    }
    for stack in STACKS:
        scores = [train(stack, setting, epsilon, rate, seed) for seed in SEEDS]
        found[stack] = dict(zip(KINDS, map(list, zip(*scores, strict=True)), strict=True))
    means = [statistics.mean(found[stack][kind]) for stack in STACKS for kind in KINDS]
    print(f"{name}, epsilon {epsilon:g}: {' '.join(f'{mean:.4f}' for mean in means)}", flush=True)
    return found


def report(rows):
    """Return the page."""
    lines = [
        "# Views of an example, and users of five rows, at the same epsilon",
        "",
        f"`python -m benchmarks.units_utility`: {versions()}; delta {DELTA:g}, {len(SEEDS)} seeds, "
        f"{STEPS} steps of SGD on a network of 64, 32 and 10 units. Digits: 1,435 images, in "
        "expectation 256 of them in a step, accuracy on 360 others (mean ± standard error). A view "
        "is the image mixed with up to one half of itself, moved by at most one pixel. A user has "
        "5 images, random ones or such of one digit. Noise: standard deviation in the mean "
        "gradient, C = 1. Last: the parameters after the last step; average: `with_ema`, from the "
        f"same runs. Rate: the best of {', '.join(f'{rate:g}' for rate in RATES)} by the averaged "
        "model's accuracy on a fifth of the 1,435 images, trained on the others with three other "
        "seeds on JAX.",
        "",
        "| epsilon | of one | drawn | noise | rate | PyTorch last | average | JAX last | average |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = [f"{r['epsilon']:g}", SETTINGS[r["setting"]].protects, r["setting"]]
        cells += [f"{r['noise']:.4f}", f"{r['learning_rate']:g}"]
        cells += [mean_and_error(r[stack][kind]) for stack in STACKS for kind in KINDS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "![Averages of the table, PyTorch](utility.png)", ""])


def picture(rows):
    """Return a figure of the averages; a line marks the last parameters."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    for axes, protects in zip(figure.subplots(1, 2), ("image", "user"), strict=True):
        names = [name for name, setting in SETTINGS.items() if setting.protects == protects]
        width = 0.8 / len(names)
        for place, name in enumerate(names):
            at = np.arange(len(EPSILONS)) + width * (place - (len(names) - 1) / 2)
            scores = {k: [r["torch"][k] for r in rows if r["setting"] == name] for k in KINDS}
            means = {kind: [statistics.mean(s) for s in found] for kind, found in scores.items()}
            errors = [standard_error(s) for s in scores["average"]]
            axes.bar(at, means["average"], 0.9 * width, yerr=errors, capsize=3, label=name)
            ends = at - 0.45 * width, at + 0.45 * width
            axes.hlines(means["last"], *ends, color="black", linestyles="dotted")
        axes.set_xticks(range(len(EPSILONS)), [f"epsilon {e:g}" for e in EPSILONS])
        axes.set_title(f"epsilon of one {protects}")
        axes.set_ylabel("accuracy")
        axes.set_ylim(0.7, 1)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, fontsize=8)
    return figure


def main():
    """Run all rows and write the results."""
    on_one_core()
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = [row(name, epsilon) for epsilon in EPSILONS for name in SETTINGS]
    if not QUICK:
        (FOLDER / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
        (FOLDER / "report.md").write_text(report(rows))
        for path in (FOLDER / "utility.png", PICTURE):
            picture(rows).savefig(path, dpi=110)


if __name__ == "__main__":
    main()
