# SPDX-License-Identifier: Apache-2.0
"""What a run that may be killed leaves behind for its judge, beside checkpoint and ledger.

A line for each release is on record before its noise is drawn, so the notes never lack a release
that happened. Every line is one `write`, which a `SIGKILL` does not undo.
"""

from __future__ import annotations

import hashlib
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
_NOTES, _PLAN, _KEY, _FINAL = "notes.jsonl", "plan.json", "plan.key", "final.npz"


def new_plan(num_steps: int) -> PrivacyPlan:
    """The plan of one trial, with a key of its own."""
    return PrivacyPlan(
        num_examples=NUM_EXAMPLES,
        expected_batch_size=16,
        num_steps=num_steps,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        delta=1e-5,
        accountant="rdp",
    )


def prepare(folder: Path, run: PrivacyPlan) -> None:
    """Put plan and key into a new folder, without the marks that `save_key` would bring along."""
    folder.mkdir()
    (folder / _PLAN).write_text(run.to_json())
    (folder / _KEY).write_text(run.root._text())


def plan(folder: str) -> PrivacyPlan:
    """The plan of a folder, with its key."""
    return PrivacyPlan.from_json(Path(folder, _PLAN).read_text(), key=Path(folder, _KEY))


def own_machine(folder: str | Path) -> None:
    """Let the runs of a folder see no other's marks: a run and its twin have one key."""
    os.environ["XDG_STATE_HOME"] = os.fspath(Path(folder, "state"))


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


def forget_half_a_start(path: Path) -> None:
    """Remove the ledger of a start that was killed before its first checkpoint was whole."""
    left = Path(f"{path}.ledger")
    if left.exists():
        assert not any(record.get("kind") == "release" for record in Ledger.read(left))
        left.unlink()


def finish(folder: str, arrays: dict[str, Any], epsilon: float) -> None:
    """Keep what the run has learned."""
    np.savez(Path(folder, _FINAL), **arrays)
    write(folder, finished=True, epsilon=epsilon)


def final(folder: Path) -> dict[str, bytes]:
    """Name -> bits of what a finished run has learned."""
    with np.load(folder / _FINAL) as found:
        return {name: found[name].tobytes() for name in found.files}


def watch_noise(folder: str, module: str) -> None:
    """Note every release before its noise is drawn: the step, and a digest of the clipped sum.

    Args:
        folder: of the run.
        module: where the backend calls `noised_mean(grads, plan, step, ...)`.
    """
    place = importlib.import_module(module)
    real = place.noised_mean

    def noted(grads: Any, run: PrivacyPlan, step: int, **options: Any) -> Any:
        digest = hashlib.sha256()
        for _, grad in sorted(_leaves(grads)):
            digest.update(np.ascontiguousarray(grad).tobytes())
        write(folder, step=int(step), sum=digest.hexdigest())
        return real(grads, run, step, **options)

    place.noised_mean = noted


def _leaves(grads: Any, path: str = "") -> list[tuple[str, Any]]:
    """(path, array) of nested dicts and sequences."""
    if isinstance(grads, dict):
        return [leaf for k, g in grads.items() for leaf in _leaves(g, f"{path}/{k}")]
    if isinstance(grads, list | tuple):
        return [leaf for k, g in enumerate(grads) for leaf in _leaves(g, f"{path}/{k}")]
    return [(path, np.asarray(grads))]


def die_at(die: tuple[str, int] | None) -> None:
    """Make this process kill itself at a chosen place.

    Args:
        die: None, or a place and how often it is passed before: "record" (before a step is
            recorded), "recorded", "seal", "sealed", "write" (a checkpoint is on the disk but not
            yet in its place) or "written".
    """
    if die is None:
        return
    place, left = die
    owner, name = {
        **dict.fromkeys(("record", "recorded"), (Ledger, "record")),
        **dict.fromkeys(("seal", "sealed"), (Ledger, "seal")),
        **dict.fromkeys(("write", "written"), (checkpoint.os, "replace")),
    }[place]
    real, count = getattr(owner, name), [left]

    def passed(*args: Any, **options: Any) -> Any:
        count[0] -= 1
        if count[0] < 0 and not place.endswith("ed") and place != "written":
            os.kill(os.getpid(), signal.SIGKILL)
        found = real(*args, **options)
        if count[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, passed)
