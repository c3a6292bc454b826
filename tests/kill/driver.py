# SPDX-License-Identifier: Apache-2.0
"""Kills training runs, lets them go on, and judges what they said and learned."""

from __future__ import annotations

import importlib
import multiprocessing
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dualdp import accountants
from dualdp.plan.plan import PrivacyPlan
from tests import preload
from tests.kill import notes


@dataclass
class Report:
    """What came of the trials.

    Attributes:
        kills: runs that were killed while they worked.
        resumes: runs that went on, each with (epsilon said, epsilon of the truth).
        finished: trials that reached the plan's end.
        replayed: releases that were repeated as they were.
        failures: what went wrong, one sentence each.
    """

    kills: int = 0
    resumes: list[tuple[float, float]] = field(default_factory=list)
    finished: int = 0
    replayed: int = 0
    failures: list[str] = field(default_factory=list)


class Trials:
    """Runs of one backend, each beside a twin that nobody kills.

    Args:
        backend: "torch" or "jax": `tests.kill.train_<backend>` trains.
        folder: for everything that the runs write.
        num_steps: of each run.
        seed: of the instants.
    """

    def __init__(self, backend: str, folder: Path, num_steps: int, seed: int) -> None:
        self._module = f"tests.kill.train_{backend}"
        self._folder, self._num_steps = folder, num_steps
        self._rng = np.random.default_rng(seed)
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(preload.MODULES)
        self._count = 0
        self.report = Report()

    def run(self, kills: int) -> Report:
        """Kill so many times, at random instants."""
        while self.report.kills < kills:
            folder, seconds = self._new_trial()
            while self.report.kills < kills:
                if self._killed(folder, after=float(self._rng.uniform(0, seconds))):
                    self.report.kills += 1
                else:
                    break
            self._finish(folder)
        return self.report

    def run_places(self, places: list[tuple[str, int]]) -> Report:
        """Kill at chosen places, each in a run of its own."""
        for place in places:
            folder, _ = self._new_trial()
            process = self._start(folder, place)
            process.join(120)
            if process.exitcode != -9:
                self.report.failures.append(f"{place}: the run ended with {process.exitcode}.")
            self.report.kills += 1
            self._finish(folder)
        return self.report

    def _start(self, folder: Path, die: tuple[str, int] | None = None) -> Any:
        """A process that trains in a folder."""
        target = importlib.import_module(self._module).main
        process = self._processes.Process(target=target, args=(str(folder), die))
        process.start()
        return process

    def _new_trial(self) -> tuple[Path, float]:
        """A folder for the run, and how long its twin took, which ran to its end undisturbed."""
        self._count += 1
        run: PrivacyPlan = notes.new_plan(self._num_steps)
        folder, twin = (self._folder / f"{name}{self._count}" for name in ("run", "twin"))
        notes.prepare(folder, run)
        notes.prepare(twin, run)
        process = self._start(twin)
        begun = _wait(process, twin, 1)
        process.join(120)
        if process.exitcode != 0:
            raise RuntimeError(f"The undisturbed run ended with {process.exitcode}.")
        return folder, time.monotonic() - begun

    def _killed(self, folder: Path, after: float) -> bool:
        """Start or go on; kill some time after the first sign of life. False if it was done."""
        lines = len(notes.read(folder))
        process = self._start(folder)
        _wait(process, folder, lines + 1)
        process.join(after)
        process.kill()
        process.join()
        return bool(process.exitcode == -9)

    def _finish(self, folder: Path) -> None:
        """Go on to the end, and judge."""
        process = self._start(folder)
        process.join(120)
        twin = folder.with_name(folder.name.replace("run", "twin"))
        report, name = self.report, folder.name
        if process.exitcode != 0:
            report.failures.append(f"{name}: going on ended with {process.exitcode}.")
            return
        report.finished += 1
        if notes.final(folder) != notes.final(twin):
            report.failures.append(f"{name}: it learned something else than its twin.")
        self._judge(name, notes.read(folder), notes.plan(str(folder)))
        shutil.rmtree(folder)
        shutil.rmtree(twin)

    def _judge(self, name: str, lines: list[dict[str, Any]], run: PrivacyPlan) -> None:
        """Compare every epsilon that was said with what had been released by then."""
        released: set[tuple[int, str]] = set()
        for line in lines:
            if "step" in line:
                release = (line["step"], line["sum"])
                self.report.replayed += release in released
                released.add(release)
            if "epsilon" not in line:
                continue
            said, truth = line["epsilon"], _epsilon(run, released)
            if "resumed" in line:
                self.report.resumes.append((said, truth))
            if said < truth * (1 - 1e-12):
                self.report.failures.append(f"{name}: it said {said}, but {truth} was released.")
        if _epsilon(run, released) > run.epsilon() * (1 + 1e-12):
            self.report.failures.append(f"{name}: a step was released twice.")


def _epsilon(run: PrivacyPlan, released: set[tuple[int, str]]) -> float:
    """Epsilon of the releases; k of them on one draw are one with noise less by sqrt(k)."""
    accountant = accountants.create(run.accountant)
    for times, steps in Counter(Counter(step for step, _ in released).values()).items():
        noise = run.noise_multiplier_at(0) / times**0.5
        accountant.step(noise_multiplier=noise, sample_rate=run.sample_rate, num_steps=steps)
    return float(accountant.get_epsilon(delta=run.delta))


def _wait(process: Any, folder: Path, lines: int) -> float:
    """Wait until the notes have so many lines; returns the time."""
    while len(notes.read(folder)) < lines and process.is_alive():
        time.sleep(0.002)
    return time.monotonic()
