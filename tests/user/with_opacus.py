# SPDX-License-Identifier: Apache-2.0
"""Run every program with Opacus; write the table of docs/from_opacus.md.

    PYTHONPATH=. OMP_NUM_THREADS=1 .venv-bench/bin/python -m tests.user.with_opacus

A program is as its author wrote it but for the lines marked `# dp`. Opacus gets the form of fewest
such lines that takes five steps: as written, with `ModuleValidator.fix`, with the lines of
`CHANGES`, in each mode that computes per-sample gradients in an unchanged loop.
"""

import collections
import contextlib
import inspect
import itertools
import re
import warnings
from pathlib import Path

from tests.user import conftest

PAGE = Path(__file__).parents[2] / "docs" / "from_opacus.md"
TABLE = re.compile(r"(?<=<!-- programs -->\n).*(?=<!-- /programs -->)", re.DOTALL)
STEPS = 5
#: What Opacus asks for besides, by program: (text, text with Opacus).
CHANGES = {
    "char_rnn": [("model.zero_grad", "optimizer.zero_grad")],
}


class Enough(Exception):
    """Five steps were taken."""


class Opacus:
    """`private` of a program: Opacus' engine, set up as its documentation asks."""

    def __init__(self, mode, is_fixed):
        self.mode, self.is_fixed, self.lines, self.steps = mode, is_fixed, is_fixed, 0

    def __call__(self, model, optimizer, loader, max_physical_batch_size=None, **options):
        from opacus import PrivacyEngine
        from opacus.utils.batch_memory_manager import BatchMemoryManager
        from opacus.validators import ModuleValidator

        if self.is_fixed:  # before the optimizer is made
            model = ModuleValidator.fix(model)
            optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p.requires_grad]
            del optimizer.param_groups[1:]
        optimizer.register_step_post_hook(self._count)
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=conftest.NUMBERS["max_grad_norm"],
            grad_sample_mode=self.mode,
            **options,
        )
        if max_physical_batch_size:
            self.lines += 1
            given = {"data_loader": loader, "max_physical_batch_size": max_physical_batch_size}
            loader = BatchMemoryManager(optimizer=optimizer, **given).__enter__()
        loader.remaining = lambda: itertools.chain.from_iterable(itertools.repeat(loader))
        return model, optimizer, loader

    def pause(self):
        return contextlib.nullcontext()

    def _count(self, *_):
        self.steps += 1
        if self.steps == STEPS:
            raise Enough


def written(run):
    """Return the text of a program and of the functions and classes beside it that it names."""
    beside = [run.__globals__.get(name) for name in run.__code__.co_names]
    beside = [one for one in beside if getattr(one, "__module__", None) == run.__module__]
    return conftest.text_of(run) + "".join(map(inspect.getsource, beside))


def lines_here(entry):
    """Return how many lines of a program its author did not write."""
    text = written(entry.run)
    return text.count("# dp") + text.count(".remaining()")


def forms(entry):
    """Return (changed lines, program) of what is tried with Opacus."""
    text, name = conftest.text_of(entry.run), entry.run.__name__
    old, new, _ = entry.mistake
    found = []
    if entry.run.__module__.endswith("ways_out") or "# dp" in old:  # what the author wrote
        found.append((1, [(old, new)]))
    unneeded = text.count("private.pause") + text.count("dpt.")
    found.append((lines_here(entry) - text.count(".remaining()") - unneeded, []))
    if name in CHANGES:
        found.append((found[-1][0] + len(CHANGES[name]), CHANGES[name]))
    return [(lines, conftest.changed(entry.run, pairs)) for lines, pairs in found]


def with_opacus(entry):
    """Return the changed lines, or the error of the last form."""
    for lines, program in forms(entry):
        for is_fixed, mode in itertools.product((False, True), ("hooks", "ew", "functorch")):
            private = Opacus(mode, is_fixed)
            try:
                program(private)
            except Enough:
                return str(lines + private.lines)
            except Exception as error:
                failed = error
    return f"{type(failed).__name__}: {failed}"


def main():
    """Write the table, a row for the programs of which both numbers agree."""
    from tests.user.test_programs import PROGRAMS

    warnings.simplefilter("ignore")
    rows = collections.defaultdict(list)
    for entry in PROGRAMS:
        rows[lines_here(entry), with_opacus(entry)].append(entry.run.__name__)
        print(*rows, sep="\n", flush=True)
    table = "| lines here | with Opacus | programs |\n|---|---|---|\n"
    for (here, theirs), names in sorted(rows.items()):
        table += f"| {here} | {theirs} | {', '.join(names)} |\n"
    PAGE.write_text(TABLE.sub(lambda _: table, PAGE.read_text()))


if __name__ == "__main__":
    main()
