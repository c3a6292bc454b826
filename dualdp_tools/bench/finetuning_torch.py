# SPDX-License-Identifier: Apache-2.0
"""PyTorch systems of the suite of fine-tuning."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from dualdp_tools.bench import finetuning, peers_torch, systems, systems_torch
from dualdp_tools.bench.systems import LOOP, MULTI, NON_PRIVATE, Prepared, Setting
from dualdp_tools.bench.systems_torch import Problem

AdamW = partial(torch.optim.AdamW, lr=systems.LEARNING_RATE)


def adam_bc(setting: Setting) -> Prepared:
    """Return `clipped_grad_sum`, `noisy_mean` and `AdamBC`, which is told the noise."""
    import dualdp.torch as dpt

    stddev = systems.NOISE_MULTIPLIER * setting.max_grad_norm / setting.n

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> Any:
        made = dpt.AdamBC(parameters, systems.LEARNING_RATE)
        made.step = partial(made.step, noise_stddev=stddev)
        return made

    return systems_torch.dualdp(
        setting, "auto", kind=partial(Problem, make_optimizer=make_optimizer)
    )


class Llama(Problem):
    """Small random Llama of `transformers` with adapters of `peft`, trained by AdamW."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, make_optimizer=partial(AdamW, lr=finetuning.ADAM_RATE))

    def make_model(self) -> nn.Module:
        """Return the model; all but its adapters is frozen."""
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = self.setting.workload.options
        config = LlamaConfig(
            vocab_size=sizes["vocabulary"],
            hidden_size=sizes["width"],
            intermediate_size=2 * sizes["width"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            max_position_embeddings=sizes["length"],
            use_cache=False,
            attn_implementation="eager",
        )
        with torch.random.fork_rng():
            torch.manual_seed(self.setting.seed)
            adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"])
            model = get_peft_model(LlamaForCausalLM(config), adapters)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:  # zeros at first, for which the other factor has no gradient
                    nn.init.normal_(parameter, std=0.02)
        return model

    def losses(self, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean over the tokens of each example, (n,)."""
        logits = model(x).logits
        each = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        return each.view(y.shape).mean(1)


def adafest(setting: Setting) -> Prepared:
    """Return `sparse_noisy_mean` in the place of `noisy_mean`."""
    import dualdp.torch as dpt

    prepared = systems_torch.dualdp(setting, "auto")
    problem, plan, steps = prepared.problem, setting.plan(), itertools.count()
    sizes = {name: len(p) for name, p in problem.trained().items()}
    table = max(sizes, key=lambda name: sizes[name])

    def update(batch: Any) -> None:
        counts = dpt.contribution_map(batch[0], sizes[table], mask=None)
        found = dpt.sparse_noisy_mean(
            prepared.gradient(batch)[0],
            counts,
            plan,
            next(steps),
            table=table,
            threshold=finetuning.THRESHOLD,
            map_share=finetuning.MAP_SHARE,
        )
        problem.step(found.grads)

    return replace(prepared, update=update)


def loss_after(system: str, setting: Setting, steps: int) -> float:
    """Return the mean loss on new rows after some updates of a system of the Llama."""
    prepared = SYSTEMS["llama"][system](setting)
    assert prepared.update is not None
    torch.manual_seed(1 + setting.seed)  # of the noise of those that use torch's
    for seed in range(steps):
        prepared.update(systems_torch.load(setting, *setting.workload.batch(setting.n, 100 + seed)))
    x, y = systems_torch.load(setting, *setting.workload.batch(64, 99))
    with torch.no_grad():
        return float(prepared.problem.losses(prepared.problem.model, x, y).mean())


_dualdp = partial(systems_torch.dualdp, method="auto")
_with_adamw = partial(Problem, make_optimizer=AdamW)
#: Kind -> name -> system.
SYSTEMS: dict[str, dict[str, Callable[..., Prepared]]] = {
    "optimizers": {
        NON_PRIVATE: partial(systems_torch.non_private, kind=_with_adamw),
        systems.AUTO: partial(_dualdp, kind=_with_adamw),
        finetuning.ADAM_BC: adam_bc,
        LOOP: systems_torch.loop,
    },
    "sparse": {
        NON_PRIVATE: systems_torch.non_private,
        systems.AUTO: _dualdp,
        finetuning.SPARSE: adafest,
        LOOP: systems_torch.loop,
    },
    "llama": {
        NON_PRIVATE: partial(systems_torch.non_private, kind=Llama),
        systems.AUTO: partial(_dualdp, kind=Llama),
        MULTI: partial(systems_torch.vmap_grad, kind=Llama),
        "opacus:hooks": partial(peers_torch.opacus, kind=Llama, mode="hooks"),
        "opacus:ghost": partial(peers_torch.opacus, kind=Llama, mode="ghost"),
        "opake": partial(peers_torch.opake, kind=Llama),
        LOOP: partial(systems_torch.loop, kind=Llama),
    },
}
