# SPDX-License-Identifier: Apache-2.0
"""Lightning: a `LightningModule` trains privately when this callback is added to its `Trainer`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from dualdp._validate import UnsupportedLayerError
from dualdp.exactness import ExactnessError

try:
    from lightning.pytorch import Callback, LightningModule
except ModuleNotFoundError:  # older name of the package
    from pytorch_lightning import Callback, LightningModule  # type: ignore[assignment]

from dualdp_torch.checkpoint.single_file import all_generators, set_generators
from dualdp_torch.integrations.host_loop import HostedLoader, HostedRun, refuse_findings
from dualdp_torch.per_sample.outputs import WholeStep, float_leaves
from dualdp_torch.rules.base import Tensor
from dualdp_torch.training.arguments import GRAD_SAMPLE_MODES
from dualdp_torch.training.engine import PrivacyEngine
from dualdp_torch.training.loader import check_loader
from dualdp_torch.training.step import set_temporarily

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
#: Lightning's callbacks that change the steps or the batches of a run.
_CALLBACKS = {
    "GradientAccumulationScheduler": "changes the size of batches by epoch. Give the plan a "
    "schedule of expected_batch_size",
    "BatchSizeFinder": "trains on batches that are in no account. Give the loader a batch size",
    "LearningRateFinder": "trains on batches that are in no account. Give a learning rate",
}


class PrivacyCallback(Callback):
    """Callback that makes `Trainer.fit` private: `Trainer(callbacks=[PrivacyCallback(...)])`.

    The module keeps its `training_step`, the trainer its loop, logs and checkpoints. Batches are
    drawn by the plan. As in Lightning, a batch of the loader is that of one process: with
    `accumulate_grad_batches=k` and p processes a logical batch is k p times as large, and each
    process works on physical batches of the loader's size. `epsilon` is logged beside the
    module's values. A checkpoint of Lightning's holds the position in the run; its ledger is stored
    in `folder`, where `fit(ckpt_path=...)` finds it.

    The loss is a mean over the batch unless `loss_reduction` says otherwise. The model is first
    examined on a few examples, so side effects of `training_step` other than logging happen a few
    times more than usual.

    Args:
        folder: path of the folder for the ledger; None for the trainer's `default_root_dir`.
        module: name of the submodule that is trained privately, such as "discriminator", where a
            module with several optimizers trains others on what is public; None for all.
        **arguments: arguments of `PrivacyEngine` and its `make_private`: max_grad_norm,
            noise_multiplier or target_epsilon with target_delta, clipping, plan, ...; also
            `recalibrate=` of `engine.resume`, for a resumed run.

    Attributes:
        engine: `PrivacyEngine`, for `engine.get_epsilon(delta)` and `engine.ledger`.

    Guarantees:
        What this can't make private is refused before the first step.
            [test_what_lightning_would_do_to_gradients_is_refused]
        A resumed run goes on where it was, as a segment of its own.  [test_lightning_resumes]
        Several processes end where one ends.  [test_processes_of_lightning_end_where_one_ends]
        What `module` leaves out gets no gradient of an example.
            [test_other_modules_get_no_gradient_of_an_example]
    """

    def __init__(self, folder: Any = None, module: str | None = None, **arguments: Any) -> None:
        self._run, self._module = HostedRun(folder=folder, **arguments), module
        self._final: dict[str, Any] = {}
        self._optimizer: Any = None
        self._is_public = False  # between toggle_optimizer and untoggle_optimizer of another one
        self._pause = ExitStack()

    @property
    def engine(self) -> PrivacyEngine:
        """`PrivacyEngine` of the run."""
        return self._run.engine

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Put our loader in the place of the module's, whose length it has until the run begins."""
        if stage != "fit":
            return
        refuse(trainer, pl_module)
        source = trainer.fit_loop._data_source
        times, processes = trainer.accumulate_grad_batches, trainer.world_size

        def dataloader() -> HostedLoader:
            if self._run.loader is not None:
                return self._run.loader
            theirs = type(source).dataloader(source)
            check_loader(theirs)
            return self._run.take_loader(theirs, times, processes)

        self._run.replace(source, dataloader=dataloader)

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Attach the engine, when the optimizer exists and no batch was drawn yet."""
        module, self._optimizer, step = self._recorded(trainer.optimizers, pl_module)
        trainer.fit_loop._data_source.dataloader()  # if nobody has asked for it so far
        num_steps = trainer.estimated_stepping_batches
        steps = int(num_steps) if 0 < num_steps < math.inf else None
        trained = module, self._optimizer
        self._run.start(trained, trainer.model, trainer.default_root_dir, steps)
        physical, replace = self.engine.plan.physical_batch_size, self._run.replace
        if physical is not None and trainer.limit_train_batches != 1.0:
            raise ValueError(
                f"limit_train_batches={trainer.limit_train_batches} would cut a logical batch in "
                f"physical ones of {physical}. Leave it out, or train without physical batches."
            )
        trainer.fit_loop._combined_loader = None  # its length was the host's
        # Lightning steps after the last physical batch of a logical one only, and divides losses
        # by accumulate_grad_batches, which therefore must be 1.
        replace(trainer, accumulate_grad_batches=1)
        steps_now = partial(getattr, self._require_loader(), "is_last")
        replace(trainer.fit_loop.epoch_loop, _accumulated_batches_reached=steps_now)
        if physical is not None:  # each pass has its own length
            replace(trainer, reload_dataloaders_every_n_epochs=1)
        if step is not None:
            replace(pl_module, training_step=step)
        self._guard_others(trainer.optimizers, pl_module)

    def _recorded(
        self, optimizers: list[Any], pl_module: LightningModule
    ) -> tuple[nn.Module, Any, Any]:
        """Module that the engine records, its optimizer, and a `training_step` or None."""
        if self._module is not None:
            return *_named(pl_module, self._module, optimizers), None
        if len(optimizers) != 1:
            raise ValueError(
                f"configure_optimizers returned {len(optimizers)} optimizers. Expected one, with "
                "several parameter groups if need be, since one release gives one gradient; or "
                "PrivacyCallback(module=...), the name of the module that sees the examples."
            )
        trained = _trained(pl_module.children())
        inside = {id(p) for m in trained[:1] for p in m.parameters()}
        if all(id(p) in inside for p in pl_module.parameters() if p.requires_grad):
            return trained[0], optimizers[0], None
        if not pl_module.automatic_optimization:
            raise ValueError(
                "training_step optimizes manually and calls several modules. Expected one module "
                "(self.model) that it calls once, or PrivacyCallback(module=...), the name of the "
                "private one."
            )
        mode = str(self._run.arguments.get("grad_sample_mode", "auto"))
        if GRAD_SAMPLE_MODES.get(mode) in ("vmap", "two_pass", "loop"):
            raise ValueError(
                f"grad_sample_mode={mode!r} with a training_step that calls several modules. "
                "Expected 'auto', or one module that it calls once."
            )
        whole = _WholeStep(pl_module)
        # Not the bound method: a copy of pl_module would copy `whole` with it.
        return whole, optimizers[0], lambda *args, **kwargs: whole.run(*args, **kwargs)

    def _guard_others(self, optimizers: list[Any], pl_module: LightningModule) -> None:
        """Refuse gradients of other optimizers' parameters, unless their optimizer is toggled."""
        others = [o for o in optimizers if o is not self._optimizer]
        if not others:
            return

        def arrived(p: Tensor) -> None:
            if self._is_public:
                return
            p.grad = None
            raise UnsupportedLayerError(
                "A module of another optimizer got a gradient in the backward of the private one, "
                "where it would be trained on examples without clipping and noise. Expected its "
                "own backward between self.toggle_optimizer(its optimizer) and "
                "self.untoggle_optimizer(its optimizer), on what is public."
            )

        def toggle(optimizer: Any) -> None:
            end()
            type(pl_module).toggle_optimizer(pl_module, optimizer)
            self._is_public = getattr(optimizer, "optimizer", optimizer) is not self._optimizer
            if self._is_public:
                self._pause.enter_context(self.engine.pause())

        def untoggle(optimizer: Any) -> None:
            end()
            type(pl_module).untoggle_optimizer(pl_module, optimizer)

        def end() -> None:
            self._is_public = False
            self._pause.close()

        for p in {p for o in others for group in o.param_groups for p in group["params"]}:
            self._run.undo.callback(p.register_post_accumulate_grad_hook(arrived).remove)
        self._run.undo.callback(end)
        self._run.replace(pl_module, toggle_optimizer=toggle, untoggle_optimizer=untoggle)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Restore the states of torch's generators, after everything else is loaded."""
        if self._run.saved is not None:
            set_generators(self._run.saved["generator"], trainer.global_rank)

    def on_after_backward(self, trainer: Any, pl_module: LightningModule) -> None:
        """Step on a physical batch within a logical batch, which adds it to the clipped sum."""
        if not self._require_loader().is_last and pl_module.automatic_optimization:
            self._optimizer.step()

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Log epsilon, as often as Lightning writes logs."""
        position = self.engine.ledger.position
        if self._require_loader().is_last and (
            position % trainer.log_every_n_steps == 0 or position == self.engine.pass_end
        ):
            pl_module.log("epsilon", self._run.epsilon(), prog_bar=True, batch_size=1)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """End the pass, and stop the training if the budget is spent."""
        if self._run.end_pass():
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Keep the state for checkpoints that are saved after training, at the end of a step."""
        self._final = self.state_dict() if self.engine.is_between_steps else {}

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Restore module, optimizer and trainer; note in the ledger what else was logged."""
        self._run.finish(trainer.logged_metrics)

    def on_exception(
        self, trainer: Any, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Restore module, optimizer and trainer; say which loss the module was declared to have."""
        if isinstance(exception, ExactnessError):
            declared = self._run.arguments.get("loss_reduction", "mean")
            exception.add_note(
                f"The loss of training_step was taken for a {declared} over the batch. If it is "
                "not, declare it: PrivacyCallback(loss_reduction=...)."
            )
        self._run.finish(trainer.logged_metrics)

    def _require_loader(self) -> HostedLoader:
        """Loader of this `fit`; a callback that was added too late is refused."""
        if self._run.loader is None:
            raise RuntimeError("PrivacyCallback was added during training. Expected it before fit.")
        return self._run.loader

    def state_dict(self) -> dict[str, Any]:
        """Return the run's part of Lightning's checkpoint, on all processes."""
        if not self._run.is_running:  # trainer.save_checkpoint after fit
            return self._final
        return {"run": self._run.state(), "generator": all_generators(self.engine)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the saved state until the optimizer exists."""
        generator = state_dict.get("generator", {})
        self._run.saved = {**state_dict.get("run", {}), "generator": generator}

    def on_load_checkpoint(
        self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse to resume a run that was not private."""
        fits = trainer.state.fn == "fit"
        if fits and self.state_key not in checkpoint.get("callbacks", {}):
            raise ValueError(
                "The checkpoint was saved without a PrivacyCallback, or within a logical batch, so "
                "what it spent is unknown. Expected one of a private run; load weights alone with "
                "load_state_dict."
            )


def _trained(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that hold a trained parameter."""
    return [m for m in modules if any(p.requires_grad for p in m.parameters())]


def _named(pl_module: nn.Module, name: str, optimizers: list[Any]) -> tuple[nn.Module, Any]:
    """Return the submodule of this name and the optimizer that holds its parameters."""
    module = dict(pl_module.named_modules()).get(name)
    if module is None:
        raise ValueError(
            f"module={name!r} is no submodule of {type(pl_module).__name__}. Expected one of "
            f"{[name for name, _ in pl_module.named_children()]}, or of their submodules."
        )
    ours = {id(p) for p in module.parameters()}
    found = [o for o in optimizers if ours & {id(p) for g in o.param_groups for p in g["params"]}]
    if len(found) != 1:
        raise ValueError(
            f"{len(found)} optimizers hold parameters of module={name!r}. Expected one, which may "
            "have several parameter groups: one release gives one gradient."
        )
    return module, found[0]


def refuse(trainer: Any, pl_module: LightningModule) -> None:
    """Refuse options of trainer and module that cannot be made private."""
    precision, strategy = str(trainer.precision), trainer.strategy
    is_manual = not pl_module.automatic_optimization
    findings = {
        f"gradient_clip_val={trainer.gradient_clip_val} clips whole batches. Leave it out; "
        "max_grad_norm of the callback bounds each example": trainer.gradient_clip_val,
        f"precision={precision!r} scales the loss, and with it the norms that are clipped. Use "
        "'32-true' or 'bf16-mixed'": precision.startswith("16"),
        f"strategy {type(strategy).__name__} is not known here. Expected 'auto' or 'ddp'": (
            type(strategy).__name__ not in _STRATEGIES
        ),
        "the strategy starts processes that end with fit(), and what they spent is not known here "
        "afterwards. Expected strategy='ddp', in a script": (
            getattr(strategy, "_start_method", "popen") != "popen"
        ),
        "model_averaging_period lets each process train by itself in between. Leave it out": (
            getattr(strategy, "_model_averaging_period", None)
        ),
        "training_step optimizes manually in several processes, and gradients of other modules "
        "would not be averaged. Expected one process": is_manual and trainer.world_size > 1,
        f"overfit_batches={trainer.overfit_batches} trains on a few batches again and again. Leave "
        "it out": trainer.overfit_batches,
    }
    names = {type(callback).__name__ for callback in trainer.callbacks}
    findings |= {f"{name} {why}": name in names for name, why in _CALLBACKS.items()}
    refuse_findings(findings)


class _WholeStep(WholeStep):
    """`training_step` that calls several modules, as one module that returns their outputs."""

    def __init__(self, pl_module: LightningModule) -> None:
        super().__init__()
        self.inner, self._step = pl_module, pl_module.training_step
        self._calls, self._is_live, self._is_heard = list[None](), False, True
        self.result: Any = None

    def run(self, *args: Any, is_heard: bool = True, **kwargs: Any) -> Any:
        """Run the recorded `training_step` in place of the module's own, or silence its logging."""
        self._is_live, self._is_heard = True, is_heard
        try:
            self(*args, **kwargs)
            return self.result
        finally:
            self._is_live, self.result = False, None

    def loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a `training_step` whose logging is silenced."""
        result = self.run(*args, is_heard=False, **kwargs)
        loss: Tensor = result["loss"] if isinstance(result, Mapping) else result
        return loss

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls.append(None)  # a check calls the model again inside a call
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self._calls.pop()

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Return the outputs of the modules that `training_step` calls, examples on axis 0."""
        is_real = self._is_live and len(self._calls) == 1
        if is_real and not torch.is_grad_enabled():
            raise UnsupportedLayerError(
                "The modules that training_step calls have no rules for some of their parameters. "
                "Put them into one module (self.model) that training_step calls once."
            )
        with self._listening() as outputs, ExitStack() as undo:
            if not (is_real and self._is_heard):
                set_temporarily(undo, self.inner, log=_nothing, log_dict=_nothing)
            result = self._step(*args, **kwargs)
        if is_real:
            self.result = result
        return tuple(outputs)

    @contextmanager
    def _listening(self) -> Iterator[list[Tensor]]:
        """Collect the floating-point outputs of the outermost calls of trained modules."""
        outputs: list[Tensor] = []
        inside = []

        def enter(module: nn.Module, args: Any) -> None:
            inside.append(module)

        def leave(module: nn.Module, args: Any, out: Any) -> None:
            inside.pop()
            if not inside:
                outputs.extend(float_leaves(out))

        trained = _trained(self.inner.modules())
        handles = [m.register_forward_pre_hook(enter) for m in trained]
        handles += [m.register_forward_hook(leave) for m in trained]
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Log nothing, while the model is only examined."""
