# SPDX-License-Identifier: Apache-2.0
"""Errors about arguments and files: what came, what was expected."""

import errno
import os

import numpy as np
import pytest

import dualdp
from dualdp._validate import file_errors
from tests.mistakes import refused


@pytest.mark.parametrize(
    ("verb", "code", "error", "words"),
    [
        ("written", errno.EACCES, PermissionError, "x can't be written .Permission denied.. Expec"),
        ("read", errno.EACCES, PermissionError, "x can't be read .Permission denied.. Expected y"),
        ("written", errno.ENOSPC, OSError, "x can't be written .No space left on device.. Expect"),
    ],
)
def test_errors_of_the_system_become_sentences(verb, code, error, words):
    def call():
        with file_errors(verb, "x", "y"):
            raise OSError(code, os.strerror(code))

    refused(call, error, words)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ("1", TypeError, "noise_multiplier='1' is a str"),
        (None, TypeError, "^noise_multiplier=None. Expected a number"),
        ([1, 2], TypeError, "is a list"),
        (np.ones(2), TypeError, "is a NumPy array"),
        (True, TypeError, "noise_multiplier=True is a bool"),
        (np.nan, ValueError, "noise_multiplier=nan is not a number"),
    ],
)
def test_a_number_must_be_one(value, error, words):
    run = {"sample_rate": 0.1, "num_steps": 3, "delta": 1e-5}
    refused(lambda: dualdp.get_epsilon(noise_multiplier=value, **run), error, words)
