# SPDX-License-Identifier: Apache-2.0
"""Any argument of the five questions: an answer, or one sentence; soon, and in little memory."""

import json
import math
import subprocess
import sys
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualdp.accountants.solve import (
    get_delta,
    get_epsilon,
    get_noise_multiplier,
    get_num_steps,
    get_sample_rate,
)

SIGMA = {"noise_multiplier": st.floats(0.05, 100)}
RATE = {"sample_rate": st.one_of(st.floats(1e-8, 1), st.just(1.0))}
STEPS = {"num_steps": st.integers(1, 10**7)}
DELTA = {"delta": st.floats(1e-30, 0.5)}
TARGET = {"target_epsilon": st.floats(0.01, 1000), "target_delta": st.floats(1e-30, 0.5)}
QUESTIONS = {
    get_epsilon: SIGMA | RATE | STEPS | DELTA,
    get_delta: SIGMA | RATE | STEPS | {"epsilon": st.floats(0, 1000)},
    get_noise_multiplier: RATE | STEPS | TARGET,
    get_num_steps: SIGMA | RATE | TARGET,
    get_sample_rate: SIGMA | STEPS | TARGET,
}
COMMON = {
    "sampler": st.sampled_from(
        ["poisson", "truncated_poisson", "fixed_size", "balls_in_bins", "shuffle"]
    ),
    "accountant": st.sampled_from(["pld", "rdp", "prv"]),
    "neighboring_relation": st.sampled_from(["add_or_remove", "replace", "zero_out"]),
}
JUNK = st.sampled_from(
    [-1, 0, 0.0, -0.0, 1, 1.5, -1e-300, 5e-324, 1e308, 10**30, math.inf, -math.inf, math.nan]
    + ["1", "", b"1", None, True, [1], {}, 1j, object()]
)
LIMIT = 60.0  # seconds on a loaded machine; the slowest take one or two on a quiet core
ids = {"ids": lambda question: question.__name__}


def asked(question, arguments):
    """The answer, or 0 where an error said what to change."""
    start = time.process_time()
    try:
        answer = question(**arguments)
    except (ValueError, TypeError) as error:
        answer, text = 0.0, str(error).lower()
    else:
        text = ""
    fixes = ("expected ", "use ", "pass ", "change ", "give ")
    assert not text or any(word in text for word in fixes), text
    assert answer >= 0, (arguments, answer)
    assert time.process_time() - start < LIMIT, arguments
    return answer


@pytest.mark.parametrize("question", QUESTIONS, **ids)
@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_argument_may_be_anything(question, data):
    arguments = {
        "noise_multiplier": 1.0,
        "sample_rate": 0.5,
        "num_steps": 2,
        "delta": 1e-5,
        "epsilon": 1.0,
        "target_epsilon": 1.0,
        "target_delta": 1e-5,
    }
    arguments = {name: arguments[name] for name in QUESTIONS[question]}
    names = sorted(arguments) + sorted(COMMON)
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        arguments[name] = data.draw(JUNK)
    asked(question, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS, **ids)
@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_valid_question_has_an_answer_in_time(question, data):
    arguments = {name: data.draw(values) for name, values in QUESTIONS[question].items()}
    arguments |= {name: data.draw(values) for name, values in COMMON.items()}
    asked(question, arguments)


HARD = [
    ("get_epsilon", {"noise_multiplier": 0.1, "sample_rate": 0.01, "num_steps": 10**6}),
    ("get_epsilon", {"noise_multiplier": 0.05, "sample_rate": 1e-8, "num_steps": 10**7}),
    ("get_epsilon", {"noise_multiplier": 100.0, "sample_rate": 0.999, "num_steps": 10**7}),
    ("get_epsilon", {"noise_multiplier": 0.5, "sample_rate": 1e-4, "num_steps": 10**4,
                     "sampler": "balls_in_bins"}),
    ("get_epsilon", {"noise_multiplier": 1.0, "sample_rate": 0.01, "num_steps": 1000,
                     "group_size": 1000}),
    ("get_delta", {"noise_multiplier": 0.3, "sample_rate": 1e-3, "num_steps": 10**7}),
    ("get_noise_multiplier", {"sample_rate": 1e-3, "num_steps": 10**6}),
    ("get_num_steps", {"noise_multiplier": 0.7, "sample_rate": 1e-3}),
    ("get_sample_rate", {"noise_multiplier": 0.7, "num_steps": 10**6}),
]  # fmt: skip
SCRIPT = """
import json, resource, sys, time
from dualdp.accountants import solve
name, arguments = json.loads(sys.argv[1])
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
answer = getattr(solve, name)(**arguments)
more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([answer, more / 2**20, time.process_time() - start]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), HARD)
def test_no_question_needs_a_gigabyte(name, arguments):
    targets = {"target_epsilon": 1000.0, "target_delta": 1e-12}
    more = {"get_epsilon": {"delta": 1e-12}, "get_delta": {"epsilon": 5.0}}.get(name, targets)
    command = [sys.executable, "-c", SCRIPT, json.dumps([name, arguments | more])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    answer, gibibytes, seconds = json.loads(done.stdout)
    assert answer > 0
    assert gibibytes < 1
    assert seconds < LIMIT


def test_counts_have_an_end():
    with pytest.raises(ValueError, match="Expected an integer of at most 9.007e"):
        get_epsilon(noise_multiplier=1.0, sample_rate=0.1, num_steps=10**19, delta=1e-5)
