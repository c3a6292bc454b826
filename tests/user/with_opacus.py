# SPDX-License-Identifier: Apache-2.0
"""Run every program with Opacus; write the table of docs/from_opacus.md.

    PYTHONPATH=. OMP_NUM_THREADS=1 .venv-bench/bin/python -m tests.user.with_opacus

A program is as its author wrote it but for the lines marked `# dp`. Opacus gets the form of fewest
such lines that takes five steps and whose first sum is that of its rows alone.
"""

import collections
import contextlib
import itertools
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import opacus.layers.dp_rnn
import torch
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator

from tests.user import conftest

PAGE = Path(__file__).parents[2] / "docs" / "from_opacus.md"
TABLE = re.compile(r"(?<=<!-- programs -->\n).*(?=<!-- /programs -->)", re.DOTALL)
STEPS = 5
#: What Opacus needs besides, by program: (text, text with Opacus and a mark for each line).
PLACES = "position_ids=torch.arange(LENGTH).expand(len({}), -1)"
OF_A_DICT = [("model(**batch)", f"model(**batch, {PLACES.format('[*batch.values()][0]')})  # dp")]
CHANGES = {
    "dcgan": [
        ("net_d.zero_grad()", "optimizer_d.zero_grad()  # dp"),
        ("err_real.backward()", "pass  # dp"),
        ("label.fill_(0.0)", "label = torch.zeros_like(label)  # dp"),
        ("err_fake.backward()", "(err_real + err_fake).backward()  # dp"),
        ("net_g.zero_grad()", "net_g.zero_grad()\n            optimizer_d.zero_grad()  # dp"),
    ],
    "wgan_with_clipped_weights": [
        ("optimizer_g.zero_grad()", "optimizer_g.zero_grad(); optimizer_c.zero_grad()  # dp"),
    ],
    "char_rnn": [("model.zero_grad()", "optimizer.zero_grad()  # dp")],
    "seq2seq_with_teacher_forcing": [
        (
            "self.out = nn.GRUCell(8, 8), nn.Linear(8, VOCABULARY)",
            "self.out = opacus.layers.dp_rnn.DPGRUCell(8, 8, True), nn.Linear(8, VOCABULARY)  # dp",
        ),
    ],
    "nano_gpt_loop": [
        ("(torch.arange(idx.size(1)))", "(torch.arange(idx.size(1)).expand_as(idx))  # dp")
    ],
    "glue": OF_A_DICT,
    "token_classification": OF_A_DICT,
    "question_answering": [
        ("end_positions=end).loss", f"end_positions=end, {PLACES.format('x')}).loss  # dp")
    ],
    "a_constraint_is_kept_after_the_step": [("model[2].weight", "model._module[2].weight")],
}


class Enough(Exception):
    """Five steps were taken."""


class Opacus(conftest.Private):
    """`private` of a program: Opacus' engine, set up as its documentation asks.

    Its batches are those of `Watched`, without noise, so that the sum of the first is compared
    with its rows alone.
    """

    bound, tolerance = 1e3, 1e-9  # nothing is clipped: the gradients themselves are compared

    def __init__(self, mode):
        super().__init__(True)
        self.mode, self.lines = mode, 0

    def __call__(self, model, optimizer, loader, max_physical_batch_size=None, **options):
        self.lines += max_physical_batch_size is not None  # BatchMemoryManager
        if ModuleValidator.validate(model, strict=False):
            self.lines += 1  # before the optimizer is made
            model = ModuleValidator.fix(model)
            optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p.requires_grad]
            del optimizer.param_groups[1:]
        given = {"module": model, "optimizer": optimizer, "data_loader": loader}
        given |= {"noise_multiplier": 0.0, "max_grad_norm": self.bound, "poisson_sampling": False}
        made = PrivacyEngine().make_private(**given, grad_sample_mode=self.mode, **options)
        self.model, self.optimizer, _ = made
        if self.mode != "ew":
            self.model.forbid_grad_accumulation()  # as with Poisson sampling
        rows, size = len(loader.dataset), loader.batch_size
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).view(-1, size)
        self.engine = SimpleNamespace(ledger=[], detach=self._detach)
        self.engine.plan = SimpleNamespace(
            batch_indices=lambda step: order[step % len(order)],
            max_grad_norm=self.bound,
            expected_batch_size=1 if "loss_reduction" in options else size,
        )
        batches = [loader.collate_fn([loader.dataset[i] for i in draw]) for draw in order.tolist()]
        _, _, watched = self.watched(model, optimizer, Batches(batches), loader)
        return self.model, self.optimizer, watched

    pause = contextlib.nullcontext

    def _detach(self):
        """In a process of one row gradients are plain ones."""
        if self.mode == "ew":
            self.model.forward = self.model._module.forward
        else:
            self.model.disable_hooks()
        self.optimizer.step = self._at_step

    def _at_step(self, *given):
        self.engine.ledger.append(given)
        super()._at_step(*given)
        if len(self.engine.ledger) == STEPS:
            raise Enough


class Batches(list):
    """As a loader of ours has it."""

    def remaining(self):
        return itertools.cycle(self)


def forms(entry):
    """Return (changed lines, program) of what is tried with Opacus."""
    text, changes = conftest.with_beside(entry.run), CHANGES.get(entry.run.__name__, [])
    bases = [(text.count("# dp") - text.count("private.pause"), [])]
    if entry.run.__module__.endswith("ways_out") or "# dp" in entry.mistake[0]:  # as it was written
        bases.insert(0, (1, [entry.mistake]))
    for lines, base in bases:
        yield lines, conftest.changed(entry.run, base, text)
        if changes:
            more = sum(new.count("# dp") for _, new in changes)
            yield lines + more, conftest.changed(entry.run, base + changes, text, opacus=opacus)


def with_opacus(entry):
    """Return the fewest changed lines, starred where no sum is that of the rows, or an error."""
    starred = failed = None
    for (lines, program), mode in itertools.product(forms(entry), ("hooks", "ew", "functorch")):
        private = Opacus(mode)
        try:
            conftest.run(program, private)
        except Enough:
            return str(lines + private.lines)
        except Exception as error:
            if isinstance(error, AssertionError) and ":" not in str(error):  # the gap of the sums
                starred = starred or f"{lines + private.lines}*"
            failed = error if mode == "hooks" else failed
    return starred or f"{type(failed).__name__}: {failed}".partition(",")[0]


def main():
    """Write the table, a row for the programs of which both numbers agree."""
    from tests.user.test_programs import PROGRAMS

    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    rows = collections.defaultdict(list)
    for entry in PROGRAMS:
        here = conftest.lines_here(entry.run)
        with contextlib.redirect_stdout(None):
            rows[here, with_opacus(entry)].append(entry.run.__name__)
        print(entry.run.__name__, here, flush=True)
    table = "| here | Opacus | programs |\n|---|---|---|\n"
    for (here, theirs), names in sorted(rows.items()):
        table += f"| {here} | {theirs} | {', '.join(names)} |\n"
    PAGE.write_text(TABLE.sub(lambda _: table, PAGE.read_text()))


if __name__ == "__main__":
    main()
