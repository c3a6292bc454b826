# SPDX-License-Identifier: Apache-2.0
"""Lightning: a `LightningModule` trains privately when this callback is added to its `Trainer`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from dualdp._validate import UnsupportedLayerError

try:
    from lightning.pytorch import Callback, LightningModule
except ModuleNotFoundError:  # older name of the package
    from pytorch_lightning import Callback, LightningModule  # type: ignore[assignment]

from dualdp_torch.integrations.host_loop import (
    HostedLoader,
    HostedRun,
    refuse_findings,
    with_larger_batches,
)
from dualdp_torch.per_sample.outputs import WholeStep, float_leaves
from dualdp_torch.rules.base import Tensor
from dualdp_torch.training.arguments import GRAD_SAMPLE_MODES
from dualdp_torch.training.engine import PrivacyEngine
from dualdp_torch.training.temporary_attributes import set_temporarily


class PrivacyCallback(Callback):
    """Callback that makes `Trainer.fit` private: `Trainer(callbacks=[PrivacyCallback(...)])`.

    The module keeps its `training_step`, the trainer its loop, logs and checkpoints. Batches are
    drawn by the plan; with `accumulate_grad_batches=k` a logical batch has k times the loader's
    batch size and is processed in physical batches of that size. `epsilon` is logged beside the
    module's values. A checkpoint of Lightning's holds the ledger so far; key and live ledger are
    stored in `folder`, where `fit(ckpt_path=...)` finds them.

    The loss is a mean over the batch unless `loss_reduction` says otherwise. The model is first
    examined on a few examples, so side effects of `training_step` other than logging happen a few
    times more than usual.

    Args:
        folder: path of the folder for key and ledger; None for the trainer's `default_root_dir`.
        **arguments: arguments of `PrivacyEngine` and its `make_private`: max_grad_norm,
            noise_multiplier or target_epsilon with target_delta, clipping, plan, ...; also `key=`,
            the key file of a resumed run.

    Attributes:
        engine: `PrivacyEngine`, for `engine.get_epsilon(delta)` and `engine.ledger`.

    Guarantees:
        What this can't make private is refused before the first step.
            [test_what_lightning_would_do_to_gradients_is_refused]
        A resumed run is bitwise the one that was not interrupted.  [test_lightning_resumes]
    """

    def __init__(self, folder: Any = None, **arguments: Any) -> None:
        self._run = HostedRun(folder=folder, **arguments)
        self._saved: dict[str, Any] | None = None
        self._final: dict[str, Any] = {}
        self._loader: HostedLoader | None = None
        self._undo = ExitStack()

    @property
    def engine(self) -> PrivacyEngine:
        """`PrivacyEngine` of the run."""
        return self._run.engine

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Attach the engine, when the optimizer exists and the data is not loaded yet."""
        refuse(trainer, pl_module)
        source, times = trainer.fit_loop._data_source, trainer.accumulate_grad_batches
        loader = with_larger_batches(source.dataloader(), times)
        module, step = self._recorded(pl_module)
        epochs = trainer.max_epochs if trainer.max_epochs not in (None, -1) else None
        steps = [] if epochs is None else [epochs * len(loader)]
        self._loader = self._run.start(
            module,
            trainer.optimizers[0],
            loader,
            folder=trainer.default_root_dir,
            num_steps=min(steps + [trainer.max_steps] * (trainer.max_steps != -1), default=None),
            physical=loader.batch_sampler.batch_size // times if times > 1 else None,  # type: ignore[union-attr]
            saved=None if self._saved is None else self._saved["run"],
        )
        physical = self.engine.plan.physical_batch_size
        if physical is not None and trainer.limit_train_batches != 1.0:
            raise ValueError(
                f"limit_train_batches={trainer.limit_train_batches} would cut a logical batch in "
                f"physical ones of {physical}. Leave it out, or train without physical batches."
            )
        replace = partial(set_temporarily, self._undo)
        replace(trainer.fit_loop._data_source, instance=self._loader)
        # Lightning steps after the last physical batch of a logical one only, and divides losses
        # by accumulate_grad_batches, which therefore must be 1.
        replace(trainer, accumulate_grad_batches=1)
        steps_now = partial(getattr, self._loader, "is_last")
        replace(trainer.fit_loop.epoch_loop, _accumulated_batches_reached=steps_now)
        if physical is not None:  # each pass has its own length
            replace(trainer, reload_dataloaders_every_n_epochs=1)
        if step is not None:
            replace(pl_module, training_step=step)

    def _recorded(self, pl_module: LightningModule) -> tuple[nn.Module, Any]:
        """Module that the engine records, and a replacement for `training_step` or None."""
        trained = [m for m in pl_module.children() if _is_trained(m)]
        inside = {id(p) for m in trained[:1] for p in m.parameters()}
        if all(id(p) in inside for p in pl_module.parameters() if p.requires_grad):
            return trained[0], None
        mode = str(self._run.arguments.get("grad_sample_mode", "auto"))
        if GRAD_SAMPLE_MODES.get(mode) in ("vmap", "two_pass"):
            raise ValueError(
                f"grad_sample_mode={mode!r} with a training_step that calls several modules. "
                "Expected 'auto', or one module that it calls once."
            )
        whole = _WholeStep(pl_module)
        # Not the bound method: a copy of pl_module would copy `whole` with it.
        return whole, lambda *args, **kwargs: whole.run(*args, **kwargs)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Restore the state of torch's generator, after everything else is loaded."""
        if self._saved is not None:
            torch.set_rng_state(self._saved["generator"])
            self._saved = None

    def on_after_backward(self, trainer: Any, pl_module: LightningModule) -> None:
        """Step on a physical batch within a logical batch, which adds it to the clipped sum."""
        if not self._require_loader().is_last:
            trainer.optimizers[0].step()

    def on_train_batch_end(
        self,
        trainer: Any,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log epsilon, as often as Lightning writes logs."""
        position = self.engine.ledger.position
        if self._require_loader().is_last and (
            position % trainer.log_every_n_steps == 0 or position == self.engine.pass_end
        ):
            delta = self.engine.plan.delta
            pl_module.log("epsilon", self.engine.get_epsilon(delta), prog_bar=True, batch_size=1)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """End the pass, and stop the training if the budget is spent."""
        if self._run.end_pass(self._require_loader()):
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Note in the ledger which other values were logged, without protection."""
        names = sorted(set(trainer.logged_metrics) - {"epsilon"})
        if names:
            self.engine.ledger.note(unprotected=names)
        self._final = self.state_dict()

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Restore module, optimizer and trainer."""
        self._finish()

    def on_exception(
        self, trainer: Any, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Restore module, optimizer and trainer."""
        self._finish()

    def _finish(self) -> None:
        self._undo.close()
        self._run.finish()
        self._loader = self._saved = None

    def _require_loader(self) -> HostedLoader:
        """Loader of this `fit`; a callback that was added too late is refused."""
        if self._loader is None:
            raise RuntimeError("PrivacyCallback was added during training. Expected it before fit.")
        return self._loader

    def state_dict(self) -> dict[str, Any]:
        """Return the run's part of Lightning's checkpoint."""
        if not self._run.is_running:  # trainer.save_checkpoint after fit
            return self._final
        return {"run": self._run.state(), "generator": torch.get_rng_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the saved state until the optimizer exists."""
        self._saved = state_dict

    def on_load_checkpoint(
        self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse to resume a run that was not private."""
        fits = trainer.state.fn == "fit"
        if fits and self.state_key not in checkpoint.get("callbacks", {}):
            raise ValueError(
                "The checkpoint was saved without a PrivacyCallback, so what it spent is unknown. "
                "Expected one of a private run; load weights alone with load_state_dict."
            )


def _is_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def refuse(trainer: Any, pl_module: LightningModule) -> None:
    """Refuse options of trainer and module that cannot be made private."""
    optimizers, precision = trainer.optimizers, str(trainer.precision)
    findings = {
        f"gradient_clip_val={trainer.gradient_clip_val} clips whole batches. Leave it out; "
        "max_grad_norm of the callback bounds each example": trainer.gradient_clip_val,
        f"precision={precision!r} scales the loss, and with it the norms that are clipped. Use "
        "'32-true' or 'bf16-mixed'": precision.startswith("16"),
        f"configure_optimizers returned {len(optimizers)} optimizers. Expected one; one release "
        "gives one gradient": len(optimizers) != 1,
        "automatic_optimization is False. Expected True, or dualdp.torch.PrivacyEngine in a loop "
        "of your own": not pl_module.automatic_optimization,
        f"the trainer has {trainer.world_size} processes. Expected one": trainer.world_size > 1,
        f"overfit_batches={trainer.overfit_batches} trains on a few batches again and again. Leave "
        "it out": trainer.overfit_batches,
    }
    refuse_findings(findings)


class _WholeStep(WholeStep):
    """`training_step` that calls several modules, as one module that returns their outputs."""

    def __init__(self, pl_module: LightningModule) -> None:
        super().__init__()
        self.inner, self._step = pl_module, pl_module.training_step
        self._depth, self._is_live, self._is_heard = 0, False, True
        self.result: Any = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the recorded `training_step` in place of the module's own."""
        self._is_live = True
        try:
            self(*args, **kwargs)
            return self.result
        finally:
            self._is_live, self.result = False, None

    def loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a `training_step` whose logging is silenced."""
        self._is_heard = False
        try:
            result = self.run(*args, **kwargs)
        finally:
            self._is_heard = True
        loss: Tensor = result["loss"] if isinstance(result, Mapping) else result
        return loss

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._depth += 1
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self._depth -= 1

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Return the outputs of the modules that `training_step` calls, examples on axis 0."""
        is_real = self._is_live and self._depth == 1
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

        trained = [m for m in self.inner.modules() if _is_trained(m)]
        handles = [m.register_forward_pre_hook(enter) for m in trained]
        handles += [m.register_forward_hook(leave) for m in trained]
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Log nothing, while the model is only examined."""
