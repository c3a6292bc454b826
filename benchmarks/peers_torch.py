# SPDX-License-Identifier: Apache-2.0
"""Other PyTorch libraries, used as in their documentation.

Opacus has four modes (hooks, functorch, ew, ghost); recurrent layers are replaced by its own, as it
requires. BackPACK gives per-sample gradients, which are clipped as in its tutorial; opake gives the
clipped sum of a loss of one example.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from benchmarks import systems
from benchmarks.systems import Prepared, Setting
from benchmarks.systems_torch import Problem


def _with_dp_cells(module: nn.Module) -> None:
    """Replace inner recurrent layers by Opacus' own, with the same weights and frozen bias."""
    from opacus import layers

    theirs = {nn.LSTM: layers.DPLSTM, nn.GRU: layers.DPGRU, nn.RNN: layers.DPRNN}
    for name, child in module.named_children():
        if type(child) not in theirs:
            _with_dp_cells(child)
            continue
        sizes = (child.input_size, child.hidden_size)
        with next(child.parameters()).device:
            ours = theirs[type(child)](*sizes, batch_first=child.batch_first)
        ours.load_state_dict(child.state_dict())
        frozen = {key for key, p in child.named_parameters() if not p.requires_grad}
        for key, parameter in ours.named_parameters():
            parameter.requires_grad_(_plain(key) not in frozen)
        setattr(module, name, ours)


def _plain(name: str) -> str:
    """Parameter name without the wrapper's prefix, as in PyTorch's recurrent layers."""
    return re.sub(r"l0\.(ih|hh)\.(weight|bias)", r"\2_\1_l0", name.removeprefix("_module."))


def opacus(setting: Setting, mode: str) -> Prepared:
    """Return Opacus' wrapped module and optimizer in one of its modes."""
    from opacus.grad_sample.utils import prepare_module
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    problem = Problem(setting)
    _with_dp_cells(problem.model)
    ghost = mode == "ghost"
    keywords = {"max_grad_norm": setting.max_grad_norm, "use_ghost_clipping": True} if ghost else {}
    model = prepare_module(problem.model, mode, loss_reduction="mean", **keywords)
    trained = {_plain(name): p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = (DPOptimizerFastGradientClipping if ghost else DPOptimizer)(
        torch.optim.SGD(trained.values(), lr=systems.LEARNING_RATE),
        noise_multiplier=systems.NOISE_MULTIPLIER,
        max_grad_norm=setting.max_grad_norm,
        expected_batch_size=setting.n,
    )

    def backward(batch: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        losses = problem.losses(model, *batch)
        if ghost:
            DPTensorFastGradientClipping(model, optimizer, losses).backward()
        else:
            losses.mean().backward()

    def clip(batch: Any) -> Any:
        backward(batch)
        if not ghost:
            optimizer.clip_and_accumulate()
        return {k: p.grad if ghost else p.summed_grad for k, p in trained.items()}, None

    batches = problem.batches()

    def step() -> None:
        backward(next(batches))
        optimizer.step()

    return problem.prepared(clip, step)


def backpack(setting: Setting) -> Prepared:
    """Return BackPACK's `BatchGrad` with clipping by hand."""
    import backpack
    from backpack.extensions import BatchGrad

    problem = Problem(setting)
    backpack.extend(problem.model)
    trained = problem.trained()

    def clip(batch: Any) -> Any:
        problem.optimizer.zero_grad(set_to_none=True)
        with backpack.backpack(BatchGrad()):
            problem.losses(problem.model, *batch).sum().backward()
        missing = [name for name, p in trained.items() if not hasattr(p, "grad_batch")]
        if missing:
            raise NotImplementedError(f"BatchGrad gave no gradients for {missing[:3]}.")
        outcome = problem.clipped({name: p.grad_batch for name, p in trained.items()})
        for parameter in trained.values():
            del parameter.grad_batch
        return outcome

    return problem.private(clip)


def opake(setting: Setting) -> Prepared:
    """Return opake's `clipped_grad` of the loss of one example, and its Gaussian noise.

    Its patches of a model and of the process are left out: they would change other systems too.
    """
    from opake.dpsgd.clipping import clipped_grad
    from opake.dpsgd.noise import gaussian_noise
    from opake.random import key

    problem = Problem(setting)
    frozen = {k: p.detach() for k, p in problem.model.named_parameters() if not p.requires_grad}

    def loss(parameters: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def model(x: torch.Tensor) -> Any:
            return functional_call(problem.model, (parameters, frozen), (x,))

        return problem.losses(model, x.unsqueeze(0), y.unsqueeze(0))[0]

    bound = setting.max_grad_norm
    clipped, clip_state = clipped_grad(loss, clipping_norm=bound, batch_argnums=(1, 2))
    add_noise, noise_state = gaussian_noise(
        noise_multiplier=systems.NOISE_MULTIPLIER, key=key(setting.seed)
    )

    def gradient(batch: Any) -> Any:
        parameters = {name: p.detach() for name, p in problem.trained().items()}
        return clipped(parameters, *batch, state=clip_state)[0]

    def clip(batch: Any) -> Any:
        return gradient(batch).pytree, None

    batches = problem.batches()

    def step() -> None:
        nonlocal noise_state
        noisy, noise_state = add_noise(gradient(next(batches)), noise_state)
        problem.step({name: total / setting.n for name, total in noisy.pytree.items()})

    return problem.prepared(clip, step)


SYSTEMS: dict[str, systems.System] = {
    f"opacus:{mode}": partial(opacus, mode=mode) for mode in ("hooks", "functorch", "ew", "ghost")
} | {"backpack": backpack, "opake": opake}
