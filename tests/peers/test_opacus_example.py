# SPDX-License-Identifier: Apache-2.0
"""Opacus' example with its import line changed: the same accuracy at the same epsilon."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("opacus")
pytest.importorskip("sklearn")

SOURCE = Path(__file__).with_name("opacus_example.py").read_text()
LINE = "from opacus import PrivacyEngine\n"
SEEDS = range(6)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Opacus warns of its hooks and of its generator
]


def results(line):
    """(accuracy, epsilon) of each seed, with this import line."""
    assert SOURCE.count("opacus import") == 1
    names = {"__name__": "example"}
    exec(compile(SOURCE.replace(LINE, line), "example", "exec"), names)
    return np.array([names["main"](seed) for seed in SEEDS])


def test_the_import_line_is_all_that_changes(record_property):
    theirs, ours = results(LINE), results("from dualdp.torch import PrivacyEngine\n")
    for name, found in (("opacus", theirs), ("dualdp", ours)):
        record_property(name, found.mean(0).tolist())
        print(f"{name}: accuracy {found[:, 0].mean():.3f}, epsilon {found[0, 1]:.3f}")
    # Both bound the same composition, ours from above and at most a percent away.
    assert ours[0, 1] == pytest.approx(theirs[0, 1], rel=0.01)
    spread = np.sqrt(np.var(theirs[:, 0], ddof=1) + np.var(ours[:, 0], ddof=1))
    apart = abs(theirs[:, 0].mean() - ours[:, 0].mean())
    assert apart <= 4 * spread / np.sqrt(len(SEEDS))
    assert min(theirs[:, 0].mean(), ours[:, 0].mean()) > 0.75
