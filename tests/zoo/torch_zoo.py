# SPDX-License-Identifier: Apache-2.0
"""The zoo of PyTorch: every model by name, and what is refused, and why."""

from __future__ import annotations

from collections.abc import Callable

from tests.zoo import torch_handmade, torch_language, torch_packages, torch_vision
from tests.zoo.entry import Entry, Problem

#: Reversible layers, experts by index, and attention that was refused once: no share of these is
#: asked for.
MAY_BE_REFUSED = {"deberta", "deberta_v2", "mixtral", "mixtral_eager", "reformer"}
#: Name -> reason, of the functional calls.
REFUSED = {
    "reformer": "(?i)differentiates|autograd.Function|spot check",  # reversible layers
    "ibert": r"The buffer 'ibert.*\.x_m(in|ax)' changes in forward",
}
#: Name -> reason, of the engine, where it is another.
REFUSED_BY_ENGINE = {
    "reformer": "(?i)outside the recorded forward|differentiates|spot check",
    "energy": "calls grad inside the forward",
}


def _entries(models: dict[str, Callable[[], Problem]]) -> tuple[Entry, ...]:
    return tuple(
        Entry(name, build, REFUSED.get(name), REFUSED_BY_ENGINE.get(name, REFUSED.get(name)))
        for name, build in models.items()
    )


#: Every model that is tested wherever the tests run.
TORCH = (
    *_entries(torch_language.MODELS),
    *_entries(torch_vision.MODELS),
    *_entries(torch_handmade.MODELS),
    *_entries(torch_packages.PEFT),
)
#: Package -> models that are tested where it is installed.
PACKAGES = {
    "torchvision": _entries(torch_packages.TORCHVISION),
    "timm": _entries(torch_packages.TIMM),
}
