# SPDX-License-Identifier: Apache-2.0
"""What a refused program leaves in a process: its loader's function mode, which goes with it."""

import pytest


@pytest.fixture(autouse=True)
def modes_go_with_their_program():
    yield
    overrides = pytest.importorskip("torch").overrides
    for _ in overrides._get_current_function_mode_stack():
        overrides._pop_mode()
