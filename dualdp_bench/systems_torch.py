# SPDX-License-Identifier: Apache-2.0
"""The PyTorch systems: the non-private step, dualdp's methods, and two programs people write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

from dualdp_bench import results, workloads_torch
from dualdp_bench.systems import (
    AUTO,
    LEARNING_RATE,
    LOOP,
    METHODS,
    MULTI,
    NOISE_MULTIPLIER,
    NON_PRIVATE,
    Clipped,
    NothingToForce,
    Prepared,
    Setting,
    Stack,
)
from dualdp_torch import choices

Sums = dict[str, torch.Tensor]


class Problem:
    """The model, loss and optimizer of one system."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.model = workloads_torch.model(setting.workload, setting.seed).to(setting.device)
        self.optimizer = torch.optim.SGD(self.trained().values(), LEARNING_RATE)

    def trained(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def losses(self, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """One loss per example, (n,)."""
        return workloads_torch.losses(self.setting.workload, model(x), y)

    def factors(self, norms: torch.Tensor) -> torch.Tensor:
        """Clip factors, (n,)."""
        return (self.setting.max_grad_norm / norms).clamp(max=1)

    def noise_and_step(self, sums: Sums) -> None:
        """Noise, mean and optimizer step as a program without a library does them."""
        stddev = NOISE_MULTIPLIER * self.setting.max_grad_norm
        for name, parameter in self.trained().items():
            noise = torch.randn_like(parameter) * stddev
            parameter.grad = (sums[name] + noise) / self.setting.n
        self.optimizer.step()

    def private(self, clip: Callable[[Any], tuple[Sums, torch.Tensor | None]]) -> Prepared:
        """A system that only computes the clipped sum."""
        return Prepared(
            gradient=clip,
            read=read,
            update=lambda batch: self.noise_and_step(clip(batch)[0]),
            memory=partial(peak_memory, clip, self.optimizer.zero_grad, self.setting.device),
        )


def read(outcome: tuple[Sums, torch.Tensor | None]) -> Clipped:
    """Sums and norms as NumPy arrays."""
    sums, norms = outcome
    arrays = {name: value.detach().cpu().numpy() for name, value in sums.items()}
    return Clipped(arrays, None if norms is None else norms.detach().cpu().numpy())


def peak_memory(
    call: Callable[[Any], Any], clear: Callable[..., None], device: str, batch: Any
) -> int:
    """Peak bytes that a call has alive beyond what was there before it, old gradients cleared."""
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
    """zero_grad, loss, backward; no clipping, no noise."""
    problem = Problem(setting)

    def gradient(batch: Any) -> None:
        problem.optimizer.zero_grad(set_to_none=True)
        problem.losses(problem.model, *batch).mean().backward()

    def update(batch: Any) -> None:
        gradient(batch)
        problem.optimizer.step()

    clear = problem.optimizer.zero_grad
    return Prepared(gradient, None, update, partial(peak_memory, gradient, clear, setting.device))


def loop(setting: Setting) -> Prepared:
    """One example at a time: what every other system is compared with."""
    problem = Problem(setting)
    trained = problem.trained()

    def clip(batch: Any) -> tuple[Sums, torch.Tensor]:
        sums = {name: torch.zeros_like(p) for name, p in trained.items()}
        norms = []
        for example in zip(*(part.split(1) for part in batch), strict=True):
            loss = problem.losses(problem.model, *example).sum()
            grads = torch.autograd.grad(loss, list(trained.values()))
            norm = torch.stack([g.norm() for g in grads]).norm()
            for total, g in zip(sums.values(), grads, strict=True):
                total += problem.factors(norm) * g
            norms.append(norm)
        return sums, torch.stack(norms)

    return problem.private(clip)


def vmap_grad(setting: Setting) -> Prepared:
    """`torch.func.vmap(grad)`, the program of the PyTorch tutorial."""
    problem = Problem(setting)
    frozen = {k: p.detach() for k, p in problem.model.named_parameters() if not p.requires_grad}

    def loss(parameters: Sums, *example: torch.Tensor) -> torch.Tensor:
        def model(x: torch.Tensor) -> torch.Tensor:
            return functional_call(problem.model, (parameters, frozen), (x,))

        return problem.losses(model, *(part.unsqueeze(0) for part in example))[0]

    per_example = vmap(grad(loss), in_dims=(None, 0, 0))

    def clip(batch: Any) -> tuple[Sums, torch.Tensor]:
        parameters = {name: p.detach() for name, p in problem.trained().items()}
        grads = per_example(parameters, *batch)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()], 1).norm(dim=1)
        factors = problem.factors(norms)
        return {k: torch.tensordot(factors, g, 1) for k, g in grads.items()}, norms

    return problem.private(clip)


