# SPDX-License-Identifier: Apache-2.0
"""Hostile inputs for every parser: each is accepted, or refused by one sentence, and in time.

    python -m tests.fuzz --examples 2000        # a campaign; prints how many inputs were tried

`tests/dualdp/test_fuzz.py` runs a short one, and the corpus of `tests/cases/bad_inputs.json`.
"""

import argparse
import contextlib
import io
import json
import os
import resource
import signal
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import hypothesis
import numpy as np
from hypothesis import strategies as st

from dualdp import PrivacyPlan, accountants, checkpoint, mechanisms
from dualdp.ledger.chain import Chain
from dualdp.ledger.ledger import Ledger
from dualdp.ledger.verify import verify
from dualdp.log import read_log
from dualdp.plan.schedules import AdaptiveNorm

SECONDS = 20  # that one input may take; a second is usual, this machine may be busy
MEMORY = 1 << 30  # bytes that one input may take beside what the process has
LONGEST = 1000  # characters of a refusal
tried = Counter()

# ---------------------------------------------------------------------- judging


class TooSlowError(BaseException):
    """One input took longer than any should."""


@contextlib.contextmanager
def in_time():
    """Within `SECONDS` and `MEMORY`: what needs more fails here, and not the machine."""

    def late(*_):
        raise TooSlowError

    before, limits = signal.signal(signal.SIGALRM, late), resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, limits[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def judge(name, function, *arguments):
    """Call a parser; anything but a result or one refusing sentence is passed on as a failure."""
    tried[name] += 1
    refusal = "accepted"
    with in_time(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function(*arguments)
        except (ValueError, TypeError, OSError) as error:
            refusal = str(error)
    assert refusal.strip(), "an error without a word"
    assert "Traceback" not in refusal
    assert len(refusal) <= LONGEST + 2 * len(str(arguments)), refusal[:2000]


# ---------------------------------------------------------------------- hostile values

NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**400, 1e308, 5e-324, 0.1, 1.0]),
)
WORDS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["poisson", "shuffle", "fixed_size", "balls_in_bins", "pld", "rdp", "gdp"]),
    st.sampled_from(["replace", "add_or_remove", "secure", "fast", "NaN", "1", "\x00", "{}"]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=4)),
    max_leaves=8,
)


@st.composite
def edited(draw, documents):
    """A right document with some of its parts, at any depth, replaced, added or taken away."""
    document = json.loads(json.dumps(draw(st.sampled_from(documents))))
    for _ in range(draw(st.integers(1, 3))):
        place = document
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            inner = place[key]
            if isinstance(inner, dict | list) and inner and draw(st.booleans()):
                place = inner
                continue
            if draw(st.integers(0, 5)) == 0:
                del place[key]
            else:
                place[key] = draw(VALUES)
            break
        if isinstance(place, dict) and draw(st.integers(0, 5)) == 0:
            place[draw(WORDS)] = draw(VALUES)
    return document


@st.composite
def damaged(draw, files):
    """Right bytes, some of them changed, cut off, doubled or moved."""
    data = bytearray(draw(st.sampled_from(files)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        size = draw(st.integers(1, 40))
        kind = draw(st.sampled_from(["set", "cut", "drop", "double", "insert"]))
        if kind == "set" and data:
            data[at] = draw(st.integers(0, 255))
        elif kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + size]
        elif kind == "double":
            data[at:at] = data[at : at + size]
        else:
            data[at:at] = draw(st.binary(max_size=size))
    return bytes(data)


# ---------------------------------------------------------------------- right documents


def plans():
    numbers = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "delta": 1e-5, "seed": 1}
    sizes = {"num_examples": 100, "expected_batch_size": 10, "num_steps": 6}
    changes = [
        {},
        {"num_steps": None},
        {"noise_multiplier": lambda step: 1.0 + step},
        {"max_grad_norm": AdaptiveNorm(1.0)},
        {"sampler": "truncated_poisson", "max_batch_size": 20},
        {"sampler": "shuffle", "target_epsilon": 50.0},
    ]
    return [PrivacyPlan(**{**numbers, **sizes, **change}) for change in changes]


def ledger(plan):
    made = Ledger(plan)
    for step in range(4):
        made.record(step, noisy_fraction=made.noisy_fraction(3, 9) if plan.is_adaptive else None)
    made.note(unprotected=["unprotected_loss"])
    return made


PLANS = [json.loads(plan.to_json()) for plan in plans()]
LEDGERS = [ledger(plan) for plan in plans()]
RECORDS = [
    [
        {k: v for k, v in json.loads(line).items() if k != "h"}
        for line in made.to_json().split("\n")[:-1]
    ]
    for made in LEDGERS
]
STATES = [made.accountant.state_dict() for made in LEDGERS]
EVENTS = [record for state in STATES for record, _ in state["history"]]
ARRAYS = {"params/w": np.arange(6.0).reshape(2, 3), "buffers/n": np.array([1, 2])}


def saved():
    """The document of a checkpoint, and its ledger's text."""
    with tempfile.TemporaryDirectory() as folder:
        made = ledger(plans()[0])
        described = {"stack": "torch", "settings": {}, "trained": ["w"], "parameters": ["w"]}
        document = checkpoint.describe_run(made, Path(folder) / "file", **described)
        made.close()
        return document, made.to_json()


DOCUMENT, LEDGER = saved()


