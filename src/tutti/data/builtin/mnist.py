"""MNIST and Fashion-MNIST.

Sources: LeCun, Bottou, Bengio, Haffner (1998), "Gradient-based learning applied to document recognition";
Xiao, Rasul, Vollgraf (2017), "Fashion-MNIST: a novel image dataset for benchmarking machine learning
algorithms".
"""

from __future__ import annotations

from tutti.data.contents import Contents
from tutti.data.downloads import Published
from tutti.registry import part

MNIST = Published(
    name="mnist",
    servers=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    sha256=(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    labels=tuple(str(digit) for digit in range(10)),
)

FASHION_MNIST = Published(
    name="fashion-mnist",
    servers=(
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        "https://fashion-mnist.s3.eu-central-1.amazonaws.com/",
    ),
    sha256=(
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    labels=(
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
        "Ankle boot",
    ),
)  # fmt: skip


@part("mnist")
def mnist() -> Contents[object]:
    """70,000 handwritten digits of 28 x 28 pixels; 10,000 of them are for the test."""
    return MNIST.contents()


@part("fashion-mnist")
def fashion_mnist() -> Contents[object]:
    """70,000 pictures of clothes of 28 x 28 pixels; 10,000 of them are for the test."""
    return FASHION_MNIST.contents()
