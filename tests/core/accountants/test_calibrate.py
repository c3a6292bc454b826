# SPDX-License-Identifier: Apache-2.0
"""Calibration: never over the target, close to it, for every quantity; and the two commands."""

import json
import math
import re
import sys
import time

import pytest
from typer.testing import CliRunner

import dualdp
from dualdp import AccountingError
from dualdp.accountants import solve
from dualdp_tools.cli import app
from tests.cases import accounting as cases

TARGETS = [
    {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.01, "num_steps": 1000},
    {"target_epsilon": 8.0, "target_delta": 1e-5, "sample_rate": 0.04, "num_steps": 2250},
    {"target_epsilon": 1.0, "target_delta": 1e-6, "sample_rate": 1e-3, "num_steps": 10_000},
    {"target_epsilon": 0.1, "target_delta": 1e-5, "sample_rate": 0.01, "num_steps": 1000},
    {"target_epsilon": 50.0, "target_delta": 1e-5, "sample_rate": 0.01, "num_steps": 1000},
    {"target_epsilon": 1000.0, "target_delta": 1e-5, "sample_rate": 0.1, "num_steps": 1000},
    {"target_epsilon": 3.0, "target_delta": 1e-5, "sample_rate": 1.0, "num_steps": 7},
]


def spent(target, **run):
    names = ("sample_rate", "num_steps", "noise_multiplier")
    known = {k: v for k, v in (target | run).items() if k in names}
    return dualdp.get_epsilon(**known, delta=target["target_delta"])


@pytest.mark.parametrize("target", TARGETS)
def test_calibrated_noise_meets_the_target(target):
    start = time.process_time()
    sigma = dualdp.get_noise_multiplier(**target)
    assert time.process_time() - start < 3  # 0.3 s on a quiet core
    epsilon = spent(target, noise_multiplier=sigma)
    assert 0.998 * target["target_epsilon"] <= epsilon <= target["target_epsilon"]


def test_known_calibrations():
    _, row = cases.PUBLISHED["gaussian"]
    sigma = dualdp.get_noise_multiplier(
        target_epsilon=1, target_delta=1e-5, sample_rate=1.0, num_steps=1
    )
    assert sigma == pytest.approx(row["noise_multiplier"], rel=1e-9)
    assert sigma >= row["noise_multiplier"] * (1 - 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS[:4])
def test_steps_and_rate_for_a_budget(target):
    sigma = dualdp.get_noise_multiplier(**target)
    rest = {k: v for k, v in target.items() if k not in ("num_steps", "sample_rate")}
    steps = dualdp.get_num_steps(**rest, noise_multiplier=sigma, sample_rate=target["sample_rate"])
    assert spent(target, noise_multiplier=sigma, num_steps=steps) <= target["target_epsilon"]
    assert steps == pytest.approx(target["num_steps"], rel=2e-3)
    rate = dualdp.get_sample_rate(**rest, noise_multiplier=sigma, num_steps=target["num_steps"])
    assert spent(target, noise_multiplier=sigma, sample_rate=rate) <= target["target_epsilon"]
    assert rate == pytest.approx(target["sample_rate"], rel=2e-3)


def test_steps_and_rate_at_the_ends():
    target = {"target_epsilon": 1.0, "target_delta": 1e-5}
    assert dualdp.get_num_steps(**target, noise_multiplier=0.3, sample_rate=1.0) == 0
    assert dualdp.get_sample_rate(**target, noise_multiplier=100.0, num_steps=1) == 1.0
    with pytest.raises(AccountingError, match="not even a billion steps"):
        dualdp.get_num_steps(**target, noise_multiplier=1.0, sample_rate=0.0)
    with pytest.raises(AccountingError, match="no sampling rate above 1e-9"):
        dualdp.get_sample_rate(**target, noise_multiplier=0.0, num_steps=1)
    bins = dualdp.get_sample_rate(
        **target, noise_multiplier=2.0, num_steps=500, sampler="balls_in_bins"
    )
    assert abs(1 / bins - round(1 / bins)) < 1e-9


def test_a_whole_schedule_is_scaled():
    steps = [(2.0 * 0.9**i, 0.01, 50) for i in range(8)]
    scale = solve.get_schedule_scale(target_epsilon=2.0, target_delta=1e-5, steps=steps)
    made = dualdp.accountants.create("pld")
    for sigma, rate, count in steps:
        made.step(noise_multiplier=sigma * scale, sample_rate=rate, num_steps=count)
    assert 1.99 < made.get_epsilon(delta=1e-5) <= 2.0


