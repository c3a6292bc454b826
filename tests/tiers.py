# SPDX-License-Identifier: Apache-2.0
"""Which cases of a test are fast."""

import pytest


def first(count, values):
    """Return the values of a parameter, all but the first `count` marked slow."""
    values = list(values)
    return values[:count] + [pytest.param(v, marks=pytest.mark.slow) for v in values[count:]]
