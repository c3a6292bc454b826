# SPDX-License-Identifier: Apache-2.0
"""PyTorch systems: the non-private step, dualdp's methods, and two hand-written programs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

from dualdp_tools.bench import results, systems, workloads_torch
from dualdp_tools.bench.systems import Clipped, NothingToForce, Prepared, Setting
from dualdp_torch.rules import choices

Sums = dict[str, torch.Tensor]
#: What is done to a model before it is trained, such as `workloads_torch.checkpoint_blocks`.
Change = Callable[[nn.Module], None]
Optimizer = Callable[[Iterable[nn.Parameter]], Any]
SGD: Optimizer = partial(torch.optim.SGD, lr=systems.LEARNING_RATE)


def read(outcome: tuple[Sums, torch.Tensor | None]) -> Clipped:
    """Return sums and norms as NumPy arrays."""
    sums, norms = outcome
    arrays = {name: value.detach().cpu().numpy() for name, value in sums.items()}
    return Clipped(arrays, None if norms is None else norms.detach().cpu().numpy())


class Problem:
    """Model, loss and optimizer of one system."""

    def __init__(
        self, setting: Setting, change: Change | None = None, make_optimizer: Optimizer = SGD
    ) -> None:
        self.setting, self.make_optimizer = setting, make_optimizer
        self.model = self.make_model()
        if change is not None:
            change(self.model)
        self.model.to(setting.device)
        self.optimizer = make_optimizer(self.trained().values())

    def make_model(self) -> nn.Module:
        """Return the model of the setting's workload."""
        return workloads_torch.model(self.setting.workload, self.setting.seed)

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def losses(self, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return one loss per example, (n,)."""
        return workloads_torch.losses(self.setting.workload, model(x), y)

    def factors(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the clip factors, (n,)."""
        return (self.setting.max_grad_norm / norms).clamp(max=1)

    def clipped(self, grads: Sums) -> tuple[Sums, torch.Tensor]:
        """Return the clipped sum of per-sample gradients (n, *shape), and their norms (n,)."""
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()], 1).norm(dim=1)
        factors = self.factors(norms)
        return {name: torch.tensordot(factors, g, 1) for name, g in grads.items()}, norms

    def noise_by_hand(self, sums: Sums) -> Sums:
        """Add noise and divide, as without a library."""
        stddev = systems.NOISE_MULTIPLIER * self.setting.max_grad_norm
        return {
            name: (sums[name] + torch.randn_like(parameter) * stddev) / self.setting.n
            for name, parameter in self.trained().items()
        }

    def private(
        self,
        clip: Callable[[Any], tuple[Sums, torch.Tensor | None]],
        noise: Callable[[Sums], Mapping[str, torch.Tensor]] | None = None,
    ) -> Prepared:
        """Return a system made from functions: batch -> clipped sum -> noisy mean."""
        noise = noise or self.noise_by_hand

        def update(batch: Any) -> None:
            means = noise(clip(batch)[0])
            self.step(means)

        return self.prepared(clip, update)

    def step(self, means: Mapping[str, torch.Tensor]) -> None:
        """Take a step of the optimizer with these gradients."""
        for name, parameter in self.trained().items():
            parameter.grad = means[name]
        self.optimizer.step()

    def prepared(
        self,
        gradient: Callable[[Any], Any],
        update: Callable[[Any], None],
        read: Callable[[Any], Clipped] | None = read,
        clear: Callable[..., None] | None = None,
    ) -> Prepared:
        """Return a system; `clear` forgets the gradients that its steps leave."""
        clear = clear or self.optimizer.zero_grad
        memory = partial(peak_memory, gradient, clear, self.setting.device)
        found = Prepared(gradient, read, update, memory, problem=self)
        if self.setting.device == "cpu":
            return found
        # The systems of a point share the GPU; some keep every example's gradients until then.
        return replace(found, clear=partial(clear, set_to_none=True))


#: Setting -> the problem of a system.
Kind = Callable[[Setting], Problem]


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


def non_private(setting: Setting, backend: str | None = None, kind: Kind = Problem) -> Prepared:
    """Return the step without clipping and noise: zero_grad, loss, backward.

    With `backend`, loss and backward are compiled by that backend of torch.compile.
    """
    problem = kind(setting)

    def mean_loss(batch: Any) -> torch.Tensor:
        return problem.losses(problem.model, *batch).mean()

    loss = torch.compile(mean_loss, backend=backend, dynamic=False) if backend else mean_loss

    def gradient(batch: Any) -> None:
        problem.optimizer.zero_grad(set_to_none=True)
        loss(batch).backward()

    def update(batch: Any) -> None:
        gradient(batch)
        problem.optimizer.step()

    return problem.prepared(gradient, update, read=None)


def loop(setting: Setting, kind: Kind = Problem) -> Prepared:
    """Return the loop over single examples, the reference of all other systems."""
    problem = kind(setting)
    trained = problem.trained()

    def clip(batch: Any) -> tuple[Sums, torch.Tensor]:
        sums = {name: torch.zeros_like(p) for name, p in trained.items()}
        norms = []
        for unit in zip(*(part.split(setting.rows_per_unit) for part in batch), strict=True):
            loss = problem.losses(problem.model, *unit).mean()
            grads = torch.autograd.grad(loss, list(trained.values()))
            norm = torch.stack([g.norm() for g in grads]).norm()
            for total, g in zip(sums.values(), grads, strict=True):
                total += problem.factors(norm) * g
            norms.append(norm)
        return sums, torch.stack(norms)

    return problem.private(clip)


