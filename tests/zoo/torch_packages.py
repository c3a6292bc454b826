# SPDX-License-Identifier: Apache-2.0
"""Models of torchvision and timm after `dpt.fix`, and adapters of peft."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import dualdp_torch as dpt
from tests.zoo.entry import N, Problem
from tests.zoo.torch_language import causal, classifier
from tests.zoo.torch_vision import floats, labels


def image_label(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(n,) of a classifier of images; of a model with further outputs, the first."""
    out = model(x)
    logits = out if torch.is_tensor(out) else out[0]
    return F.cross_entropy(logits, y, reduction="none")


def last_tokens(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """(n,) mean over each row's tokens, of a model that puts others before them."""
    logits = model(input_ids=ids, use_cache=False).logits[:, -ids.shape[1] :]
    each = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return each.mean(1)


@functools.cache
def torchvision() -> Any:
    """The package.

    Its models are plain torch. The wheels of the index hold its operators built for CUDA; where
    these can't be loaded, those that the import looks for are declared.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("torchvision")
        except RuntimeError:
            kept = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                kept.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            torchvision.library = kept  # which takes its operators along when it is freed
            return importlib.import_module("torchvision")


def _without_dropout(model: nn.Module) -> nn.Module:
    """The model in training mode; dropout and stochastic depth are off."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) or hasattr(module, "drop_prob"):
            vars(module)["p" if hasattr(module, "p") else "drop_prob"] = 0.0
        if type(module).__name__ == "StochasticDepth":
            module.p = 0.0
    return model.train()


def of_torchvision(build: Callable[[Any], nn.Module], size: int = 32) -> Problem:
    """A classifier of torchvision."""
    torch.manual_seed(0)
    model = dpt.fix(_without_dropout(build(torchvision().models)))
    return Problem(model, image_label, (floats(N, 3, size, size, seed=1), labels()))


def of_timm(name: str, size: int = 32, **options: Any) -> Problem:
    """A classifier of timm."""
    torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        timm = importlib.import_module("timm")
    torch.manual_seed(0)
    model = dpt.fix(_without_dropout(timm.create_model(name, num_classes=3, **options)))
    return Problem(model, image_label, (floats(N, 3, size, size, seed=1), labels()))


def adapted(base: Problem, kind: str, **options: Any) -> Problem:
    """A frozen model with an adapter of peft that is trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = importlib.import_module("peft")
        torch.manual_seed(1)
        model = peft.get_peft_model(base.model, getattr(peft, kind)(**options))
    with torch.no_grad():  # half of an adapter begins at zero, where half of the gradient is zero
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.1)
    return Problem(model.train(), base.loss_fn, base.batch)


def _convnext(models: Any) -> nn.Module:
    settings = models.convnext.CNBlockConfig
    return models.ConvNeXt([settings(16, 32, 1), settings(32, None, 1)], num_classes=3)


def _resnext(models: Any) -> nn.Module:
    return models.ResNet(
        models.resnet.Bottleneck, [1, 1, 1, 1], groups=8, width_per_group=2, num_classes=3
    )


def _swin(models: Any) -> nn.Module:
    return models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=3)


def _maxvit(models: Any) -> nn.Module:
    return models.MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=3)


def _vgg(models: Any) -> nn.Module:
    model = models.VGG(models.vgg.make_layers([8, "M", 16, "M"], batch_norm=True), num_classes=3)
    model.classifier = nn.Linear(16 * 49, 3)
    return model


_PLAIN = {"num_classes": 3, "init_weights": False, "aux_logits": False}
#: name -> build, as in `Entry`.
TORCHVISION: dict[str, Callable[[], Problem]] = {
    name: functools.partial(of_torchvision, build, size)
    for name, build, size in (
        ("resnet18", lambda m: m.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1], num_classes=3), 64),
        ("resnext", _resnext, 64),
        ("mobilenet_v2", lambda m: m.mobilenet_v2(width_mult=0.25, num_classes=3), 96),
        ("mobilenet_v3", lambda m: m.mobilenet_v3_small(width_mult=0.25, num_classes=3), 96),
        ("mnasnet", lambda m: m.MNASNet(0.25, num_classes=3), 96),
        ("shufflenet", lambda m: m.ShuffleNetV2([1, 2, 1], [8, 16, 24, 32, 48], num_classes=3), 96),
        ("squeezenet", lambda m: m.squeezenet1_1(num_classes=3), 48),
        ("densenet", lambda m: m.DenseNet(8, (2, 2), 16, num_classes=3), 64),
        ("vgg", _vgg, 32),
        ("alexnet", lambda m: m.alexnet(num_classes=3), 64),
        ("googlenet", lambda m: m.googlenet(**_PLAIN), 64),
        ("inception", lambda m: m.inception_v3(**_PLAIN), 96),
        ("regnet", lambda m: m.regnet_y_400mf(num_classes=3), 64),
        ("efficientnet", lambda m: m.efficientnet_b0(num_classes=3), 64),
        ("efficientnet_v2", lambda m: m.efficientnet_v2_s(num_classes=3), 64),
        ("convnext", _convnext, 32),
        ("vit", lambda m: m.VisionTransformer(32, 8, 2, 4, 32, 48, num_classes=3), 32),
        ("swin", _swin, 32),
        ("maxvit", _maxvit, 64),
    )
}
_TIMM_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
_SWIN = {
    "img_size": 32,
    "window_size": 4,
    "embed_dim": 16,
    "depths": (2, 2),
    "num_heads": (2, 4),
}
_TWINS = {
    "img_size": 64,
    "embed_dims": (16, 32, 32, 32),
    "depths": (1, 1, 1, 1),
    "num_heads": (1, 2, 2, 2),
}
TIMM: dict[str, Callable[[], Problem]] = {
    name: functools.partial(of_timm, name, size, **options)
    for name, size, options in (
        ("resnet10t", 64, {}),
        ("resnetv2_50", 64, {"layers": (1, 1), "channels": (16, 32), "stem_chs": 16}),
        ("nf_resnet26", 64, {}),
        ("skresnet18", 64, {}),
        ("seresnext26t_32x4d", 64, {}),
        ("res2net50_14w_8s", 64, {}),
        ("efficientnet_lite0", 64, {}),
        ("mobilenetv3_small_050", 96, {}),
        ("mobilenetv4_conv_small", 96, {}),
        ("ghostnet_050", 96, {}),
        ("repvgg_a0", 64, {}),
        ("vgg11_bn", 32, {}),
        ("xception41", 96, {}),
        ("hrnet_w18_small", 64, {}),
        ("dla34", 64, {}),
        ("convnext_atto", 32, {}),
        ("mixer_s32_224", 64, {"img_size": 64}),
        ("resmlp_12_224", 32, {"img_size": 32}),
        ("gmlp_ti16_224", 32, {"img_size": 32}),
        ("vit_tiny_patch16_224", 32, _TIMM_VIT),
        ("eva02_tiny_patch14_224", 32, _TIMM_VIT),
        ("beit_base_patch16_224", 32, _TIMM_VIT),
        ("deit3_small_patch16_224", 32, _TIMM_VIT),
        ("cait_xxs24_224", 32, _TIMM_VIT),
        ("xcit_nano_12_p16_224", 32, {"img_size": 32, "embed_dim": 32, "depth": 2}),
        ("swin_tiny_patch4_window7_224", 32, _SWIN),
        ("swinv2_tiny_window8_256", 32, _SWIN),
        ("twins_pcpvt_small", 64, _TWINS),
        ("pit_ti_224", 64, {"img_size": 64}),
        ("levit_128s", 128, {"img_size": 128}),
        ("mobilevit_xxs", 64, {}),
        ("coatnet_nano_rw_224", 64, {"img_size": 64}),
        ("maxvit_pico_rw_256", 64, {"img_size": 64}),
        ("focalnet_tiny_srf", 64, {}),
        ("edgenext_xx_small", 64, {}),
        ("poolformer_s12", 64, {}),
        ("volo_d1_224", 64, {"img_size": 64}),
        ("crossvit_tiny_240", 240, {}),
    )
}
_LLAMA = functools.partial(causal, "LlamaForCausalLM", "LlamaConfig")
_BERT = functools.partial(classifier, "BertForSequenceClassification", "BertConfig")
_PROMPTED = lambda *names: _LLAMA(*names)._replace(loss_fn=last_tokens)  # noqa: E731
_TWO = {"target_modules": ["q_proj", "v_proj"]}
_TOKENS = {"num_virtual_tokens": 3}
_IA3 = {
    "target_modules": ["k_proj", "v_proj", "down_proj"],
    "feedforward_modules": ["down_proj"],
}
_LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
PEFT: dict[str, Callable[[], Problem]] = {
    name: lambda base=base, kind=kind, options=options: adapted(base(), kind, **options)
    for name, base, kind, options in (
        ("lora", _LLAMA, "LoraConfig", {**_LORA, **_TWO}),
        ("lora_everywhere", _LLAMA, "LoraConfig", {**_LORA, "target_modules": "all-linear"}),
        ("rslora", _BERT, "LoraConfig", {**_LORA, "task_type": "SEQ_CLS", "use_rslora": True}),
        ("dora", _LLAMA, "LoraConfig", {**_LORA, "use_dora": True, **_TWO}),
        ("ia3", _LLAMA, "IA3Config", _IA3),
        ("loha", _LLAMA, "LoHaConfig", {"r": 2, "alpha": 4, **_TWO}),
        ("lokr", _LLAMA, "LoKrConfig", {"r": 2, "alpha": 4, **_TWO}),
        ("vera", _LLAMA, "VeraConfig", {"r": 4, "vera_dropout": 0.0, "target_modules": ["q_proj"]}),
        ("oft", _LLAMA, "OFTConfig", {"r": 4, "oft_block_size": 0, "target_modules": ["q_proj"]}),
        ("prompt", _PROMPTED, "PromptTuningConfig", {"task_type": "CAUSAL_LM", **_TOKENS}),
        ("prefix", _BERT, "PrefixTuningConfig", {"task_type": "SEQ_CLS", **_TOKENS}),
    )
}
