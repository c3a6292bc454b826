# SPDX-License-Identifier: Apache-2.0
"""A function of one's own gets a rule, so that its per-sample gradients cost no `vmap`.

Without the rule it is exact already; with it, it is fast. See docs/architecture.md.
"""

import sys
import time

import torch
from torch import nn

import dualdp.torch as dpt

EXAMPLES = 64 if "--toy" in sys.argv else 512
WIDTH = 64


@torch.overrides.wrap_torch_function(lambda x, w: (x, w))
def scaled(x, w):
    """(n, ..., d), (d,) -> (n, ..., d): each channel by the exponential of its weight."""
    return x * torch.exp(w)


class Scale(nn.Module):
    """A gain per channel."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-0.5, 0.5, WIDTH))

    def forward(self, x):
        """(n, ..., d) -> the same."""
        return scaled(x, self.w)


def losses(model, x):
    """(n,) losses."""
    return model(x).square().mean((1, 2))


def main():
    torch.manual_seed(0)
    scale = Scale()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), scale, nn.Linear(WIDTH, 8))
    x = torch.randn(EXAMPLES, 16, WIDTH)

    def weight_grads(acts, grads_out, *, shape, **options):
        """(n, ..., d), (n, ..., d) -> (n, d)."""
        return (acts * grads_out).flatten(1, -2).sum(1) * torch.exp(scale.w.detach())

    dpt.register_rule(scaled, dpt.Rule(arguments=("x", "w"), acts="x", grads={"w": weight_grads}))

    seconds, found = {}, {}
    for method in ("materialize", "vmap", "loop"):
        begin = time.perf_counter()
        found[method] = dpt.per_sample_grads(losses, model, x, method=method)["1.w"]
        seconds[method] = time.perf_counter() - begin
    same = all(torch.allclose(found["loop"], other, atol=1e-6) for other in found.values())
    for method, spent in seconds.items():
        print(f"{method:12s} {spent * 1e3:8.1f} ms")
    print(f"the rule, vmap and the loop agree: {same}")


if __name__ == "__main__":
    main()