def vmap_grad(setting: Setting, kind: Kind = Problem) -> Prepared:
    """Return `torch.func.vmap(grad)`, the program of the PyTorch tutorial."""
    problem = kind(setting)
    frozen = {k: p.detach() for k, p in problem.model.named_parameters() if not p.requires_grad}

    def loss(parameters: Sums, *unit: torch.Tensor) -> torch.Tensor:
        def model(x: torch.Tensor) -> torch.Tensor:
            return functional_call(problem.model, (parameters, frozen), (x,))

        return problem.losses(model, *unit).mean()

    per_example = vmap(grad(loss), in_dims=(None, 0, 0))

    def clip(batch: Any) -> tuple[Sums, torch.Tensor]:
        parameters = {name: p.detach() for name, p in problem.trained().items()}
        units = (part.unflatten(0, (-1, setting.rows_per_unit)) for part in batch)
        return problem.clipped(per_example(parameters, *units))

    return problem.private(clip)


def dualdp(
    setting: Setting,
    method: str,
    override: Callable[[], Any] = contextlib.nullcontext,
    kind: Kind = Problem,
) -> Prepared:
    """Return `clipped_grad_sum` and `noisy_mean`; `override()` is entered around each sum."""
    import dualdp.torch as dpt

    problem = kind(setting)
    plan, steps = setting.plan(), itertools.count()

    def clip(batch: Any) -> tuple[Sums, torch.Tensor]:
        with override():
            result = dpt.clipped_grad_sum(
                problem.losses,
                problem.model,
                *batch,
                max_grad_norm=setting.max_grad_norm,
                method=method,
                rows_per_unit=setting.rows_per_unit,
            )
        return result.grads, result.norms

    return problem.private(clip, lambda sums: dpt.noisy_mean(sums, plan, next(steps)))


def forget_compiled() -> None:
    """Forget all graphs: a function has a limited number of them, and this is another point."""
    torch._dynamo.reset()


def compiled(setting: Setting, backend: str) -> Prepared:
    """Return the clipped sum as one compiled graph; `chosen` tells why it runs eagerly."""
    import dualdp.torch as dpt

    problem = Problem(setting)
    step = dpt.compile_clipped_grad_sum(problem.losses, problem.model, backend=backend)

    def clip(batch: Any) -> tuple[Sums, torch.Tensor]:
        result = step(*batch, max_grad_norm=setting.max_grad_norm)
        return result.grads, result.norms

    return replace(problem.private(clip), chosen=lambda batch: "; ".join(step.reasons))


def auto(setting: Setting) -> Prepared:
    """Return dualdp with the choices of its cost model, and their description."""
    prepared = dualdp(setting, "auto")
    return replace(prepared, chosen=lambda batch: _chosen_text(_chosen(prepared, batch)))


def _chosen(prepared: Prepared, batch: Any) -> dict[tuple[str, str], list[str]]:
    """(method, operation) -> sizes of the layers for which the cost model chose that method."""
    layers: dict[tuple[str, str], list[str]] = {}

    def noted(operation: str, usual: str, methods: Any, sizes: Iterable[int]) -> str:
        found, size = layers.setdefault((usual, operation), []), "x".join(map(str, sizes))
        if size not in found:
            found.append(size)
        return usual

    with mock.patch.object(choices, "choose", noted):
        prepared.gradient(batch)
    return layers


def _chosen_text(layers: Mapping[tuple[str, str], list[str]]) -> str:
    """Text of the choices: each method with its layers, by their sizes."""
    return "; ".join(f"{way}: {kind} {', '.join(sizes)}" for (way, kind), sizes in layers.items())


def forced(setting: Setting, method: str) -> Prepared:
    """Return dualdp with one method forced on every layer that supports it.

    Raises:
        NothingToForce: no layer can.
    """
    able = {name: method for name, methods in choices.OPERATIONS.items() if method in methods}
    chosen = _chosen(dualdp(setting, "auto"), load(setting, *setting.workload.batch(2)))
    if not able.keys() & {operation for _, operation in chosen}:
        raise NothingToForce(method)
    return dualdp(setting, "auto", partial(choices.forced, **able))


def engine(
    setting: Setting, checks: float, change: Change | None = None, correlation: Any = None
) -> Callable[[], Any]:
    """Return a call that takes one step of a run of `PrivacyEngine`, on a model with a change."""
    import dualdp.torch as dpt

    problem = Problem(setting, change)
    data = load(setting, *setting.workload.batch(2 * setting.n))
    _, optimizer, loader = dpt.PrivacyEngine().make_private(
        module=problem.model,
        optimizer=problem.optimizer,
        data_loader=DataLoader(TensorDataset(*data), batch_size=setting.n),
        plan=setting.run_of_batches(correlation),
        checks=checks,
    )

    def steps() -> Iterator[None]:
        while True:
            for batch in loader:
                optimizer.zero_grad(set_to_none=True)
                problem.losses(problem.model, *batch).mean().backward()
                optimizer.step()
                yield

    return partial(next, steps())


def weights_size(setting: Setting, change: Change | None = None) -> int:
    """Return the bytes of the parameters, with those that are frozen."""
    model = Problem(setting, change).model
    return sum(p.numel() * p.element_size() for p in model.parameters())


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


_FORMS = dict.fromkeys(form for forms in choices.OPERATIONS.values() for form in forms)
#: "dualdp:<method>" -> dualdp with that method forced where supported.
FORCED: dict[str, Callable[[Setting], Prepared]] = {
    f"dualdp:{form}": partial(forced, method=form) for form in _FORMS
}
SYSTEMS: dict[str, Callable[[Setting], Prepared]] = {
    systems.NON_PRIVATE: non_private,
    **{f"dualdp:{method}": partial(dualdp, method=method) for method in systems.METHODS},
    systems.AUTO: auto,
    **FORCED,
    systems.MULTI: vmap_grad,
    systems.LOOP: loop,
}
