# SPDX-License-Identifier: Apache-2.0
"""Errors about arguments and files: what came, what was expected."""

import errno
import os

import pytest

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
