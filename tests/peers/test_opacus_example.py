# SPDX-License-Identifier: Apache-2.0
"""Opacus' examples with Opacus and with dualdp: the same accuracy at the same epsilon."""

import numpy as np
import pytest

from benchmarks import opacus_examples

pytest.importorskip("opacus")
pytest.importorskip("sklearn")

TEXTS = dict(opacus_examples.examples())
SEEDS = range(6)

pytestmark = pytest.mark.slow


def test_the_import_line_is_all_that_changes(record_property):
    ours = TEXTS["opacus_mnist"]
    assert opacus_examples.changed(ours) == (1, 1)
    programs = {"opacus": opacus_examples.for_opacus(ours), "dualdp": ours}
    found = {
        name: np.array([opacus_examples.run(program, seed) for seed in SEEDS])
        for name, program in programs.items()
    }
    for name, results in found.items():
        record_property(name, results.mean(0).tolist())
        print(f"{name}: accuracy {results[:, 0].mean():.3f}, epsilon {results[0, 1]:.3f}")
    theirs, ours = found["opacus"], found["dualdp"]
    # 1,400 examples in batches of 64 make 22: Opacus draws with probability 1 / 22, and adds 0.01.
    assert ours[0, 1] == pytest.approx(theirs[0, 1], rel=0.01)
    spread = np.sqrt(np.var(theirs[:, 0], ddof=1) + np.var(ours[:, 0], ddof=1))
    apart = abs(theirs[:, 0].mean() - ours[:, 0].mean())
    assert apart <= 4 * spread / np.sqrt(len(SEEDS))
    assert min(theirs[:, 0].mean(), ours[:, 0].mean()) > 0.75
