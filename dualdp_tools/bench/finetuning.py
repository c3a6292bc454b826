# SPDX-License-Identifier: Apache-2.0
"""Suite of fine-tuning: Adam under noise, large tables of embeddings, adapters of a small Llama."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dualdp_tools.bench import workloads
from dualdp_tools.bench.measure import Protocol, empty_row
from dualdp_tools.bench.results import Row
from dualdp_tools.bench.session import QUICK, Session
from dualdp_tools.bench.specs import chain
from dualdp_tools.bench.systems import AUTO, LOOP, NON_PRIVATE, Setting, error_text
from dualdp_tools.bench.workloads import Workload

ADAM_BC, SPARSE = f"{AUTO}, AdamBC", f"{AUTO}, AdaFEST"  # beside AUTO: AdamW, and dense noise
MAP_SHARE, THRESHOLD = 0.2, 5.0  # of DP-AdaFEST
ADAM_RATE = 1e-2  # of the adapters
SEEDS = 3  # of the loss after some steps

# Kind of systems -> (workload, options, examples), by size.
POINTS: dict[str, dict[str, tuple[str, dict[str, Any], int]]] = {
    "quick": {
        "optimizers": ("gpt", {"layers": 1, "width": 32, "length": 8, "vocabulary": 50}, 4),
        "sparse": ("embed", {"length": 4, "vocabulary": 200}, 8),
    },
    "cpu": {
        "optimizers": ("gpt", {}, 8),
        "sparse": ("embed", {"length": 16, "vocabulary": 100_000}, 256),
    },
}
POINTS["cuda"] = POINTS["cpu"]
# Options of the Llama, examples, and steps until the loss is read.
LLAMA: dict[str, tuple[dict[str, int], int, int]] = {
    "quick": ({"layers": 1, "width": 16, "heads": 2, "length": 6, "vocabulary": 30}, 4, 2),
    "cpu": ({"layers": 4, "width": 256, "heads": 4, "length": 64, "vocabulary": 2_000}, 16, 30),
}
LLAMA["cuda"] = LLAMA["cpu"]


@dataclass(frozen=True)
class Language(Workload):
    """Rows of a language in which each token mostly tells the next one."""

    def batch(self, n: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens (n, t), and the token after each of them."""
        rng = np.random.default_rng(seed)
        (length,), size = self.shape, self.classes
        rows = rng.integers(0, size, (n, length + 1))
        for t in range(1, length + 1):
            usual = (7 * rows[:, t - 1] + 1) % 20  # few words, which can be learned in a few steps
            rows[:, t] = np.where(rng.random(n) < 0.9, usual, rows[:, t])
        return rows[:, :-1], rows[:, 1:]


def llama(**options: int) -> Language:
    """Return the workload of a Llama with adapters; its model is made by `finetuning_torch`."""
    length, words = options["length"], options["vocabulary"]
    return Language("llama_lora", chain(), (length,), "token", words, words, options)


def finetuning(session: Session) -> Iterator[list[Row]]:
    """Measure AdamW and AdamBC, dense and sparse noise on a table, and adapters of a Llama."""
    systems = importlib.import_module(f"dualdp_tools.bench.finetuning_{session.stack.name}")
    for kind, (name, options, n) in POINTS[session.size_key].items():
        if session.wanted(name):
            workload = workloads.create(name, **options)
            yield _point(session, systems.SYSTEMS[kind], workload, n)
    if session.stack.name == "torch" and not session.workloads:
        options, n, steps = LLAMA[session.size_key]
        workload = llama(**options)
        if earlier := session.earlier_rows("finetuning", workload):
            yield earlier
            return
        rows = _point(session, systems.SYSTEMS["llama"], workload, n)
        yield [*rows, *_losses(session, rows, workload, n, steps)]


def _point(session: Session, table: dict[str, Any], workload: Workload, n: int) -> list[Row]:
    """Rows of the updates of these systems, whose clipped sums must be those of the loop."""
    names = [name for name in table if name != LOOP]
    if session.systems:
        wanted = (NON_PRIVATE, *session.systems)
        names = [name for name in names if name.partition(",")[0] in wanted]
    own = replace(session, stack=replace(session.stack, systems=table, forced=()), systems=None)
    usual = QUICK if session.quick else Protocol(rounds=15, patience=20.0)
    return own.point(
        workload,
        session.batch or n,
        "finetuning",
        systems=names,
        quantities=("update",),
        protocol=usual,
        memory=True,
    )


def _losses(session: Session, rows: list[Row], workload: Workload, n: int, steps: int) -> list[Row]:
    """Mean loss on new rows after some updates with the same batches, noise multiplier and C."""
    from dualdp_tools.bench import finetuning_torch

    n = session.batch or n
    found = []
    for row in rows:
        fields = {"system": row.system, "quantity": "loss"}
        fields["note"] = f"{SEEDS} seeds, {steps} steps"
        base = empty_row(session.stack, "finetuning", workload, n, **fields)
        if row.error:
            found.append(replace(base, error=row.error))
            continue
        try:
            each = [
                finetuning_torch.loss_after(
                    row.system, Setting(workload, n, 1.0, session.device, seed), steps
                )
                for seed in range(SEEDS)
            ]
            found.append(replace(base, value=float(np.mean(each))))
        except Exception as error:  # the reason is the system's row
            found.append(replace(base, error=error_text(error)))
    return found
