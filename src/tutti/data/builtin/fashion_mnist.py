"""Fashion-MNIST."""

from __future__ import annotations

from tutti.data.contents import Contents
from tutti.data.downloads import Published
from tutti.registry import part

CLOTHES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip

PUBLISHED = Published(
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
    labels=CLOTHES,
)


@part("fashion-mnist")
def fashion_mnist() -> Contents[object]:
    """70,000 pictures of clothes of 28 x 28 pixels; 10,000 of them are for the test."""
    return PUBLISHED.contents()
