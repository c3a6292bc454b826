# SPDX-License-Identifier: Apache-2.0
"""Hugging Face `Trainer`: training becomes private when this callback is attached."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch.nn import functional as F
from transformers import TrainerCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import get_last_checkpoint

from dualdp_torch.integrations.host_loop import HostedLoader, HostedRun, refuse_findings
from dualdp_torch.rules.base import Tensor
from dualdp_torch.training.engine import PrivacyEngine
from dualdp_torch.training.loader import check_loader
from dualdp_torch.training.step import set_temporarily

FILE = "dualdp.json"
_IGNORED = -100  # label of a position without a loss
_DEFAULT_CLIP = 1.0  # default max_grad_norm of TrainingArguments, not the user's choice
_KINDS = ("CausalLM", "MaskedLM", "SequenceClassification", "TokenClassification")
_CROSS_ENTROPIES = [f"For{kind}" for kind in _KINDS]


class PrivacyCallback(TrainerCallback):
    """Callback that makes `Trainer.train` private: `PrivacyCallback(...).attach(trainer)`.

    Batches are drawn by the plan: `per_device_train_batch_size` times `gradient_accumulation_steps`
    times the number of processes is the expected size of a logical batch, the first of these that
    of a physical one. Steps, schedules and the progress bar count logical batches. Every log has
    `epsilon`. Each checkpoint holds the position in the run; its ledger is stored in `folder`,
    where `train(resume_from_checkpoint=...)` finds it. A private step runs eagerly, also with
    `torch_compile=True`; activations are checkpointed without reentrance.

    The loss of an example is the mean over its own labelled positions, and that of a batch the mean
    over its examples; `compute_loss_func` of the trainer may be another mean over examples.

    Args:
        folder: path of the folder for the ledger; None for `output_dir`.
        **arguments: arguments of `PrivacyEngine` and its `make_private`: max_grad_norm,
            noise_multiplier or target_epsilon with target_delta, clipping, plan, ...; also
            `recalibrate=` of `engine.resume`, for a resumed run.

    Attributes:
        engine: `PrivacyEngine`, for `engine.get_epsilon(delta)` and `engine.ledger`.

    Guarantees:
        What this can't make private is refused before the first step.
            [test_what_trainer_would_do_to_gradients_is_refused]
        A resumed run goes on where it was, as a segment of its own.  [test_trainer_resumes]
        Several processes end where one ends.  [test_processes_of_trainer_end_where_one_ends]
    """

    def __init__(self, folder: Any = None, **arguments: Any) -> None:
        self._run = HostedRun(folder=folder, **arguments)
        self._trainer: Any = None
        self._logged: set[str] = set()

    @property
    def engine(self) -> PrivacyEngine:
        """`PrivacyEngine` of the run."""
        return self._run.engine

    def attach(self, trainer: Any) -> PrivacyCallback:
        """Make every later `trainer.train()` private.

        Args:
            trainer: `Trainer`, to which this callback is added if it is not there.

        Returns:
            this callback.
        """
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        self._trainer = trainer
        trainer.train = self.train
        return self

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Run `Trainer.train` with the loader, loss and logs of this callback."""
        trainer, options = self._require_trainer(), self._require_trainer().args
        refuse(trainer)
        resume = resume_from_checkpoint
        if resume is True:
            resume = get_last_checkpoint(options.output_dir)
        self._run.saved = _read(resume) if resume else None
        self._times = options.gradient_accumulation_steps
        self._users_loss = trainer.compute_loss_func
        self._run.replace(
            trainer,
            get_train_dataloader=self._make_loader,
            training_step=self._training_step,
            log=self._log,
            compute_loss_func=self._loss,
            model_accepts_loss_kwargs=False,
        )
        # The loader of a resumed pass begins at its position, so the trainer must skip no batches.
        self._run.replace(
            options,
            gradient_accumulation_steps=1,
            max_grad_norm=0.0,
            ignore_data_skip=True,
            **_checkpointing(options),
        )
        compiler = trainer.accelerator.state.dynamo_plugin
        self._run.replace(compiler, backend=type(compiler.backend).NO)
        try:
            return type(trainer).train(trainer, resume or None, *args, **kwargs)
        finally:
            self._run.finish(self._logged)

    def _require_trainer(self) -> Any:
        """Attached trainer; a callback that was not attached is refused."""
        if self._trainer is None:
            raise RuntimeError(
                "PrivacyCallback was given to a Trainer but not attached. Call "
                "callback.attach(trainer) before trainer.train()."
            )
        return self._trainer

    def _make_loader(self) -> _Batches:
        """`get_train_dataloader` for a private run, which needs the data set's length only."""
        trainer = self._require_trainer()
        with ExitStack() as undo:  # accelerate would put a loader of its own around
            set_temporarily(undo, trainer.accelerator, prepare=lambda loader: loader)
            theirs = type(trainer).get_train_dataloader(trainer)
        check_loader(theirs)
        own, size = theirs.batch_sampler.batch_size, trainer.args.per_device_train_batch_size
        if own != size:
            raise ValueError(
                f"get_train_dataloader has batches of {own}, and the plan's would be of "
                f"per_device_train_batch_size={size}. Expected the same."
            )
        taken = self._run.take_loader(theirs, self._times, trainer.args.world_size)
        self._batches = _Batches(taken)
        return self._batches

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach the engine, now that the trainer has its optimizer and has read its checkpoint."""
        trainer = self._require_trainer()
        if self._run.loader is None:
            raise RuntimeError("trainer.train was replaced after attach(). Attach last.")
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # in accelerate's
        trained = trainer.model, optimizer
        self._run.start(trained, trainer.model_wrapped, args.output_dir, state.max_steps)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the pass, and stop the training if the budget is spent."""
        if self._run.end_pass():
            control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the state of the run to the checkpoint; one without it cannot be resumed."""
        run = json.dumps(self._run.state())  # on all processes
        if not args.should_save:
            return
        target = Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE
        temporary = target.with_suffix(".tmp")
        temporary.write_text(run, encoding="utf-8")
        os.replace(temporary, target)

    def _training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run the physical batches of a logical one; the trainer makes the last optimizer step."""
        trainer = self._require_trainer()
        step = partial(type(trainer).training_step, trainer, model)
        total, parts = step(inputs, None), 1
        while not self._batches.physical.is_last:
            trainer.optimizer.step()  # adds to the clipped sum; the parameters do not change
            total += step(next(self._batches.parts), None)
            parts += 1
        return total / parts

    def _log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log through the trainer, with epsilon."""
        trainer = self._require_trainer()
        if self._run.is_running:
            logs.pop("grad_norm", None)  # always 0: gradients exist only inside the private step
            self._logged |= logs.keys() & {"loss", "train_loss"}
            logs["epsilon"] = self._run.epsilon()
        type(trainer).log(trainer, logs, *args, **kwargs)

    def _loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        """Mean over the examples of each example's own loss."""
        if self._users_loss is not None:
            return self._users_loss(outputs, labels, num_items_in_batch=None)
        trainer = self._require_trainer()
        smoothing = trainer.args.label_smoothing_factor
        return per_example_loss(trainer.model, outputs, labels, smoothing).mean()


