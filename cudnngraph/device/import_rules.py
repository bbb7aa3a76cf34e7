"""Thresholds of the import of models, of those in :mod:`~cudnngraph.device.rules`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

BY_HAND = ""  # in place of a page: measured by hand; no page has the numbers
#: Who asks a threshold that a search measures: import, rewrites, cuts, cuDNN's or torch's steps.
Stage = Literal["import", "graph", "cut", "cudnn", "torch", ""]
NO, ANY = 0, 1 << 62  # values of a threshold that no size, and that every size, is under


def measured(
    value: Any,
    unit: str,
    decides: str,
    *,
    page: str = BY_HAND,
    alternative: str = "",
    stage: Stage = "",
    others: tuple[Any, ...] = (),
) -> Any:
    """A field with where it comes from, and the ``others`` that a search tries for it."""
    told = {"unit": unit, "decides": decides, "page": page, "alternative": alternative}
    return field(default=value, metadata={**told, "stage": stage, "others": others})


@dataclass(frozen=True)
class ImportRules:
    """Those that an import asks; the metadata of each field say what it is."""

    attention_block_rows: int = measured(
        128,
        "query rows",
        "how many rows short sequences, joined into one, may have together",
        page="h200-models.md",
        alternative="short sequences apart",
        stage="import",
        others=(NO,),
    )
    sibling_max_multiplications: int = measured(
        1 << 32,
        "multiplications of a product",
        "how large products of one tensor are that become one (of 2.4 x 10^9: 0.65 of the time)",
        page="h200-search.md",
        alternative="each product by itself",
        stage="import",
        others=(NO, ANY),
    )
    group_norm_min_elements_channels_last: int = measured(
        1 << 19,
        "elements of an image batch",
        "from where on a group norm of channels-last images is a scale and a shift",
        page="h200-residual.md",
        alternative="torch's group norm",
        stage="import",
        others=(NO, ANY),
    )
    group_norm_min_elements_contiguous: int = measured(
        1 << 22,
        "elements of an image batch",
        "from where on a group norm of contiguous images is a scale and a shift",
        page="h200-residual.md",
        alternative="torch's group norm",
        stage="import",
        others=(NO, ANY),
    )
    average_by_convolution: tuple[tuple[int, ...], ...] = measured(
        ((3, 3),),
        "window sizes",
        "which average pools of 16-bit images run as depthwise convolutions",
        page="h200-rows.md",
        alternative="torch's pooling",
        stage="import",
        others=((),),
    )
    pads_three_channels: bool = measured(
        True,
        "yes or no",
        "whether 16-bit images of three channels get a fourth, all zero",
        page="h200-models.md",
        alternative="three channels",
        stage="import",
        others=(False, True),
    )
    pixels_as_channels_min_window: int = measured(
        5,
        "rows and columns of a window",
        "from how many on a bfloat16 convolution of at most four channels that moves two pixels or "
        "more reads these as channels (ResNet-50's first: 171 us in place of 443)",
        page="h200-stems.md",
        alternative="the convolution as it is",
        stage="import",
        others=(2, ANY),
    )
    odd_results_min_pixels: int = measured(
        1 << 16,
        "pixels of a batch",
        "from how many on a 16-bit convolution makes results of a multiple of 8 channels in "
        "training (a head of 21 classes: 39 us for its three steps in place of 118)",
        page="h200-stems.md",
        alternative="the results as they are",
        stage="import",
        others=(ANY,),
    )
    windows_as_products: bool = measured(
        True,
        "yes or no",
        "whether transposed convolutions whose windows lie side by side are products, gradients of "
        "images among them: a U-Net's four take 223 us, where the bytes of products take 45 (an "
        "estimate)",
        page="h200-steps.md",
        alternative="the transposed convolution",
        stage="import",
        others=(False, True),
    )
    padded_channels_min: int = measured(
        11,
        "channels",
        "how many 16-bit images between convolutions have at least, to become a multiple of 8",
        page="h100-notes.md",
        alternative="the channels as they are",
        stage="import",
        others=(2, ANY),
    )
    padded_product_min: int = measured(
        1 << 30,
        "multiplications of a product",
        "from how many on 16-bit products of odd rows get rows of a multiple of 8 (an estimate)",
        alternative="the rows as they are",
        stage="import",
        others=(NO, ANY),
    )
    patches_as_channels: bool = measured(
        True,
        "yes or no",
        "whether convolutions of windows side by side read a window's columns as channels",
        page="h200-models.md",
        alternative="the convolution as it is",
        stage="import",
        others=(False, True),
    )
    grouped_as_dense_max_channels: int = measured(
        512,
        "channels",
        "how many a dense convolution may have that takes the place of several groups, where cuDNN "
        "has no engine for groups of that width; 0 for none",
        page="h200-grouped.md",
        alternative="the groups as they are",
        stage="import",
        others=(0,),
    )
    narrow_groups: tuple[tuple[int, int, int], ...] = measured(
        ((7, 16, 0), (8, 32, 0), (16, 32, 4)),
        "channels of a group at most, channels, groups",
        "how wide narrow groups are made in training, but where their number is a multiple of the "
        "last; none for as they are",
        page="h200-group-widths.md",
        alternative="the groups as they are",
        stage="import",
        others=((),),
    )
    long_window_min: int = measured(
        33,
        "steps of a window",
        "from how long on a convolution of sequences is a product of blocks of steps: cuDNN's "
        "engines (9.19) with tensor cores that fuse end at 32 (listed, not timed)",
        alternative="the convolution as it is",
        stage="import",
        others=(ANY,),
    )
    sum_as_matmul_min_side: int = measured(
        8,
        "rows, columns or terms",
        "from how many of each on a sum of a product that is written out is a matmul (an estimate)",
        alternative="the product and its sum",
        stage="import",
        others=(ANY,),
    )
