# SPDX-License-Identifier: Apache-2.0
"""Mistakes on the command line, in a table: one sentence, exit code 2 and no traceback.

`{}` is an untidy folder, which is the working directory too. `cases/bad_inputs.json` has more.
"""

import sys

import pytest

import dualdp
from dualdp_tools import cli
from tests.mistakes import RAW, untidy

EPSILON = "epsilon --noise-multiplier 1 --sample-rate 0.1 --delta 1e-5"
COMPARE = "compare --out {}/new"
PORT = "port {}/run --to jax --like"

#: Command line -> words of the answer.
MISTAKES = {
    "epsilom": "No such command 'epsilom'. Did you mean 'epsilon'?",
    f"{EPSILON} --stesp 3": "No such option: --stesp (Possible options: --help, --steps)",
    f"{EPSILON} --steps 1e3": "Invalid value for '--steps'",
    f"{EPSILON}": "The length of the run is unclear. Give one of --steps and --epochs",
    f"{EPSILON} --epochs 3": "--epochs needs --num-examples and --batch-size",
    f"{EPSILON} --steps 3 --batch-size 9": "both say the rate. Give one of them",
    f"{EPSILON} --steps 3 --accountant rpd": "one of pld, prv, rdp",
    "epsilon --noise-multiplier 1 --delta 1e-5 --steps 3": "The sampling rate is missing. Give",
    "calibrate --sample-rate 0.1 --steps 3 --delta 2 --target-epsilon 1": "delta=2.0 is",
    "verify": "Missing argument",
    "verify {}/folder": "folder is a folder. Expected the file of a run's ledger",
    "verify {}/no": "no does not exist. Expected the file of a run's ledger",
    "verify {}/ledger --report {}/no/x.md": "lies in no existing folder. Make it first",
    "verify {}/ledger --report {}/page.md": "is a folder. Expected the name of a file",
    "plot {}/no": "no does not exist. Expected a CSV file of dualdp.log.RunLog",
    "plot {}/ledger": "is no log of a run",
    "plot {}/log.csv --out {}/no/p.png": "lies in no existing folder. Make it first",
    "plot {}/log.csv --out {}/folder": "is a folder. Expected the name of a file",
    "plot {}/log.csv --out {}/p.xyz": "Format 'xyz' is not supported",
    "port {}/run --to tf --like own:three": "to='tf' is unknown. Expected one of jax, torch",
    f"{PORT} own": "like='own' names no function",
    f"{PORT} nobody:three": "No module named 'nobody'",
    f"{PORT} own:three": "like='own:three' is an int. Expected a function of no arguments",
    f"{PORT} own:more": "like='own:more' takes (x), but is called with no arguments",
    f"{PORT} own:nothing": "run does not exist. Expected a file of save_checkpoint",
    f"{PORT} own:nothing --out {{}}/no/x": "lies in no existing folder",
    "audit --step own:three": "step='own:three' is an int",
    "audit --stack tf": "stack='tf' is unknown. Expected one of jax, torch.",
    "audit --noise loud": "noise='loud' is unknown",
    "audit --canaries 1": "num_canaries=1 is out of range",
    "audit --step builtins:dict": "without claims, num_examples, releases, events",
    "compare": "Missing option '--out'",
    "compare --out {}/file": "file' is a file",
    f"{COMPARE} --steps 0": "num_steps=0 is out of range",
    f"{COMPARE} --model rnn": "'rnn' is not one of 'cnn', 'mlp'",
    f"{COMPARE} --target-epsilon -1": "target_epsilon=-1.0 is out of range",
}


@pytest.fixture(scope="module")
def at(tmp_path_factory):
    at = untidy(tmp_path_factory.mktemp("commands"))
    sizes = {"num_examples": 24, "expected_batch_size": 6, "num_steps": 2, "delta": 1e-5}
    plan = dualdp.PrivacyPlan(**sizes, noise_multiplier=1.0, max_grad_norm=1.0, seed=1)
    ledger = dualdp.Ledger(plan, path=at / "ledger")
    ledger.record(0)
    ledger.close()
    (at / "page.md").mkdir()
    (at / "log.csv").write_text("step,epsilon\n1,0.5\n")
    own = "three = 3\ndef more(x): return x\ndef nothing(): return None\n"
    (at / "own.py").write_text(own)
    return at


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_on_the_command_line_is_answered(line, at, monkeypatch, capsys):
    monkeypatch.chdir(at)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(sys, "argv", ["dualdp", *line.format(*[at] * 4).split()])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    done = capsys.readouterr()
    text = " ".join((done.out + done.err).split())
    assert caught.value.code == 2, text
    assert MISTAKES[line] in text
    assert not any(word in text for word in (*RAW, "Traceback")), text
    assert not (at / "new").exists(), "a folder was made before the mistake was found"