@pytest.mark.parametrize("step", [(1.0, 0.1), None, 3.0, "abc"])
def test_a_schedule_is_made_of_triples(step):
    with pytest.raises(ValueError, match=r"steps\[1\]=.* Expected triples"):
        solve.get_schedule_scale(target_epsilon=1.0, target_delta=1e-5, steps=[(1.0, 0.1, 1), step])


@pytest.mark.parametrize("sampler", ["balls_in_bins", "fixed_size", "truncated_poisson", "shuffle"])
def test_every_sampler_is_calibrated(sampler):
    """Noise, steps and rate: within the target, and the next whole step is not."""
    target = {"target_epsilon": 2.0, "target_delta": 1e-5, "sampler": sampler}
    if sampler == "fixed_size":
        target["neighboring_relation"] = "replace"
    if sampler == "truncated_poisson":
        target |= {"num_examples": 10_000, "max_batch_size": 300}
    asked = {k.replace("target_", ""): v for k, v in target.items() if k != "target_epsilon"}
    sigma = dualdp.get_noise_multiplier(**target, sample_rate=0.02, num_steps=200)
    run = {"noise_multiplier": sigma, "sample_rate": 0.02}
    assert 1.9 < dualdp.get_epsilon(**run, num_steps=200, **asked) <= 2
    steps = dualdp.get_num_steps(**target, **run)
    assert dualdp.get_epsilon(**run, num_steps=steps, **asked) <= 2
    assert dualdp.get_epsilon(**run, num_steps=steps + 1, **asked) > 2
    rate = dualdp.get_sample_rate(**target, noise_multiplier=sigma, num_steps=200)
    assert rate == pytest.approx(0.02, rel=0.01)
    assert dualdp.get_epsilon(**(run | {"sample_rate": rate}), num_steps=200, **asked) <= 2


def test_nothing_released_needs_no_noise():
    target = {"target_epsilon": 1.0, "target_delta": 1e-5}
    assert dualdp.get_noise_multiplier(**target, sample_rate=0.1, num_steps=0) == 0
    assert dualdp.get_noise_multiplier(**target, sample_rate=0.0, num_steps=5) == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"target_epsilon": 0.0}, "target_epsilon=0.0 is out of range"),
        ({"target_epsilon": math.inf}, "target_epsilon=inf is out of range"),
        ({"target_epsilon": math.nan}, "target_epsilon=nan is not a number"),
        ({"target_delta": 0.0}, "strictly between 0 and 1"),
        ({"target_delta": 1.0}, "strictly between 0 and 1"),
        ({"sample_rate": 1.2}, "sample_rate=1.2 is not a probability"),
        ({"accountant": "prd"}, "Expected one of gdp, pld, prv, rdp"),
        ({"neighboring_relation": "swap"}, "Expected one of add_or_remove"),
        ({"sampler": "uniform"}, "sampler='uniform' is unknown"),
        ({"accountant": "gdp"}, "Pass approximate=True"),
        ({"sampler": "balls_in_bins", "sample_rate": 0.3}, "Use 1/3 or 1/4"),
    ],
)
def test_bad_targets(change, text):
    with pytest.raises(ValueError, match=text):
        dualdp.get_noise_multiplier(**(TARGETS[0] | change))


def test_a_misspelt_word_is_refused():
    with pytest.raises(TypeError, match="no argument 'smapler'"):
        dualdp.get_epsilon(
            noise_multiplier=1.0, sample_rate=0.1, num_steps=1, delta=1e-5, smapler="poisson"
        )


RUN = ["--num-examples", "60000", "--batch-size", "256", "--epochs", "2", "--delta", "1e-5"]


def command(*words):
    return CliRunner().invoke(app, list(words))


