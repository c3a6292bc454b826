# SPDX-License-Identifier: Apache-2.0
"""`dualdp calibrate --table`: every line spends at most the target, and the verdict is its best."""

import json
import math

import pytest
from typer.testing import CliRunner

import dualdp
from dualdp_tools.cli import app

BUDGET = "calibrate --target-epsilon 2 --delta 1e-5 --accountant rdp"


def call(options):
    return CliRunner().invoke(app, f"{BUDGET} {options}".split(), env={"COLUMNS": "200"})


def lines(options):
    done = call(f"{options} --json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.slow
def test_batch_sizes_spend_the_budget_and_are_relative_to_full():
    found = lines("--table batch-sizes --num-examples 64 --epochs 4")
    for line in found["lines"]:
        noise, steps, size = (line[name] for name in ("noise multiplier", "steps", "batch size"))
        run = {"noise_multiplier": noise, "sample_rate": size / 64, "num_steps": steps}
        assert 1.9 < dualdp.get_epsilon(**run, delta=1e-5, accountant="rdp") <= 2
        assert line["noise"] == noise / size
        assert line["of run"] == pytest.approx(line["noise"] * math.sqrt(steps))
    assert found["lines"][-1]["relative"] == pytest.approx(1, abs=2e-3)
    enough = [line["batch size"] for line in found["lines"] if line["relative"] <= 1.25]
    assert f"{min(enough)} at 4 epochs" in found["verdict"]
    assert "Smallest batch size" in call("--table batch-sizes --num-examples 64").output


@pytest.mark.slow
def test_noise_is_compared_at_one_epsilon():
    found = lines("--table noise --num-examples 20000 --batch-size 500 --epochs 2")
    errors = [line["error"] for line in found["lines"]]
    assert errors == sorted(errors)
    independent = next(line for line in found["lines"] if line["noise"] == "independent")
    assert independent["to DP-SGD"] == 1
    assert found["lines"][0]["noise"] in found["verdict"]


def test_users_are_drawn_or_their_rows(tmp_path):
    (tmp_path / "counts").write_text("3\n" * 40 + "0\n" * 10)
    run = f"--accountant pld --table units --num-examples 50 --counts {tmp_path}/counts"
    found = lines(f"{run} --batch-size 12 --steps 30")
    by = {(line["drawn"], line["rows"]): line for line in found["lines"]}
    one, four = by["example", 1], by["user", 4]
    noise = one["noise multiplier"]
    run = {"noise_multiplier": noise, "sample_rate": 12 / 40, "num_steps": 30, "delta": 1e-5}
    assert 1.9 < dualdp.get_epsilon(**run) <= 2
    assert one["rows kept"] == pytest.approx(1 / 3)
    assert one["if they agree"] == noise / 12
    assert four["if rows differ"] == pytest.approx(four["if they agree"] / math.sqrt(3))


USERS = "--table units --num-examples 9 --steps 2 --batch-size"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--table rows", "table='rows' is unknown. Expected one of"),
        ("--table batch-sizes", "--table batch-sizes compares batch sizes. Expected"),
        ("--table batch-sizes --num-examples 64 --epochs -1", "epochs=-1.0 is out of range"),
        ("--table batch-sizes --num-examples 200000", "delta=1e-05 is not below 1 / num_ex"),
        ("--table noise --num-examples 64", "--table noise compares runs of one length"),
        (f"{USERS} 2", "needs --counts"),
        (f"{USERS} 2 --counts {{}}/no", "no does not"),
        (f"{USERS} 2 --counts {{}}/zero", "not all 0"),
        (f"{USERS} 9 --counts {{}}/few", "are more than"),
    ],
)
def test_what_can_not_be_compared_is_refused(options, words, tmp_path):
    (tmp_path / "zero").write_text("0 0")
    (tmp_path / "few").write_text("1 2")
    done = call(options.format(tmp_path))
    assert (done.exit_code, words in done.output) == (2, True), done.output