def dualdp(
    setting: Setting, method: str, ways: Callable[[], Any] = contextlib.nullcontext
) -> Prepared:
    """`clipped_grad_sum` and `noisy_mean` with the user's optimizer; `ways` is around each sum."""
    import dualdp.torch as dpt

    problem = Problem(setting)
    plan = setting.plan()

    def clip(batch: Any) -> tuple[Sums, torch.Tensor]:
        with ways():
            result = dpt.clipped_grad_sum(
                problem.losses,
                problem.model,
                *batch,
                max_grad_norm=setting.max_grad_norm,
                method=method,
            )
        return result.grads, result.norms

    def update(batch: Any) -> None:
        means = dpt.noisy_mean(clip(batch)[0], plan, 0)
        for name, parameter in problem.trained().items():
            parameter.grad = means[name]
        problem.optimizer.step()

    memory = partial(peak_memory, clip, problem.optimizer.zero_grad, setting.device)
    return Prepared(clip, read, update, memory)


def auto(setting: Setting) -> Prepared:
    """dualdp, and what its cost model chooses."""
    prepared = dualdp(setting, "auto")
    return replace(prepared, takes=lambda batch: _in_words(_chosen(prepared, batch)))


def _chosen(prepared: Prepared, batch: Any) -> dict[str, str]:
    """Operation and sizes -> the way that the cost model has it go."""
    table: dict[str, str] = {}
    with choices.recorded(table, measure=False):
        prepared.gradient(batch)
    return table


def _in_words(table: Mapping[str, str]) -> str:
    """A table of choices: each way with the layers that go it, by their first sizes."""
    layers: dict[str, list[str]] = {}
    for key, way in table.items():
        operation, *sizes = key.split()
        shown = sizes[:1] if operation == "convolution" else sizes[:-2]  # not dtype and device
        size = "x".join(size.partition("=")[2] for size in shown)
        layers.setdefault(f"{way}: {operation}", []).append(size)
    return "; ".join(f"{way} {', '.join(sizes)}" for way, sizes in layers.items())


def measured(setting: Setting) -> Prepared:
    """Our system with every layer going the way that was fastest when it was met first."""
    table: dict[str, str] = {}
    prepared = dualdp(setting, "auto", partial(choices.recorded, table, measure=True))
    return replace(prepared, takes=lambda batch: _in_words(table))


def forced(setting: Setting, way: str) -> Prepared:
    """Our system with every layer that can going one way.

    Raises:
        NothingToForce: no layer can.
    """
    able = {operation: way for operation, ways in choices.OPERATIONS.items() if way in ways}
    few = dualdp(setting, "auto")
    met = _chosen(few, load(setting, *setting.workload.batch(2)))
    if not able.keys() & {key.split()[0] for key in met}:
        raise NothingToForce(way)
    return dualdp(setting, "auto", partial(choices.forced, **able))


def engine(setting: Setting, checks: float) -> Callable[[], Any]:
    """A call that makes one step of a run of `PrivacyEngine`."""
    import dualdp.torch as dpt

    problem = Problem(setting)
    data = load(setting, *setting.workload.batch(2 * setting.n))
    _, optimizer, loader = dpt.PrivacyEngine().make_private(
        module=problem.model,
        optimizer=problem.optimizer,
        data_loader=DataLoader(TensorDataset(*data), batch_size=setting.n),
        plan=setting.run_of_batches(),
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


def device_name(device: str) -> str:
    """The processor or GPU that the tensors live on."""
    return torch.cuda.get_device_name() if device == "cuda" else results.processor()


def wait(outcome: Any) -> Any:
    """Block until the device has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return outcome


def load(setting: Setting, x: np.ndarray, y: np.ndarray) -> Any:
    """A NumPy batch on the device."""
    return workloads_torch.load(setting.workload, x, y, setting.device)


def _systems() -> dict[str, Callable[[Setting], Prepared]]:
    from dualdp_bench import peers_torch

    methods = {f"dualdp:{method}": partial(dualdp, method=method) for method in METHODS}
    people = {MULTI: vmap_grad, LOOP: loop}
    ours = methods | {AUTO: auto} | FORCED
    return {NON_PRIVATE: non_private} | ours | people | peers_torch.SYSTEMS


_WAYS = dict.fromkeys(way for ways in choices.OPERATIONS.values() for way in ways)
#: "dualdp:<way>" -> dualdp with the layers that can forced to go it; and with measured choices.
FORCED: dict[str, Callable[[Setting], Prepared]] = {"dualdp:measured": measured} | {
    f"dualdp:{way}": partial(forced, way=way) for way in _WAYS
}
STACK = Stack("torch", _systems(), load, wait, device_name, engine, tuple(FORCED))
