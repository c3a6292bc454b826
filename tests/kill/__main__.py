# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.kill --backend torch --kills 50 --out FILE`."""

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path

import dualdp
from tests.kill.driver import Trials


def main() -> int:
    """Kill runs of one backend and write what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.kill")
    parser.add_argument("--backend", choices=("torch", "jax"), required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(options.backend, Path(folder), options.steps, options.seed)
        report = trials.run(options.kills)
    found = {
        "backend": options.backend,
        "dualdp": dualdp.__version__,
        "python": platform.python_version(),
        "kills": report.kills,
        "resumes": len(report.resumes),
        "finished runs, bitwise equal to their undisturbed twins": report.finished,
        "releases of steps that ran again": report.repeated,
        "smallest epsilon said / epsilon released": min(
            (said / truth for said, truth in report.resumes if truth), default=None
        ),
        "failures": report.failures,
    }
    text = json.dumps(found, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
