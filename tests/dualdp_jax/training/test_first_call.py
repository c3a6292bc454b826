# SPDX-License-Identifier: Apache-2.0
"""What the first step of an engine traces and compiles: counted, never timed."""

import json
import os
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.dualdp_jax.runs import make_plan, private

N = 16
traced = Counter()


def loss(params, x, y):
    traced["loss"] += 1
    return jnp.sum((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


def run(method="auto"):
    """A run of two steps, both checked."""
    rng = np.random.default_rng(0)
    params = {"a": rng.normal(size=(7, 90)), "b": rng.normal(size=(90, 30))}
    params = jax.tree.map(lambda leaf: leaf.astype(np.float32), params)
    data = rng.normal(size=(N, 3, 7)).astype("f"), rng.normal(size=(N, 3, 30)).astype("f")
    given = {"expected_batch_size": 8, "physical_batch_size": 8, "num_steps": 2}
    plan = make_plan(num_examples=N, max_grad_norm=0.1, sampler="shuffle", **given)
    engine, step, state, loader = private(
        loss_fn=loss, params=params, data=data, plan=plan, method=method, checks=1
    )
    for batch in loader.remaining():
        state, _ = step(state, batch)
    return engine


@pytest.mark.parametrize(
    "method", ["auto", *(pytest.param(m, marks=pytest.mark.slow) for m in ("two_pass", "vmap"))]
)
def test_the_loss_is_traced_twice_at_most(method):
    """Once for all programs; "vmap" and "loop" differentiate the user's own function."""
    traced.clear()
    run(method)
    assert traced["loss"] <= (2 if method == "vmap" else 1)


def test_three_programs_are_compiled_and_no_more_at_later_steps(caplog):
    """The clipped sum, the reference of the checks, and the update; each of them is run."""
    with jax.log_compiles():
        run()
    lines = [record.getMessage() for record in caplog.records]
    names = Counter(line.split()[4] for line in lines if "Finished XLA compilation" in line)
    names.pop("jit(stage)", None)  # of JAX, which takes NumPy's arrays
    assert len(names) == sum(names.values()) == 3, names
    assert all(any(part in name for name in names) for part in ("_add_chunk", "_update", "subtr"))


PROGRAM = """
import json, sys
from collections import Counter
import jax.monitoring
seen = Counter()
jax.monitoring.register_event_listener(lambda name, **_: seen.update([name.rpartition("/")[2]]))
sys.path.insert(0, ".")
from tests.dualdp_jax.training.test_first_call import run
run()
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing_anew(tmp_path):
    """With JAX's persistent compilation cache."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env={**os.environ, **settings}, text=True,
            capture_output=True, check=True, timeout=300,
        )  # fmt: skip
        found.append(Counter(json.loads(done.stdout.splitlines()[-1])))
    first, second = found
    assert first["cache_misses"] > 2
    assert second["cache_hits"] > 2
    assert second["cache_misses"] == 0, second
