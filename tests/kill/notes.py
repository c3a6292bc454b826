# SPDX-License-Identifier: Apache-2.0
"""What a run that may be killed leaves behind for its judge, beside checkpoint and ledger.

A line for each release is written before its noise is drawn, so the notes never lack a release that
happened. Every line is one `write`, which a `SIGKILL` does not undo.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

from dualdp import checkpoint
from dualdp.ledger.ledger import Ledger
from dualdp.plan.plan import PrivacyPlan

NUM_EXAMPLES = 160
_NOTES, _PLAN, _FINAL = "notes.jsonl", "plan.json", "final.npz"


def new_plan(num_steps: int, **changes: Any) -> PrivacyPlan:
    """The plan of one trial; with its seed a run that goes on ends where its twin ends."""
    settings = {
        **{"num_examples": NUM_EXAMPLES, "expected_batch_size": 16, "num_steps": num_steps},
        **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, "delta": 1e-5, "accountant": "rdp"},
        "seed": 1,
    }
    return PrivacyPlan(**{**settings, **changes})


def prepare(folder: Path, run: PrivacyPlan) -> None:
    """Put the plan into a new folder."""
    folder.mkdir()
    (folder / _PLAN).write_text(run.to_json())


def plan(folder: str) -> PrivacyPlan:
    """The plan of a folder."""
    return PrivacyPlan.from_json(Path(folder, _PLAN).read_text())


def write(folder: str, **facts: Any) -> None:
    """Append one line."""
    line = json.dumps(facts).encode() + b"\n"
    handle = os.open(Path(folder, _NOTES), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, line)
    finally:
        os.close(handle)


def read(folder: Path) -> list[dict[str, Any]]:
    """All lines so far."""
    path = folder / _NOTES
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def finish(folder: str, arrays: dict[str, Any], ledger: Ledger) -> None:
    """Keep what the run has learned."""
    np.savez(Path(folder, _FINAL), **arrays)
    write(folder, finished=len(ledger), epsilon=ledger.get_epsilon())


def final(folder: Path) -> dict[str, bytes]:
    """Name -> bits of what a finished run has learned."""
    with np.load(folder / _FINAL) as found:
        return {name: found[name].tobytes() for name in found.files}


def watch_noise(folder: str, module: str) -> None:
    """Note the step of every release before its bits are drawn, where `module` draws them."""
    place = importlib.import_module(module)
    real = place.noise_bits

    def noted(seed: int | None, step: int) -> bytes:
        write(folder, step=int(step))
        bits: bytes = real(seed, step)
        return bits

    place.noise_bits = noted


def die_at(die: tuple[str, int] | None) -> None:
    """Make this process kill itself at a chosen place.

    Args:
        die: None, or a place and how often it is passed before: "record" (before a step is
            recorded), "recorded", "write" (a checkpoint is on the disk but not yet in its place) or
            "written".
    """
    if die is None:
        return
    place, left = die
    owner, name = {
        **dict.fromkeys(("record", "recorded"), (Ledger, "record")),
        **dict.fromkeys(("write", "written"), (checkpoint.os, "replace")),
    }[place]
    real, count = getattr(owner, name), [left]

    def passed(*args: Any, **options: Any) -> Any:
        count[0] -= 1
        if count[0] < 0 and place in ("record", "write"):
            os.kill(os.getpid(), signal.SIGKILL)
        found = real(*args, **options)
        if count[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, passed)
