# SPDX-License-Identifier: Apache-2.0
"""`AdamBC`: AdamW with the noise of the gradient taken out of its second moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from dualdp import _validate, adam
from dualdp_torch.rules.base import Tensor, is_narrow

#: Names in the optimizer's state; the second moment is not Adam's, so it has another name.
FIRST, SECOND = "exp_avg", "exp_avg_sq_corrected"
#: Settings of torch.optim.AdamW that are another algorithm.
_NOT_OURS = ("maximize", "amsgrad")


class AdamBC(torch.optim.Optimizer):
    """AdamW with DP bias correction of the second moment.

    `PrivacyEngine` passes the noise of each step. In a loop of your own, call
    `step(noise_stddev=plan.noise_stddev(t) / plan.expected_batch_size_at(t))` on the noisy mean of
    step t.

    Args:
        params: float32 or float64 parameters, or groups of them, as in torch.optim.
        lr: learning rate, number >= 0 or tensor of one.
        betas: decay of the average of the gradients and of the squares, both in [0, 1).
        floor: smallest second moment that is divided by, squared gradient units.
        eps: number added to the root of the second moment, gradient units.
        weight_decay: number >= 0; parameters shrink by lr * weight_decay a step, as in AdamW.

    Raises:
        TypeError: a setting that is no number.
        ValueError: a setting out of range, or parameters below float32.

    Guarantees:
        The textbook formula, whose noise is each step's own.
            [test_both_stacks_are_the_textbook_loop]
        Without noise and floor it is torch.optim.AdamW.  [test_without_noise_and_floor_it_is_adamw]

    Source: Tang, Shpilevskiy and Lecuyer 2024, Algorithm 1 (arXiv 2312.14334).

    >>> p = torch.nn.Parameter(torch.tensor([0.0]))
    >>> optimizer = AdamBC([p], lr=0.1)
    >>> p.grad = torch.tensor([0.5])
    >>> optimizer.step(noise_stddev=0.3)
    >>> round(p.item(), 4)  # - 0.1 * 0.5 / sqrt(0.25 - 0.09)
    -0.125
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (adam.DEFAULTS["b1"], adam.DEFAULTS["b2"]),
        floor: float = adam.DEFAULTS["floor"],
        eps: float = adam.DEFAULTS["eps"],
        weight_decay: float = adam.DEFAULTS["weight_decay"],
    ) -> None:
        defaults = dict(lr=lr, betas=betas, floor=floor, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as in torch.optim, after checking its settings."""
        group = {**self.defaults, **param_group}
        _validate.non_negative("lr", group["lr"])
        if not isinstance(group["betas"], tuple | list) or len(group["betas"]) != 2:
            raise ValueError(
                f"betas={group['betas']!r} is no pair. Expected two numbers in [0, 1)."
            )
        adam.check_settings(**_settings(group), weight_decay=group["weight_decay"])
        unknown = [name for name in _NOT_OURS if group.get(name)]
        if unknown:
            raise ValueError(f"AdamBC has no {unknown[0]!r}. Expected a group without it.")
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            _require_wide(p)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an `AdamBC`, as in torch.optim.

        Raises:
            ValueError: the groups lack a setting of `AdamBC`, as those of another optimizer.
        """
        for group in state_dict.get("param_groups", ()):
            if missing := sorted(self.defaults.keys() - group.keys()):
                raise ValueError(
                    f"The state to load has no {missing[0]!r}, so another optimizer made it. "
                    "Expected the state of an AdamBC: load no other, and begin it anew."
                )
        super().load_state_dict(state_dict)

    @torch._disable_dynamo
    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, noise_stddev: float | None = None
    ) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: function that computes the loss again, as in torch.optim.
            noise_stddev: standard deviation of the noise in each coordinate of the gradients;
                passed by `PrivacyEngine`.

        Returns:
            The closure's loss, or None.

        Raises:
            TypeError: noise_stddev is missing, or no number.
            ValueError: noise_stddev is negative or not finite; settings or parameters were
                changed to some that are refused.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        due = [
            (group, [p for p in group["params"] if p.grad is not None])
            for group in self.param_groups
        ]
        if not any(held for _, held in due):  # as within a logical batch
            return loss
        if noise_stddev is None:
            raise TypeError(
                "AdamBC.step() came without noise_stddev, the noise that it takes out. Expected "
                "the optimizer of make_private, whose engine passes it; or in a loop of your own "
                "step(noise_stddev=plan.noise_stddev(t) / plan.expected_batch_size_at(t))."
            )
        stddev = _validate.non_negative("noise_stddev", noise_stddev)
        for group, held in due:
            adam.check_settings(**_settings(group), weight_decay=group["weight_decay"])
            for p in held:
                _require_wide(p)
                self._update(p, group, stddev)
        return loss

    def _update(self, p: Tensor, group: dict[str, Any], stddev: float) -> None:
        state = self.state[p]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            state[FIRST], state[SECOND] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        moments = state[FIRST], state[SECOND]
        direction, *new = adam.adam_bc(
            p.grad, *moments, state["step"].item(), stddev, **_settings(group), xp=torch
        )
        for old, value in zip(moments, new, strict=True):
            old.copy_(value)
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * direction)


def _require_wide(p: Tensor) -> None:
    if is_narrow([p]) or not p.is_floating_point():
        raise ValueError(
            f"AdamBC got parameters of {p.dtype}, in which the difference of two large squares "
            "would be rounded away. Expected float32 or float64 parameters (with autocast for the "
            "forward)."
        )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Settings of a group, by the names of the formula."""
    b1, b2 = group["betas"]
    return {"b1": b1, "b2": b2, "floor": group["floor"], "eps": group["eps"]}