@pytest.mark.slow
def test_the_command_epsilon(tmp_path):
    picture = tmp_path / "epsilon.png"
    result = command("epsilon", "--noise-multiplier", "1.1", *RUN, "--json", "--plot", str(picture))
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["num_steps"] == 470
    assert record["epsilon"] == dualdp.get_epsilon(
        noise_multiplier=1.1, sample_rate=256 / 60000, num_steps=470, delta=1e-5
    )
    assert 0 < record["lower_bound"] <= record["epsilon"]
    assert picture.stat().st_size > 5_000
    table = command(
        "epsilon", "--noise-multiplier", "1.1", "--sample-rate", "0.01", "--steps", "10",
        "--delta", "1e-5", "--accountant", "rdp",
    )  # fmt: skip
    assert table.exit_code == 0
    words = " ".join(re.sub("[│┌┐└┘─]", " ", table.output).split())
    found = float(re.search(r"epsilon ([\d.]+) any outcome", words).group(1))
    said = float(re.search(r"any outcome is at most ([\d.]+) times as likely", words).group(1))
    assert math.exp(found) <= said <= 1.001 * math.exp(found) + 1e-3
    assert "add_or_remove the data with and without any one example" in words


def test_the_commands_call_an_approximation_one():
    run = ["epsilon", "--noise-multiplier", "1", *RUN, "--accountant", "gdp", "--json"]
    for words in (
        run,
        ["calibrate", "--target-epsilon", "3", *RUN, "--accountant", "gdp", "--json"],
    ):
        refused = command(*words)
        assert refused.exit_code == 2
        assert "can lie far below the true epsilon" in refused.output
        record = json.loads(command(*words, "--approximate").stdout)
        assert record["certified"] is False
        assert 0 < record["epsilon"] <= 3


def test_a_plot_needs_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = ("epsilon", "--noise-multiplier", "1", *RUN, "--plot", str(tmp_path / "x.png"))
    result = command(*words)
    assert result.exit_code == 2
    assert "--plot needs matplotlib" in result.output


@pytest.mark.slow
def test_a_plot_shows_both_bounds(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn, plot = [], Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda *a, **k: drawn.append((a[1], a[2])) or plot(*a, **k))
    picture = tmp_path / "epsilon.pdf"
    words = ("--target-epsilon", "3", *RUN, "--plot", str(picture), "--json")
    record = json.loads(command("calibrate", *words).stdout)
    assert picture.read_bytes()[:4] == b"%PDF"
    (steps, upper), (same, lower) = drawn
    assert steps == same
    assert steps[-1] == record["num_steps"] == 470
    assert upper[-1] == record["epsilon"]
    assert upper == sorted(upper)
    assert all(0 < low <= high <= 1.02 * low for low, high in zip(lower, upper, strict=True))


def test_the_command_calibrate():
    result = command("calibrate", "--target-epsilon", "3", *RUN, "--json")
    assert command("calibrate", "--epsilon", "3", *RUN, "--json").stdout == result.stdout
    record = json.loads(result.stdout)
    assert 2.99 < record["epsilon"] <= 3
    known = ["--noise-multiplier", "1.5", "--delta", "1e-5", "--target-epsilon", "3", "--json"]
    steps = json.loads(command("calibrate", *known, "--sample-rate", "0.01").stdout)
    assert 2.9 < steps["epsilon"] <= 3
    rate = json.loads(command("calibrate", *known, "--steps", "1000").stdout)
    assert 2.9 < rate["epsilon"] <= 3


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["epsilon", "--noise-multiplier", "1", "--delta", "1e-5", "--steps", "3"],
            "rate is missing",
        ),
        (
            ["epsilon", "--noise-multiplier", "1", "--delta", "1e-5", "--sample-rate", "0.1"],
            "Give one of --steps and --epochs",
        ),
        (
            ["epsilon", "--noise-multiplier", "-1", "--delta", "1e-5", "--sample-rate", "0.1",
             "--steps", "3"],
            "noise_multiplier=-1.0 is out of range",
        ),
        (
            ["epsilon", "--noise-multiplier", "1", "--delta", "1e-5", "--sample-rate", "0.1",
             "--epochs", "3"],
            "--epochs needs --num-examples",
        ),
        (
            ["epsilon", "--noise-multiplier", "1", "--delta", "1e-5", "--sample-rate", "0.1",
             "--batch-size", "3", "--steps", "2"],
            "both say the rate",
        ),
        (
            ["calibrate", "--target-epsilon", "3", "--noise-multiplier", "1", *RUN],
            "Nothing is left to look for",
        ),
        (
            ["epsilon", "--noise-multiplier", "1", *RUN, "--plot", "/nowhere/x.png"],
            "lies in no existing folder",
        ),
    ],
)  # fmt: skip
def test_commands_refuse_in_one_line(words, text):
    result = command(*words)
    assert result.exit_code == 2
    assert text in result.output
    assert "Traceback" not in result.output
