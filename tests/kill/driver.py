# SPDX-License-Identifier: Apache-2.0
"""Kills training runs, lets them go on, and judges what they said and learned."""

from __future__ import annotations

import importlib
import multiprocessing
import shutil
import time
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
        resumes: runs that went on, each with (epsilon said, epsilon of what was released).
        finished: trials that reached the plan's end.
        repeated: releases of steps that ran again.
        failures: what went wrong, one sentence each.
    """

    kills: int = 0
    resumes: list[tuple[float, float]] = field(default_factory=list)
    finished: int = 0
    repeated: int = 0
    failures: list[str] = field(default_factory=list)


class Trials:
    """Runs of one backend, of a seed, beside a twin that nobody kills.

    Args:
        backend: "torch" or "jax": `tests.kill.train_<backend>` trains.
        folder: for everything that the runs write.
        num_steps: of each run.
        seed: of the instants.
    """

    def __init__(self, backend: str, folder: Path, num_steps: int, seed: int) -> None:
        self._module = f"tests.kill.train_{backend}"
        self._folder, self._plan = folder, notes.new_plan(num_steps)
        self._rng = np.random.default_rng(seed)
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(preload.MODULES)
        self._count = 0
        self.report = Report()
        self._twin = folder / "twin"
        notes.prepare(self._twin, self._plan)
        process = self._start(self._twin)
        begun = _wait(process, self._twin, 1)
        process.join(120)
        if process.exitcode != 0:
            raise RuntimeError(f"The undisturbed run ended with {process.exitcode}.")
        self._seconds = time.monotonic() - begun

    def run(self, kills: int) -> Report:
        """Kill so many times, at random instants."""
        while self.report.kills < kills:
            folder = self._new_trial()
            while self.report.kills < kills:
                if self._killed(folder, after=float(self._rng.uniform(0, self._seconds))):
                    self.report.kills += 1
                else:
                    break
            self._finish(folder)
        return self.report

    def run_places(self, places: list[tuple[str, int]]) -> Report:
        """Kill at chosen places, each in a run of its own."""
        for place in places:
            folder = self._new_trial()
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

    def _new_trial(self) -> Path:
        """A folder for a run."""
        self._count += 1
        folder = self._folder / f"run{self._count}"
        notes.prepare(folder, self._plan)
        return folder

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
        report, name = self.report, folder.name
        if process.exitcode != 0:
            report.failures.append(f"{name}: going on ended with {process.exitcode}.")
            return
        report.finished += 1
        if notes.final(folder) != notes.final(self._twin):
            report.failures.append(f"{name}: it learned something else than its twin.")
        self._judge(name, notes.read(folder))
        shutil.rmtree(folder)

    def _judge(self, name: str, lines: list[dict[str, Any]]) -> None:
        """Compare every epsilon that was said with what had been released by then."""
        steps = list[int]()
        for line in lines:
            if "step" in line:
                self.report.repeated += line["step"] in steps
                steps.append(line["step"])
            if "epsilon" not in line:
                continue
            said, truth = line["epsilon"], epsilon_of(self._plan, len(steps))
            if "resumed" in line:
                self.report.resumes.append((said, truth))
            if said < truth * (1 - 1e-12):
                self.report.failures.append(f"{name}: it said {said}, but {truth} was released.")
            if line.get("finished", len(steps)) < len(steps):
                self.report.failures.append(f"{name}: {line} lacks one of {len(steps)} releases.")


def epsilon_of(run: PrivacyPlan, releases: int) -> float:
    """Epsilon of so many releases, each with a batch and noise of its own."""
    accountant = accountants.create(run.accountant)
    if releases:
        noise = run.noise_multiplier_at(0)
        accountant.step(noise_multiplier=noise, sample_rate=run.sample_rate, num_steps=releases)
    return float(accountant.get_epsilon(delta=run.delta))


def _wait(process: Any, folder: Path, lines: int) -> float:
    """Wait until the notes have so many lines; returns the time."""
    while len(notes.read(folder)) < lines and process.is_alive():
        time.sleep(0.002)
    return time.monotonic()
