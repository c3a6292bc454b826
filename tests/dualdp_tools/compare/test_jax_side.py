# SPDX-License-Identifier: Apache-2.0
"""A fault in JAX's run is found and named."""

import jax
import pytest
from jax.tree_util import keystr

import dualdp.jax as dpj


@pytest.mark.slow
def test_a_perturbed_gradient_is_found_and_named(compare, monkeypatch):
    honest = dpj.per_sample_grads

    def perturbed(*arguments, **options):
        return jax.tree_util.tree_map_with_path(
            lambda path, grad: grad * (1.001 if "['head']['bias']" in keystr(path) else 1),
            honest(*arguments, **options),
        )

    monkeypatch.setattr(dpj, "per_sample_grads", perturbed)
    code, words = compare()
    assert code == 1
    assert "The stacks disagree: the per-sample gradients of head.bias" in words
