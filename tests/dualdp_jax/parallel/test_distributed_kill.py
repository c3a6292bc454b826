# SPDX-License-Identifier: Apache-2.0
"""One of two JAX processes is killed: the other stops, and the run goes on from its checkpoint."""

import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tests.dualdp_jax.workers import launch
from tests.kill import notes
from tests.kill.driver import Trials

pytestmark = pytest.mark.slow
SECONDS = 120  # of a whole run on a busy machine
TO_STOP = 45  # seconds that the other process may take to notice


class Pairs(Trials):
    """Trials of two processes, of which one kills itself at a place."""

    def __init__(self, folder, kind, num_steps=12):
        super().__init__("jax", folder, num_steps, seed=1)
        self.kind, self.folder = kind, folder
        self.twin = self.prepared("undisturbed")
        self.begin(self.twin)

    def prepared(self, name):
        folder = self.folder / name
        notes.prepare(folder, self._plan)
        return folder

    def begin(self, folder, victim=-1, place="-", count=0):
        """Both processes in a folder; (exit code, standard output and error) of each."""
        address = f"localhost:{launch.free_port()}"
        started = [
            launch.start(
                "kill", rank, 2, address, folder, self.kind, victim, place, count,
                devices=1, stderr=subprocess.PIPE,
            )
            for rank in (0, 1)
        ]  # fmt: skip
        try:
            if victim < 0:
                return [(p, *p.communicate(timeout=SECONDS)) for p in started]
            started[victim].wait(SECONDS)
            killed = time.monotonic()
            other = started[1 - victim]
            out, err = other.communicate(timeout=TO_STOP)
            return started[victim].returncode, other.returncode, out, err, time.monotonic() - killed
        finally:
            launch.end(started)

    def trial(self, number, victim, place, count):
        """Kill, see that the other stops, go on, and judge."""
        folder = self.prepared(f"run{number}")
        died, code, out, err, _ = self.begin(folder, victim, place, count)
        assert died == -9
        assert code not in (0, None)
        assert "lost another process" in out, err
        for process, out, err in self.begin(folder):
            assert process.returncode == 0, out + err
        assert notes.final(folder) == notes.final(self.twin)
        self._judge(folder.name, notes.read(folder))
        assert self.report.failures == []


def test_a_killed_process_stops_the_other():
    """At either place of a step, in either process; what is learned is bitwise the twin's."""
    with tempfile.TemporaryDirectory() as name:
        pairs = Pairs(Path(name), "file")
        for number, death in enumerate([(0, "recorded", 5), (1, "record", 7)]):
            pairs.trial(number, *death)
        assert all(said >= truth > 0 for said, truth in pairs.report.resumes)
        assert len(pairs.report.resumes) == 2
