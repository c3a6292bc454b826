# SPDX-License-Identifier: Apache-2.0
"""Programs as their authors write them, made private by the lines marked `# dp`.

A program is a function of `private`, which takes model, optimizer and loader as `make_private`
does. Its truth needs no second program: before a step the process forks once for every row of the
batch. The child takes the hooks away, goes on with its row alone, and sends its gradient where
the program steps. All of it is float64 there, and a loop of clipped gradients by definition.
"""

import contextlib
import inspect
import os
import pickle
import random
import sys
import textwrap
import types
from types import SimpleNamespace

import pytest

STEPS, LOOKED_AT = 30, (0, 13)
NUMBERS = {"max_grad_norm": 0.5, "num_steps": STEPS, "delta": 1e-5, "seed": 3}


@pytest.fixture(autouse=True)
def take_modes_away():
    """What a refused program leaves: its loader's function mode, which goes with the loader."""
    yield
    without_modes()


def without_modes():
    overrides = pytest.importorskip("torch").overrides
    for _ in overrides._get_current_function_mode_stack():
        overrides._pop_mode()


class Private:
    """`make_private` and, in `LOOKED_AT`, what each row of the batch gives alone.

    Attributes:
        compares: whether steps are compared with rows alone; else the run is as a user's.
        compared: number of steps that were.
    """

    tolerance = 1e-6  # of max_grad_norm

    def __init__(self, compares, **options):
        self.compares, self.options, self.compared = compares, options, 0
        self.engine = None
        self._sends, self._alone, self._looked_at = None, None, -1

    def __call__(self, model, optimizer, loader, **options):
        """Return the three, made private; the loader is one that another package could wrap."""
        import dualdp.torch as dpt

        engine = dpt.PrivacyEngine()
        given = {"module": model, "optimizer": optimizer, "data_loader": loader}
        made = engine.make_private(**given, **NUMBERS, **self.options, **options)
        self.engine = engine
        return self.watched(*made, loader) if self.compares else made

    def watched(self, model, optimizer, planned, source):
        """The three, of which steps and batches of `LOOKED_AT` are compared."""
        self._trained = [p for p in model.parameters() if p.requires_grad]
        optimizer.register_step_pre_hook(self._at_step)
        return model, optimizer, Watched(self, planned, source)

    def pause(self):
        """`engine.pause()`, of which a child without an engine has no need."""
        return contextlib.nullcontext() if self.is_child else self.engine.pause()

    def rows_alone(self):
        """Fork for each row of the coming batch; yields the row's number in the child only."""
        step = len(self.engine.ledger)
        if step not in LOOKED_AT or step == self._looked_at:  # another physical batch of the step
            return
        rows, self._alone, self._looked_at = self.engine.plan.batch_indices(step), [], step
        for k, row in enumerate(rows.tolist()):
            receives, sends = os.pipe()
            if os.fork() == 0:
                self._sends = sends
                self.engine.detach()
                without_modes()
                draw_as_in_the_batch(len(rows), k)
                random.seed(step)  # a fork gave it a seed of its own
                yield row
                os._exit(1)
            os.close(sends)
            with open(receives, "rb") as pipe:
                self._alone.append(pickle.load(pipe))
            os.wait()

    def send(self, found):
        """End a child with what it found."""
        with open(self._sends, "wb") as pipe:
            pickle.dump(found, pipe)
        os._exit(0)

    @property
    def is_child(self):
        return self._sends is not None

    def _at_step(self, *_):
        """Send the row's gradient, or compare the mean that the optimizer gets with all rows'."""
        import torch

        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._trained]
        found = torch.cat([grad.flatten() for grad in grads])
        if self.is_child:
            self.send(found.numpy())
        if self._alone is not None and len(self.engine.ledger) > self._looked_at:
            plan, self._alone, alone = self.engine.plan, None, self._alone
            errors = [error for error in alone if isinstance(error, str)]
            assert not errors, errors[0]
            rows = torch.stack([torch.from_numpy(g) for g in alone])
            factors = (plan.max_grad_norm / rows.norm(dim=1).clamp(min=1e-30)).clamp(max=1)
            gap = found * plan.expected_batch_size - factors @ rows
            assert gap.norm() < self.tolerance * plan.max_grad_norm, float(gap.norm())
            self.compared += 1


class Watched:
    """Loader that forks before the batches of `LOOKED_AT`."""

    def __init__(self, private, planned, source):
        self.private, self.planned, self.source = private, planned, source
        self.dataset = source.dataset

    def __len__(self):
        return len(self.planned)

    def remaining(self):
        return Watched(self.private, self.planned.remaining(), self.source)

    def __iter__(self):
        import torch

        batches = iter(self.planned)
        while True:
            step = len(self.private.engine.ledger)
            torch.manual_seed(step)
            random.seed(step)
            for row in self.private.rows_alone():
                yield self.source.collate_fn([self.dataset[row]])
            batch = next(batches, None)
            if batch is None:
                return
            yield batch


def draw_as_in_the_batch(n, k):
    """Row k of what n rows would draw, wherever one row alone draws numbers of its own."""
    import torch

    def sized(draw):
        def call(*args, **options):
            *before, size = args if isinstance(args[-1], tuple | list | torch.Size) else (args,)
            if size[0] != 1:
                return draw(*args, **options)
            return draw(*before, (n, *size[1:]), **options)[k : k + 1]

        return call

    def like(draw):
        def call(x, *args, **options):
            return draw(x.detach().repeat(n, *[1] * (x.dim() - 1)), *args, **options)[k : k + 1]

        return call

    for name in ("rand", "randn", "randint"):
        setattr(torch, name, sized(getattr(torch, name)))
    torch.randn_like = like(torch.randn_like)
    masks = like(torch.nn.functional.dropout)
    torch.nn.functional.dropout = lambda x, *options: x * masks(torch.ones_like(x), *options)


def text_of(run):
    """Return a function as it is written, without its decorators."""
    return "def " + textwrap.dedent(inspect.getsource(run)).partition("def ")[2]


def with_beside(run):
    """Return a program as it is written, and the functions and classes of its file it names."""
    beside = [run.__globals__.get(name) for name in run.__code__.co_names]
    beside = [one for one in beside if getattr(one, "__module__", None) == run.__module__]
    return "".join([text_of(run), *map(inspect.getsource, beside)])


def lines_here(run):
    """Return how many lines of a program its author did not write."""
    text = with_beside(run)
    return text.count("# dp") + text.count(".remaining()")


def changed(run, changes, text=None, **names):
    """Return a function with parts of its text replaced, each an (old, new) pair."""
    text = text or text_of(run)
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {run.__name__}"
        text = text.replace(old, new)
    module = types.ModuleType("changed")  # of classes that are pickled
    sys.modules["changed"], scope = module, module.__dict__
    scope |= {**run.__globals__, **names, "__name__": "changed"}
    exec(text, scope)
    return scope[run.__name__]


def programs():
    """Return a list and the decorator that adds a program to it.

    The decorator takes a mistake as two texts, the words of its refusal, and is_noted=True for one
    of which there is only a suspicion: Python numbers made of the batch.
    """
    found = []

    def program(old, new, words="example|row", *, is_noted=False):
        def add(run):
            found.append(
                SimpleNamespace(run=run, mistake=(old, new), words=words, is_noted=is_noted)
            )
            return run

        return add

    return found, program


def run(program, private):
    """Run a program; in a child an error is what is sent."""
    try:
        program(private)
    except BaseException as error:
        if not private.is_child:
            raise
        private.send(f"{type(error).__name__}: {error}")
    if private.is_child:
        private.send("the program took no step with its row alone")
