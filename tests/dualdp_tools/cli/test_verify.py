# SPDX-License-Identifier: Apache-2.0
"""`dualdp verify` and `dualdp audit` on the command line."""

import contextlib
import importlib
import json
import math
import re
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from dualdp import PrivacyPlan
from dualdp.ledger.ledger import Ledger
from dualdp_tools.cli import app, common

audit = importlib.import_module("dualdp_tools.cli.audit")  # the package has a function of that name


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def ledger(tmp_path):
    def made(name="run.ledger", note=(), **changes):
        numbers = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "delta": 1e-5}
        sizes = {"num_examples": 500, "expected_batch_size": 25, "num_steps": 9}
        written = Ledger(PrivacyPlan(**{**numbers, **sizes, **changes}), path=tmp_path / name)
        for step in range(5):
            written.record(step)
        if note:
            written.unprotected(note)
        written.close()
        return tmp_path / name

    return made


def test_a_true_ledger_is_verified(ledger):
    done = call("verify", ledger(num_steps=5))
    assert done.exit_code == 0, done.output
    assert "all 5 planned steps are on record" in done.output
    assert re.search(r"The ledger is whole and true: epsilon = \d\.\d{4}\.", done.output)
    data = json.loads(call("verify", ledger("second"), "--json").output)
    assert data["passed"]
    assert data["failures"] == []
    assert 0 < data["epsilons"]["pld"] < data["epsilons"]["rdp"]


def test_a_ledger_that_was_cut_short_is_not_called_whole(ledger, tmp_path):
    """known_failures 85: its first line says how many steps were planned."""
    whole = ledger("whole", num_steps=5)
    cut = tmp_path / "cut"
    cut.write_text("".join(whole.read_text().splitlines(keepends=True)[:-2]))
    for path, steps in ((cut, "3 of 5 planned"), (ledger("ran"), "5 of 9 planned")):
        done = call("verify", path)
        assert done.exit_code == 0, done.output
        assert f"note    record covers the plan        {steps} steps are on record" in done.output
        assert "whole and true" not in done.output
        assert f"is true, for the {steps} steps that it covers: epsilon = " in done.output
        assert "The ledger is CUT SHORT of its plan. What" in done.output
        data = json.loads(call("verify", path, "--json").output)
        assert not data["covers_the_plan"]
        assert data["epsilon_of_the_plan"] > data["epsilons"]["pld"]
        assert (
            f"All planned steps, run once, cost {data['epsilon_of_the_plan']:.4f}."
            in (data["verdict"])
        )
    cut.write_text(whole.read_text()[:-9])
    said = call("verify", cut).output
    assert "true, for the 5 of 5 planned steps" in said
    assert "Its last line is cut off." in said
    assert "whole and true" not in said
    done = call("verify", ledger("open", num_steps=None))
    assert "5 steps are on record and the plan has no end" in done.output
    assert "is true, for the 5 steps that it covers" in done.output


def test_several_ledgers_are_verified(ledger):
    first, seeded = ledger("first"), ledger("seeded", seed=1)
    done = call("verify", first, seeded)
    assert done.exit_code == 1
    assert done.output.index(str(first)) < done.output.index(str(seeded))
    assert call("verify", first, seeded, "--allow-seed").exit_code == 0
    data = json.loads(call("verify", first, seeded, "--json").output)["ledgers"]
    assert [data[str(path)]["passed"] for path in (first, seeded)] == [True, False]
    assert "report came with 2 ledgers" in call("verify", first, seeded, "--report", "x.md").output


def test_a_run_of_several_segments_is_told(ledger):
    path = ledger()
    plan = PrivacyPlan.from_json(json.dumps(Ledger.read(path)[0]["plan"]))
    again = Ledger.resume(path, plan=plan, step=3)
    again.record(3)
    again.close()
    done = call("verify", path)
    assert done.exit_code == 0, done.output
    assert "6 releases of 5 steps, 1 of them of steps run again" in done.output
    assert "resumed 1 times, at step 3" in done.output
    segments = json.loads(call("verify", path, "--json").output)["segments"]
    assert segments == [[0, 5, 1.0], [3, 4, 1.0]]


def test_a_failure_is_named_and_the_exit_code_tells(ledger):
    path = ledger()
    path.write_text(path.read_text().replace('"r":[3,', '"r":[4,'))
    done = call("verify", path)
    assert done.exit_code == 1
    assert "NOT verified: chain is unbroken." in done.output
    seeded = ledger("seeded", seed=1)
    done = call("verify", seeded)
    assert done.exit_code == 1
    assert "NOT verified: noise is secret." in done.output
    done = call("verify", seeded, "--allow-seed")
    assert done.exit_code == 0
    label = r"epsilon = [\d.]+ if the noise were secret \(seed=1 tells it\)\."
    assert re.search(label, done.output)
    assert "All of this would hold if the noise were secret" in done.output


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen = [], set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("form", ["md", "html"])
def test_the_page_says_what_was_released_and_what_it_means(ledger, tmp_path, form):
    page = tmp_path / f"page.{form}"
    path = ledger(note=["unprotected_<script>|x"])
    assert call("verify", path, "--report", page).exit_code == 0
    text = page.read_text()
    for word in (
        "5 noisy sums of clipped gradients",
        "add_or_remove: the data with and without any one example",
        "poisson, sample rate 0.05",
        "max_grad_norm 1",
        "dualdp 1.",
        "What the number means",
        "A person with several examples has less protection",
        "unprotected_",
    ):
        assert word in text, word
    if form == "html":
        tags = Tags()
        tags.feed(text)
        assert tags.open == []
        assert "script" not in tags.seen, "what a ledger says is never taken for markup"
    else:
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {4}


