# SPDX-License-Identifier: Apache-2.0
"""PyTorch systems: the non-private step, dualdp's engine, and two hand-written programs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import results, systems, workloads_torch
from benchmarks.systems import Clipped, Prepared, Setting

Sums = dict[str, torch.Tensor]


def read(outcome: tuple[Sums, torch.Tensor | None]) -> Clipped:
    """Return sums and norms as NumPy arrays."""
    sums, norms = outcome
    arrays = {name: value.detach().cpu().numpy() for name, value in sums.items()}
    return Clipped(arrays, None if norms is None else norms.detach().cpu().numpy())


class Problem:
    """Model, loss, optimizer and data of one system."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.model = workloads_torch.model(setting.workload, setting.seed).to(setting.device)
        self.optimizer = torch.optim.SGD(self.trained().values(), lr=systems.LEARNING_RATE)

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def losses(self, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return one loss per example, (n,)."""
        context: Any = contextlib.nullcontext()
        if self.setting.compute == "bfloat16":
            context = torch.autocast(self.setting.device, torch.bfloat16)
        with context:
            return workloads_torch.losses(self.setting.workload, model(x), y)

    def loader(self) -> DataLoader[Any]:
        """Return the loader of a run, whose rows lie on the device."""
        data = load(self.setting, *self.setting.data())
        return DataLoader(TensorDataset(*data), batch_size=self.setting.n, shuffle=True)

    def batches(self) -> Iterator[Any]:
        """Yield batches without end."""
        loader = self.loader()
        while True:
            yield from loader

    def factors(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the clip factors, (n,)."""
        return (self.setting.max_grad_norm / norms).clamp(max=1)

    def clipped(self, grads: Sums) -> tuple[Sums, torch.Tensor]:
        """Return the clipped sum of per-sample gradients (n, *shape), and their norms (n,)."""
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()], 1).norm(dim=1)
        factors = self.factors(norms)
        return {name: torch.tensordot(factors, g, 1) for name, g in grads.items()}, norms

    def private(self, clip: Callable[[Any], tuple[Sums, torch.Tensor | None]]) -> Prepared:
        """Return a system made of batch -> clipped sum, with noise and division by hand."""
        batches, stddev = self.batches(), systems.NOISE_MULTIPLIER * self.setting.max_grad_norm

        def step() -> None:
            sums = clip(next(batches))[0]
            noisy = {k: total + torch.randn_like(total) * stddev for k, total in sums.items()}
            self.step({name: total / self.setting.n for name, total in noisy.items()})

        return self.prepared(clip, step)

    def step(self, means: Mapping[str, torch.Tensor]) -> None:
        """Take a step of the optimizer with these gradients."""
        for name, parameter in self.trained().items():
            parameter.grad = means[name]
        self.optimizer.step()

    def prepared(
        self,
        gradient: Callable[[Any], Any],
        step: Callable[[], None],
        read: Callable[[Any], Clipped] | None = read,
    ) -> Prepared:
        """Return a system."""
        memory = partial(peak_memory, gradient, self.optimizer.zero_grad, self.setting.device)
        return Prepared(gradient, read, step, memory)


def peak_memory(
    call: Callable[[Any], Any], clear: Callable[..., None], device: str, batch: Any
) -> int:
    """Return the peak bytes that a call allocates, with old gradients cleared before."""
    clear(set_to_none=True)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(batch)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call(batch)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    alive = np.cumsum([event.nbytes() for event in events])
    return int(max(alive.max(initial=0), 0))


def non_private(setting: Setting) -> Prepared:
    """Return the step without clipping and noise: zero_grad, loss, backward."""
    problem = Problem(setting)
    batches = problem.batches()

    def gradient(batch: Any) -> None:
        problem.optimizer.zero_grad(set_to_none=True)
        problem.losses(problem.model, *batch).mean().backward()

    def step() -> None:
        gradient(next(batches))
        problem.optimizer.step()

    return problem.prepared(gradient, step, read=None)


def loop(setting: Setting) -> Prepared:
    """Return the loop over single examples, the reference of all other systems."""
    problem = Problem(setting)
    trained = problem.trained()

    def clip(batch: Any) -> tuple[Sums, torch.Tensor]:
        sums = {name: torch.zeros_like(p) for name, p in trained.items()}
        norms = []
        for example in zip(*(part.split(1) for part in batch), strict=True):
            loss = problem.losses(problem.model, *example).mean()
            grads = torch.autograd.grad(loss, list(trained.values()))
            norm = torch.stack([g.norm() for g in grads]).norm()
            for total, g in zip(sums.values(), grads, strict=True):
                total += problem.factors(norm) * g
            norms.append(norm)
        return sums, torch.stack(norms)

    return problem.private(clip)


def vmap_grad(setting: Setting) -> Prepared:
    """Return `torch.func.vmap(grad)`, the program of the PyTorch tutorial."""
    problem = Problem(setting)
    frozen = {k: p.detach() for k, p in problem.model.named_parameters() if not p.requires_grad}

    def loss(parameters: Sums, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def model(x: torch.Tensor) -> torch.Tensor:
            return functional_call(problem.model, (parameters, frozen), (x,))

        return problem.losses(model, x[None], y[None]).mean()

    per_example = vmap(grad(loss), in_dims=(None, 0, 0))

    def clip(batch: Any) -> tuple[Sums, torch.Tensor]:
        parameters = {name: p.detach() for name, p in problem.trained().items()}
        return problem.clipped(per_example(parameters, *batch))

    return problem.private(clip)


def dualdp(setting: Setting) -> Prepared:
    """Return `clipped_grad_sum`, and a step of `PrivacyEngine` with its checks as by default."""
    import dualdp.torch as dpt

    problem = Problem(setting)

    def clip(batch: Any) -> tuple[Sums, torch.Tensor]:
        result = dpt.clipped_grad_sum(
            problem.losses, problem.model, *batch, max_grad_norm=setting.max_grad_norm
        )
        return result.grads, result.norms

    def steps() -> Iterator[None]:
        trained = Problem(setting)
        model, optimizer, loader = dpt.PrivacyEngine().make_private(
            module=trained.model,
            optimizer=trained.optimizer,
            data_loader=trained.loader(),
            plan=setting.plan(),
        )
        while True:
            for batch in loader:
                optimizer.zero_grad(set_to_none=True)
                trained.losses(model, *batch).mean().backward()
                optimizer.step()
                yield

    return problem.prepared(clip, partial(next, steps()))


def use_device(device: str) -> str:
    """Compute float32 products in float32, on a GPU too; return the name of the device."""
    if device == "cpu":
        return results.processor()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    return torch.cuda.get_device_name()


def wait(outcome: Any) -> Any:
    """Return the outcome after the device has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return outcome


def load(setting: Setting, x: np.ndarray, y: np.ndarray) -> Any:
    """Return a NumPy batch on the device."""
    return torch.from_numpy(x).to(setting.device), torch.from_numpy(y).to(setting.device)


SYSTEMS: dict[str, systems.System] = {
    systems.NON_PRIVATE: non_private,
    systems.OURS: dualdp,
    systems.MULTI: vmap_grad,
    systems.LOOP: loop,
}
