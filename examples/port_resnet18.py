# SPDX-License-Identifier: Apache-2.0
"""ResNet-18 with GroupNorm: torchvision's names and layout, carried to a Flax module and back.

With torchvision installed, `torchvision.models.resnet18(norm_layer=lambda c: GroupNorm(8, c))` has
the same parameters under the same names as `TorchResNet18` here (its `bn1` are then GroupNorms).
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen
from torch import nn

from dualdp import port

WIDTHS, STRIDES, BLOCKS, GROUPS, CLASSES = (64, 128, 256, 512), (1, 2, 2, 2), 2, 8, 10


# ---------------------------------------------------------------------- torch


class TorchBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, channels, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.GroupNorm(GROUPS, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.GroupNorm(GROUPS, width)
        self.downsample = None
        if stride != 1 or channels != width:
            shortcut = nn.Conv2d(channels, width, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.GroupNorm(GROUPS, width))

    def forward(self, x):
        """(n, c, h, w) -> (n, width, h / stride, w / stride)."""
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + (x if self.downsample is None else self.downsample(x))).relu()


class TorchResNet18(nn.Module):
    """He et al. 2016, with GroupNorm for BatchNorm, which mixes examples."""

    def __init__(self, widths=WIDTHS):
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 7, 2, padding=3, bias=False)
        self.bn1 = nn.GroupNorm(GROUPS, widths[0])
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        channels = (widths[0], *widths[:-1])
        for k, (c, width, stride) in enumerate(zip(channels, widths, STRIDES, strict=True), 1):
            blocks = [TorchBlock(c, width, stride)]
            blocks += [TorchBlock(width, width, 1) for _ in range(BLOCKS - 1)]
            setattr(self, f"layer{k}", nn.Sequential(*blocks))
        self.fc = nn.Linear(widths[-1], CLASSES)

    def forward(self, x):
        """(n, 3, h, w) -> (n, classes) logits."""
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


# ---------------------------------------------------------------------- Flax


def norm(name):
    """GroupNorm of one image, with torch's epsilon; by itself Flax takes axis 0 for a batch."""
    return linen.GroupNorm(GROUPS, epsilon=1e-5, reduction_axes=(-3, -2, -1), name=name)


def conv(width, kernel, stride, name):
    """A convolution with torch's padding; "SAME" pads otherwise where the stride is 2."""
    options = {"strides": stride, "padding": kernel // 2, "use_bias": False, "name": name}
    return linen.Conv(width, (kernel, kernel), **options)


class FlaxBlock(linen.Module):
    """Two 3x3 convolutions and a shortcut."""

    width: int
    stride: int

    @linen.compact
    def __call__(self, x):
        """(h, w, c) -> (h / stride, w / stride, width)."""
        y = jax.nn.relu(norm("bn1")(conv(self.width, 3, self.stride, "conv1")(x)))
        y = norm("bn2")(conv(self.width, 3, 1, "conv2")(y))
        if x.shape != y.shape:
            x = conv(self.width, 1, self.stride, "downsample_0")(x)
            x = norm("downsample_1")(x)
        return jax.nn.relu(y + x)


class FlaxResNet18(linen.Module):
    """The same in Flax, for one image: torch's `layer1.0` is `layer1_0` here."""

    widths: tuple = WIDTHS

    @linen.compact
    def __call__(self, x):
        """(h, w, 3) -> (classes,) logits."""
        x = jax.nn.relu(norm("bn1")(conv(self.widths[0], 7, 2, "conv1")(x)))
        x = linen.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for k, (width, stride) in enumerate(zip(self.widths, STRIDES, strict=True), 1):
            for block in range(BLOCKS):
                name = f"layer{k}_{block}"
                x = FlaxBlock(width, stride if block == 0 else 1, name=name)(x)
        return linen.Dense(CLASSES, name="fc")(x.mean((0, 1)))


def main():
    torch.manual_seed(0)
    model, net = TorchResNet18(), FlaxResNet18()
    images = np.random.default_rng(0).normal(size=(2, 3, 32, 32)).astype(np.float32)
    inputs = jnp.asarray(images.transpose(0, 2, 3, 1))
    like = jax.eval_shape(net.init, jax.random.key(0), inputs[0])
    like = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)

    params = port.to_jax(model, like=like)
    ours = jax.vmap(net.apply, (None, 0))(params, inputs)
    theirs = model(torch.as_tensor(images)).detach().numpy()
    back = port.to_torch(params, like=model)
    same = all(torch.equal(back[name], value) for name, value in model.state_dict().items())
    count = sum(p.numel() for p in model.parameters())
    print(f"{count:,} parameters, largest difference of the logits {abs(ours - theirs).max():.0e}")
    print(f"bitwise the same after the way back: {same}")


if __name__ == "__main__":
    main()
