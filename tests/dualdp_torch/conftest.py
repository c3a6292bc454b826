# SPDX-License-Identifier: Apache-2.0
"""What every test of the PyTorch stack leaves behind: nothing."""

import pytest


@pytest.fixture(autouse=True)
def no_function_mode_is_left():
    """A record of a loop ends with its loader; a forward takes its modes away, whatever ends it."""
    yield
    overrides = pytest.importorskip("torch").overrides
    left = [overrides._pop_mode() for _ in overrides._get_current_function_mode_stack()]
    assert not left
