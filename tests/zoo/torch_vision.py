# SPDX-License-Identifier: Apache-2.0
"""Models of images, sound and series of `transformers`; batch norm is replaced by `dpt.fix`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

import dualdp_torch as dpt
from tests.zoo.entry import N, Problem
from tests.zoo.torch_language import hugging_face, tokens

SIZE = 32


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normals, asymmetric from one row to the next."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def labels(high: int = 3) -> torch.Tensor:
    """(n,) classes."""
    return torch.arange(N) % high


def image_label(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(n,) of a classifier of images."""
    return F.cross_entropy(model(pixel_values=x).logits, y, reduction="none")


def image(model: str, config: str, *, size: int = SIZE, **options: Any) -> Problem:
    """A classifier of images."""
    built = dpt.fix(hugging_face(model, config, {"num_labels": 3, **options}))
    return Problem(built, image_label, (floats(N, 3, size, size, seed=1), labels()))


def masked_error(model: Any, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """(n,) error of an autoencoder whose masks the caller draws."""
    out = model(pixel_values=x, noise=noise)
    apart = (out.logits - model.patchify(x)).square().mean(2)
    return (apart * out.mask).sum(1) / out.mask.sum(1)


def masked_image(model: str, config: str, **options: Any) -> Problem:
    """A masked autoencoder, whose patches are shuffled and put back inside."""
    built = hugging_face(model, config, options)
    patches = (SIZE // options["patch_size"]) ** 2
    noise = torch.rand(N, patches, generator=torch.Generator().manual_seed(9))
    return Problem(built, masked_error, (floats(N, 3, SIZE, SIZE, seed=10), noise))


def pixel_labels(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(n,) mean over each image's pixels."""
    logits = model(pixel_values=x).logits
    each = F.cross_entropy(logits, y[:, : logits.shape[2], : logits.shape[3]], reduction="none")
    return each.flatten(1).mean(1)


def pixels(model: str, config: str, **options: Any) -> Problem:
    """A label for every pixel."""
    built = dpt.fix(hugging_face(model, config, {"num_labels": 4, **options}))
    target = torch.arange(N * SIZE * SIZE).view(N, SIZE, SIZE) % 4
    return Problem(built, pixel_labels, (floats(N, 3, SIZE, SIZE, seed=2), target))


def embedded(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(n,) of a linear probe with fixed weights on the last hidden states."""
    hidden = model(pixel_values=x).last_hidden_state.flatten(1)
    weights = torch.arange(hidden.shape[1], dtype=hidden.dtype).cos()
    return ((hidden * weights).mean(1) - y).square()


def backbone(model: str, config: str, **options: Any) -> Problem:
    """An encoder of images without a head."""
    built = dpt.fix(hugging_face(model, config, options))
    return Problem(built, embedded, (floats(N, 3, SIZE, SIZE, seed=3), labels()))


def transcription(model: Any, sound: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """(n,) of a decoder of speech."""
    out = model(input_features=sound, decoder_input_ids=target, use_cache=False).logits[:, :-1]
    return F.cross_entropy(out.transpose(1, 2), target[:, 1:], reduction="none").mean(1)


def whisper(model: str, config: str, **options: Any) -> Problem:
    """Speech to text."""
    built = hugging_face(model, config, options)
    return Problem(built, transcription, (floats(N, 8, 24, seed=4), tokens(N, 6, seed=5)))


def sound_label(model: Any, sound: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(n,) of a classifier of sound."""
    return F.cross_entropy(model(sound).logits, y, reduction="none")


def sound(model: str, config: str, *, shape: tuple[int, ...] = (400,), **options: Any) -> Problem:
    """A classifier of sound."""
    built = dpt.fix(hugging_face(model, config, {"num_labels": 3, **options}))
    return Problem(built, sound_label, (floats(N, *shape, seed=6), labels()))


def series_error(model: Any, past: torch.Tensor, future: torch.Tensor) -> torch.Tensor:
    """(n,) squared error of a forecast."""
    predicted = model(past_values=past).prediction_outputs
    return (predicted - future).square().flatten(1).mean(1)


def series(model: str, config: str, **options: Any) -> Problem:
    """A forecast of two series."""
    built = dpt.fix(hugging_face(model, config, options))
    return Problem(built, series_error, (floats(N, 16, 2, seed=7), floats(N, 4, 2, seed=8)))


VISION = {
    "image_size": SIZE,
    "patch_size": 8,
    "num_channels": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
SOUND = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16, "layerdrop": 0.0, "apply_spec_augment": False,
    "mask_time_prob": 0.0, "mask_feature_prob": 0.0,
}  # fmt: skip
_SWIN = {
    "image_size": SIZE, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
    "window_size": 4, "drop_path_rate": 0.0,
}  # fmt: skip
_MAE = VISION | {
    "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 24, "norm_pix_loss": False,
}  # fmt: skip
_STAGES = {"hidden_sizes": [16, 24], "depths": [2, 2], "num_stages": 2, "drop_path_rate": 0.0}
_RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 2]}
_BASIC = _RESNET | {"layer_type": "basic"}
_REGNET = _RESNET | {"groups_width": 8}
_BIT = _RESNET | {"num_groups": 4, "depths": [1, 1], "drop_path_rate": 0.0}
_NARROW = {"size": 96, "depth_multiplier": 0.125, "classifier_dropout_prob": 0.0}
_EFFICIENT = {
    "size": 64, "width_coefficient": 0.2, "depth_coefficient": 0.2, "hidden_dim": 256,
    "dropout_rate": 0.0, "drop_connect_rate": 0.0,
}  # fmt: skip
_LEVIT = {
    "size": 128, "image_size": 128, "hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 4, 6],
    "depths": [1, 1, 1], "key_dim": [8, 8, 8], "drop_path_rate": 0,
}  # fmt: skip
_MOBILEVIT = {
    "size": 64, "image_size": 64, "patch_size": 2, "hidden_sizes": [16, 24, 32],
    "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 48], "num_attention_heads": 2,
}  # fmt: skip
_SEGFORMER = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
    "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16, "classifier_dropout_prob": 0.0, "drop_path_rate": 0.0,
}  # fmt: skip
_WHISPER = {
    "vocab_size": 67, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 12,
    "max_target_positions": 16, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
_AST = VISION | {
    "shape": (24, 16),
    "num_mel_bins": 16,
    "max_length": 24,
    "frequency_stride": 8,
    "time_stride": 8,
}
_PVT = {
    "image_size": SIZE,
    "num_encoder_blocks": 2, "depths": [1, 1], "sequence_reduction_ratios": [2, 1],
    "hidden_sizes": [16, 32], "patch_sizes": [4, 2], "strides": [4, 2],
    "num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "drop_path_rate": 0.0,
}  # fmt: skip
_PATCHTST = {
    "num_input_channels": 2, "context_length": 16, "prediction_length": 4, "patch_length": 4,
    "patch_stride": 4, "d_model": 16, "num_attention_heads": 2, "num_hidden_layers": 2,
    "ffn_dim": 24, "norm_type": "layernorm", "scaling": "std",
}  # fmt: skip
#: name, function above, model, configuration, options.
_ROWS: tuple[tuple[str, Any, str, str, dict[str, Any]], ...] = (
    ("vit", image, "ViTForImageClassification", "ViTConfig", VISION),
    ("deit", image, "DeiTForImageClassification", "DeiTConfig", VISION),
    ("beit", image, "BeitForImageClassification", "BeitConfig", VISION),
    ("dinov2", image, "Dinov2ForImageClassification", "Dinov2Config", VISION),
    ("vit_mae", masked_image, "ViTMAEForPreTraining", "ViTMAEConfig", _MAE),
    ("swin", image, "SwinForImageClassification", "SwinConfig", _SWIN),
    ("swinv2", image, "Swinv2ForImageClassification", "Swinv2Config", _SWIN),
    ("convnext", image, "ConvNextForImageClassification", "ConvNextConfig", _STAGES),
    ("convnextv2", image, "ConvNextV2ForImageClassification", "ConvNextV2Config", _STAGES),
    ("resnet", image, "ResNetForImageClassification", "ResNetConfig", _RESNET),
    ("resnet_basic", image, "ResNetForImageClassification", "ResNetConfig", _BASIC),
    ("regnet", image, "RegNetForImageClassification", "RegNetConfig", _REGNET),
    ("bit", image, "BitForImageClassification", "BitConfig", _BIT),
    ("mobilenet_v1", image, "MobileNetV1ForImageClassification", "MobileNetV1Config", _NARROW),
    ("mobilenet_v2", image, "MobileNetV2ForImageClassification", "MobileNetV2Config", _NARROW),
    ("efficientnet", image, "EfficientNetForImageClassification", "EfficientNetConfig", _EFFICIENT),
    ("segformer", image, "SegformerForImageClassification", "SegformerConfig", _SEGFORMER),
    ("segmentation", pixels, "SegformerForSemanticSegmentation", "SegformerConfig", _SEGFORMER),
    ("poolformer", image, "PoolFormerForImageClassification", "PoolFormerConfig", _SEGFORMER),
    ("pvt", image, "PvtForImageClassification", "PvtConfig", _PVT),
    ("levit", image, "LevitForImageClassification", "LevitConfig", _LEVIT),
    ("mobilevit", image, "MobileViTForImageClassification", "MobileViTConfig", _MOBILEVIT),
    ("clip_vision", backbone, "CLIPVisionModel", "CLIPVisionConfig", VISION),
    ("siglip_vision", backbone, "SiglipVisionModel", "SiglipVisionConfig", VISION),
    ("whisper", whisper, "WhisperForConditionalGeneration", "WhisperConfig", _WHISPER),
    ("wav2vec2", sound, "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", SOUND),
    ("hubert", sound, "HubertForSequenceClassification", "HubertConfig", SOUND),
    ("wavlm", sound, "WavLMForSequenceClassification", "WavLMConfig", SOUND),
    ("audio_spectrogram", sound, "ASTForAudioClassification", "ASTConfig", _AST),
    ("patch_tst", series, "PatchTSTForPrediction", "PatchTSTConfig", _PATCHTST),
)

#: name -> build, as in `Entry`.
MODELS: dict[str, Callable[[], Problem]] = {
    name: partial(function, model, config, **options)
    for name, function, model, config, options in _ROWS
}
