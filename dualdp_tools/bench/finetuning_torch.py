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


class WithAdamW(Problem):
    """Problem that is trained by AdamW."""

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Any:
        """Return AdamW."""
        return torch.optim.AdamW(parameters, systems.LEARNING_RATE)


class WithAdamBC(Problem):
    """Problem that is trained by AdamBC."""

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Any:
        """Return AdamBC."""
        import dualdp.torch as dpt

        return dpt.AdamBC(parameters, systems.LEARNING_RATE)

    def step(self) -> None:
        """Take a step with the noise of the plan."""
        self.optimizer.step(
            noise_stddev=systems.NOISE_MULTIPLIER * self.setting.max_grad_norm / self.setting.n
        )


class Llama(Problem):
    """Small random Llama of `transformers` with adapters of `peft`, trained by AdamW."""

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

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Any:
        """Return AdamW."""
        return torch.optim.AdamW(parameters, finetuning.ADAM_RATE)

    def losses(self, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean over the tokens of each example, (n,)."""
        logits = model(x).logits
        each = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        return each.view(y.shape).mean(1)


def adafest(setting: Setting) -> Prepared:
    """Return `sparse_noisy_mean` in the place of `noisy_mean`."""
    import dualdp.torch as dpt

    made: list[Problem] = []

    def noted(setting: Setting) -> Problem:
        made.append(Problem(setting))
        return made[0]

    prepared = systems_torch.dualdp(setting, "auto", kind=noted)
    (problem,), plan, steps = made, setting.plan(), itertools.count()
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
        for name, parameter in problem.trained().items():
            parameter.grad = found.grads[name]
        problem.step()

    return replace(prepared, update=update)


def loss_after(system: str, setting: Setting, steps: int) -> float:
    """Return the mean loss on new rows after some updates of a system of the Llama."""
    made: list[Problem] = []

    def noted(setting: Setting) -> Problem:
        made.append(Llama(setting))
        return made[0]

    prepared = SYSTEMS["llama"][system](setting, kind=noted)
    assert prepared.update is not None
    torch.manual_seed(1 + setting.seed)  # of the noise of those that use torch's
    for seed in range(steps):
        prepared.update(systems_torch.load(setting, *setting.workload.batch(setting.n, 100 + seed)))
    x, y = systems_torch.load(setting, *setting.workload.batch(64, 99))
    with torch.no_grad():
        return float(made[0].losses(made[0].model, x, y).mean())


def _llama(system: Callable[..., Prepared], **options: Any) -> Callable[..., Prepared]:
    return partial(system, **{"kind": Llama, **options})


_dualdp = partial(systems_torch.dualdp, method="auto")
#: Kind -> name -> system.
SYSTEMS: dict[str, dict[str, Callable[..., Prepared]]] = {
    "optimizers": {
        NON_PRIVATE: partial(systems_torch.non_private, kind=WithAdamW),
        systems.AUTO: partial(_dualdp, kind=WithAdamW),
        finetuning.ADAM_BC: partial(_dualdp, kind=WithAdamBC),
        LOOP: systems_torch.loop,
    },
    "sparse": {
        NON_PRIVATE: systems_torch.non_private,
        systems.AUTO: _dualdp,
        finetuning.SPARSE: adafest,
        LOOP: systems_torch.loop,
    },
    "llama": {
        NON_PRIVATE: _llama(systems_torch.non_private),
        systems.AUTO: _llama(systems_torch.dualdp, method="auto"),
        MULTI: _llama(systems_torch.vmap_grad),
        "opacus:hooks": _llama(peers_torch.opacus, mode="hooks"),
        "opacus:ghost": _llama(peers_torch.opacus, mode="ghost"),
        "opake": _llama(peers_torch.opake),
        LOOP: _llama(systems_torch.loop),
    },
}
