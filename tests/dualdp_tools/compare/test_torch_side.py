# SPDX-License-Identifier: Apache-2.0
"""A fault in PyTorch's training is found and named; gradients are perturbed in JAX's."""

import pytest

from dualdp_tools.compare.torch_side import TorchRun


@pytest.mark.slow
def test_a_perturbed_training_is_found_and_named(compare, monkeypatch):
    honest = TorchRun.private_step

    def perturbed(self, step):
        honest(self, step)
        if step == 1:
            self.model.head.weight.data.mul_(1.0001)

    monkeypatch.setattr(TorchRun, "private_step", perturbed)
    code, words = compare()
    assert code == 1
    assert "after step 2 the parameters differ by" in words
    assert "most at head.weight; tolerated is 1e-05" in words
