# SPDX-License-Identifier: Apache-2.0
"""How often the correct implementation is accused: `check_private_step` over many seeds.

    python -m tests.trust_seeds --seeds 50 --out out/trust.json

Runs of some seeds or stacks add to what the file holds already.
"""

import argparse
import json
import platform
import statistics
import time
from importlib import metadata
from pathlib import Path

from dualdp.testing import check_private_step
from tests.numpy_step import NumpyStep
from tests.private_steps import STEPS

MAKERS = {"numpy": NumpyStep, **STEPS}


def one(stack, seed):
    """Verdict, seconds and the smallest p-value of one seed."""
    wall, cpu = time.perf_counter(), time.process_time()
    report = check_private_step(MAKERS[stack](), seed=seed)
    p_values = [check.statistic for check in report.checks if check.is_p_value]
    return {
        "passed": report.passed,
        "failures": list(report.failures),
        "checks": len(report.checks),
        "smallest_p_value": min(p_values),
        "seconds": round(time.perf_counter() - wall, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
    }


def summary(seeds):
    """Of one stack."""
    return {
        "seeds": len(seeds),
        "passed": sum(found["passed"] for found in seeds.values()),
        "median_cpu_seconds": statistics.median(found["cpu_seconds"] for found in seeds.values()),
        "smallest_p_value": min(found["smallest_p_value"] for found in seeds.values()),
    }


def versions():
    """Of what ran."""
    names = ("numpy", "scipy", "torch", "jax")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in names}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--stacks", nargs="*", default=list(MAKERS), choices=list(MAKERS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    out = arguments.out
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(out.read_text()) if out is not None and out.exists() else {"runs": {}}
    for stack in arguments.stacks:
        seeds = results["runs"].setdefault(stack, {})
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            seeds[str(seed)] = found = one(stack, seed)
            print(stack, seed, "pass" if found["passed"] else found["failures"], flush=True)
            results["summary"] = {name: summary(runs) for name, runs in results["runs"].items()}
            if out is not None:
                out.write_text(json.dumps({**results, "versions": versions()}, indent=1) + "\n")
    print(json.dumps(results["summary"], indent=1))
    raise SystemExit(any(s["passed"] < s["seeds"] for s in results["summary"].values()))


if __name__ == "__main__":
    main()