def test_the_best_guess_is_that_of_the_definition(ledger, tmp_path):
    """TPR <= e^eps FPR + delta and its mirror: a fair coin is guessed with p <= (e^eps + d)/..."""
    call("verify", ledger(), "--report", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    factor = float(re.search(r"e\^[\d.]+ = ([\d.]+)", text).group(1))
    best = float(re.search(r"at most ([\d.]+)% \(guessing", text).group(1)) / 100
    assert best == pytest.approx((factor + 1e-5) / (1 + factor), abs=6e-4)


def test_a_factor_is_never_rounded_below_e_to_the_epsilon():
    for epsilon in (0.0, 1e-9, 0.5, 1.51564, 3.0, 20.0, 699.9):
        said = float(common.factor(epsilon))
        assert math.exp(epsilon) <= said <= 1.0011 * math.exp(epsilon)
    assert common.factor(4118.4) == "e^4119"
    assert common.factor(math.inf) == "inf"


def test_a_page_of_a_broken_ledger_makes_no_statement(tmp_path):
    (tmp_path / "x").write_text("nonsense\n")
    assert call("verify", tmp_path / "x", "--report", tmp_path / "x.md").exit_code == 1
    text = (tmp_path / "x.md").read_text()
    assert "NOT verified" in text
    assert "No statement about privacy can be made" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verify", "nowhere"), "nowhere does not exist. Expected the file of a run's"),
        (("verify", "."), ". is a folder. Expected the file of a run's ledger"),
        (("verify", "nowhere", "--report", "no/x.md"), "lies in no existing folder. Make it first"),
        (("verify", "nowhere", "--report", "x.pdf"), "has no known form. Expected .md or .html"),
        (("audit", "--stack", "tf"), "stack='tf' is unknown. Expected one of jax, torch."),
        (("audit", "--noise-multiplier", "0"), "noise_multiplier=0.0 is out of range"),
        (("audit", "--noise", "loud"), "noise='loud' is unknown"),
        (("audit", "--canaries", "1"), "num_canaries=1 is out of range"),
        (("audit", "--step", "json:nothing"), "names no function"),
        (("audit", "--step", "nonsense"), "names no function"),
        (("audit", "--step", "builtins:dict"), "without claims, num_examples, releases, events"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments, message):
    done = call(*arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output


@pytest.mark.slow
def test_an_audit_of_a_step_of_ones_own():
    done = call("audit", "--step", "tests.numpy_step:NumpyStep", "--seed", 1, "--steps", 40)
    assert done.exit_code == 0, done.output
    assert "Not refuted" in done.output
    assert "below 1e-06 it refutes the claim. At most one correct step in 1,000,000" in done.output
    assert "with 95% confidence; p = 1\n" in done.output
    done = call("audit", "--step", "tests.dualdp_tools.cli.test_audit:broken", "--seed", 1)
    assert "confidence; p < 1e-06\n" in done.output
    done = call(
        "audit", "--step", "tests.dualdp_tools.cli.test_audit:broken", "--seed", 1, "--json"
    )
    assert done.exit_code == 1
    assert json.loads(done.output)["is_refuted"]


def test_progress_counts_the_releases(monkeypatch):
    """A run of 20 steps is 20 pieces; the bar ends where the work does."""
    shown = []

    @contextlib.contextmanager
    def counted(title, pieces=None):
        shown.append([title, pieces, 0])
        yield lambda: shown.append([title, pieces, shown.pop()[2] + 1])

    monkeypatch.setattr(audit, "working", counted)
    words = ("--canaries", 50, "--steps", 20, "--seed", 1)
    assert call("audit", "--step", "tests.numpy_step:NumpyStep", *words).exit_code == 0
    assert shown == [["Preparing", None, 0], ["Training with canaries", 20, 20]]


def test_progress_is_for_terminals(monkeypatch, capsys):
    with common.working("Counting", 3) as advance:
        advance()
    assert capsys.readouterr() == ("", ""), "a file or a pipe gets nothing"
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes anything for a terminal
    with common.working("Counting", 3) as advance:
        advance()
    out, err = capsys.readouterr()
    assert out == ""
    assert "Counting" in err
    assert "0:00:00" in err


def broken():
    """A step that forgets to clip."""
    from tests.numpy_step import NumpyStep

    return NumpyStep("clipping off", noise_multiplier=4.0)


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_an_audit_of_our_engine(stack):
    done = call(
        *("audit", "--stack", stack, "--steps", 30, "--canaries", 300, "--seed", 2),
        "--check",
    )
    assert done.exit_code == 0, done.output
    assert "claimed: epsilon = " in done.output
    assert "All checks passed" in done.output