class _Batches:
    """Iterable over the first physical batch of each logical one, in place of the trainer's loader.

    Attributes:
        parts: iterator of the pass, of which `_training_step` takes the other physical batches.
    """

    def __init__(self, physical: HostedLoader) -> None:
        self.dataset, self.physical = physical.dataset, physical
        self.parts: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return len(self.physical.source)

    def __iter__(self) -> Iterator[Any]:
        self.parts = iter(self.physical)
        yield from self.parts


def _checkpointing(options: Any) -> dict[str, Any]:
    """Arguments for activation checkpointing without reentrance, under both of their names."""
    names = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
    return {n: {"use_reentrant": False, **(getattr(options, n, None) or {})} for n in names}


def _read(checkpoint: str) -> dict[str, Any]:
    """State of the private run in a checkpoint; one without it is refused."""
    try:
        saved: dict[str, Any] = json.loads((Path(checkpoint) / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"{checkpoint} has no {FILE}: it was saved without this callback, or not to its end. "
            "Expected another checkpoint of a private run."
        ) from error
    return saved


def per_example_loss(model: Any, outputs: Any, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return each example's loss (n,), a mean over its own labelled positions.

    Args:
        model: model whose `loss_type` and `config` select the loss.
        outputs: outputs of the model, with `logits`.
        labels: (n,), (n, t) or (n, classes); -100 does not count.
        smoothing: float, label smoothing.

    Raises:
        ValueError: the model's loss is another one.
    """
    logits: Tensor = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    kind, problem = _kind(model), getattr(getattr(model, "config", None), "problem_type", None)
    if kind == "ForSequenceClassification" and problem is None:
        integral = not labels.is_floating_point()
        problem = "single_label_classification" if integral else "multi_label_classification"
        problem = "regression" if logits.shape[1] == 1 else problem
    if problem == "regression":
        return (logits.flatten(1) - labels.view(len(labels), -1)).square().mean(1)
    if problem == "multi_label_classification":
        loss = F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none")
        return loss.flatten(1).mean(1)
    if kind not in _CROSS_ENTROPIES and problem is None:
        raise ValueError(
            f"The model's loss is {kind!r}, of which the mean over examples is unknown here. Give "
            f"the Trainer a compute_loss_func; known are {_CROSS_ENTROPIES}."
        )
    if kind == "ForCausalLM":
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(
        logits.movedim(-1, 1),
        labels,
        ignore_index=_IGNORED,
        reduction="none",
        label_smoothing=smoothing,
    )
    if losses.dim() == 1:
        return losses
    counts = (labels != _IGNORED).flatten(1).sum(1).clamp(min=1)
    return losses.flatten(1).sum(1) / counts


def _kind(model: Any) -> str | None:
    """Name of the model's loss; older language models have no `loss_type`."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return "ForCausalLM"
    return getattr(inner, "loss_type", None)


def refuse(trainer: Any) -> None:
    """Refuse options of the trainer that cannot be made private."""
    options, parallel = trainer.args, trainer.accelerator.distributed_type.value
    checkpointing = _checkpointing(options).values()
    strategy = getattr(options, "train_sampling_strategy", "random")
    findings = {
        f"max_grad_norm={options.max_grad_norm} of TrainingArguments clips whole batches. Leave it "
        "out; max_grad_norm of the callback bounds each example": (
            options.max_grad_norm not in (0, None, _DEFAULT_CLIP)
        ),
        "fp16 scales the loss, and with it the norms that are clipped. Use bf16 or neither": (
            options.fp16
        ),
        f"the trainer has {options.n_gpu} GPUs in one process, where examples can't be told apart. "
        "Start a process for each: torchrun --nproc-per-node ...": options.n_gpu > 1,
        f"the trainer works in parallel by {parallel}. Expected one process, or several of "
        "DistributedDataParallel (torchrun)": (
            not parallel.startswith(("NO", "MULTI_"))
            or getattr(options, "parallelism_config", None) is not None
        ),
        "use_reentrant=True checkpoints activations where no gradient of an example can be seen. "
        "Write activation_checkpointing_kwargs={'use_reentrant': False}": (
            any(given["use_reentrant"] for given in checkpointing)
        ),
        f"train_sampling_strategy={strategy!r} makes batches of examples that are alike, so that "
        "who is in a batch depends on the others' data, and epsilon is of batches where it does "
        "not. Leave it out": strategy not in ("random", "sequential"),
        "auto_find_batch_size changes the batch size after a failure. Give a number": (
            options.auto_find_batch_size
        ),
    }
    refuse_findings(findings)