def _bytes_of_a_file(write):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        write(path)
        return path.read_bytes()


def _in_a_file(function, data):
    """Call with the path of a file that holds these bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(data)
        function(path)


# ---------------------------------------------------------------------- parsers


def read_plan(text):
    plan = PrivacyPlan.from_json(text)
    assert PrivacyPlan.from_json(plan.to_json()).to_json() == plan.to_json()


def chained(records):
    """The text of a ledger that holds these records, with true hashes."""
    chain = Chain()
    with contextlib.suppress(TypeError, ValueError):  # JSON has no nan
        for record in records:
            chain.append(record if isinstance(record, dict) else {"x": record})
        return chain.text()
    return "{}"


def read_ledger(path):
    verify(path)  # a broken ledger is a finding there
    Ledger.read(path)


def load_state(state):
    for name in ("pld", "rdp"):
        fresh = accountants.create(name)
        fresh.load_state_dict(state)


def read_event(record):
    mechanisms.from_dict(record)


def write_and_read(document):
    """A document of one's own, with its true digest."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        checkpoint.write(path, ARRAYS, document)
        arrays, found = checkpoint.read(path)
        Path(folder, "file.ledger").write_text(LEDGER)
        checkpoint.open_run(found, path).close()


def command(arguments):
    """The command line: a result or exit code 1 or 2 and a sentence."""
    from typer.testing import CliRunner

    from dualdp_tools.cli import app

    done = CliRunner().invoke(app, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code in (0, 1, 2), done.output
    assert "Traceback" not in done.output


OPTIONS = {
    "epsilon": ["noise-multiplier", "sample-rate", "steps", "num-examples", "batch-size", "epochs"],
    "calibrate": ["target-epsilon", "sample-rate", "steps", "num-examples", "batch-size"],
}
COMMON = ["delta", "accountant", "sampler", "relation", "group-size", "max-batch-size"]
TOKENS = st.one_of(
    st.sampled_from(["1", "0", "-1", "0.01", "1e-5", "nan", "inf", "-inf", "1e400", "1e-400"]),
    st.sampled_from(["10", "100", "1e6", "99999999999999999999", "0x10", "", " ", "poisson"]),
    st.sampled_from(["rdp", "gdp", "prv", "shuffle", "balls_in_bins", "fixed_size", "replace"]),
    st.text(max_size=8),
)


@st.composite
def command_lines(draw):
    name = draw(st.sampled_from([*OPTIONS, "verify", "nonsense"]))
    if name not in OPTIONS:
        return [name, *draw(st.lists(TOKENS, max_size=3))]
    chosen = draw(st.lists(st.sampled_from([*OPTIONS[name], *COMMON]), max_size=9, unique=True))
    right = ["--noise-multiplier", "1", "--sample-rate", "0.01", "--steps", "5", "--delta", "1e-5"]
    line = [name] + (right if draw(st.booleans()) else [])
    return line + [part for option in chosen for part in (f"--{option}", draw(TOKENS))]


CHECKPOINT = _bytes_of_a_file(lambda path: checkpoint.write(path, ARRAYS, DOCUMENT))
LOG = b"step,epsilon,unprotected_loss\n1,0.5,2.0\n2,0.75,1.5\n"
LEDGER_BYTES = [made.to_json().encode() for made in LEDGERS]

#: name -> (inputs, what is called with one).
TARGETS = {
    "plan": (edited(PLANS).map(lambda d: json.dumps(d)), read_plan),
    "plan bytes": (
        damaged([json.dumps(p).encode() for p in PLANS]).map(lambda b: b.decode("latin1")),
        read_plan,
    ),
    "ledger": (edited(RECORDS).map(chained), lambda text: (Ledger.read(text), verify(text))),
    "ledger bytes": (damaged(LEDGER_BYTES), lambda data: _in_a_file(read_ledger, data)),
    "accountant": (edited(STATES), load_state),
    "event": (edited(EVENTS), read_event),
    "checkpoint": (edited([DOCUMENT]), write_and_read),
    "checkpoint bytes": (damaged([CHECKPOINT]), lambda data: _in_a_file(checkpoint.read, data)),
    "log bytes": (damaged([LOG]), lambda data: _in_a_file(read_log, data)),
    "command line": (command_lines(), command),
}


def run(name, examples, seed=None):
    """Try so many inputs of one parser."""
    inputs, function = TARGETS[name]
    settings = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=seed is None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],  # shrinking a slow input would be slow
    )

    def one(value):
        judge(name, function, value)

    test = hypothesis.given(inputs)(settings(one))
    if seed is not None:
        test = hypothesis.seed(seed)(test)
    test()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=2000, help="inputs for each parser")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(TARGETS))
    arguments = parser.parse_args()
    failures = 0
    for name in arguments.only:
        began = time.perf_counter()
        examples = arguments.examples // (10 if name == "command line" else 1)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                run(name, examples, arguments.seed)
            verdict = "ok"
        except (Exception, TooSlowError) as error:
            failures += 1
            notes = " ".join(getattr(error, "__notes__", []))
            verdict = f"FAILED: {type(error).__name__}: {error} {notes}"[:3000]
        seconds = time.perf_counter() - began
        print(f"{name:18s}{tried[name]:8d} inputs {seconds:7.1f} s  {verdict}", flush=True)
    print(f"{'all':18s}{tried.total():8d} inputs, {failures} parsers failed")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
