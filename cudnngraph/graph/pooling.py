"""Pooling and interpolation, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence

from .shape import ShapeMethods
from .value import Ints, Value


class PoolingMethods(ShapeMethods):
    """Pooling and interpolation."""

    def max_pool(
        self,
        x: Value,
        kernel_size: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        dilation: Ints = 1,
        ceil_mode: bool = False,
        *,
        name: str | None = None,
    ) -> Value:
        """The largest element of each window (F.max_pool2d), in 1, 2 or 3 spatial dims.

        x (N, C, spatial...) → (N, C, out...), channels_last where x is. ``stride`` defaults to the
        kernel's size; ``ceil_mode`` rounds the number of windows up. A window that holds nothing
        but padding, as a dilation may make one, is a mistake.
        """
        return self._one(
            "max_pool",
            x,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            ceil_mode=ceil_mode,
            name=name,
        )

    def max_pool_backward(
        self,
        dy: Value,
        x: Value,
        kernel_size: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        dilation: Ints = 1,
        ceil_mode: bool = False,
        *,
        name: str | None = None,
    ) -> Value:
        """Gradient of :meth:`max_pool` from its result's dy; x is pooled again."""
        return self._one(
            "max_pool_backward",
            dy,
            x,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            ceil_mode=ceil_mode,
            name=name,
        )

    def avg_pool(
        self,
        x: Value,
        kernel_size: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        *,
        name: str | None = None,
    ) -> Value:
        """The mean of each window (F.avg_pool2d), in 1, 2 or 3 spatial dims.

        As :meth:`max_pool`; ``count_include_pad`` counts the zeros of the padding.
        """
        return self._one(
            "avg_pool",
            x,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            ceil_mode=ceil_mode,
            count_include_pad=count_include_pad,
            name=name,
        )

    def avg_pool_backward(
        self,
        dy: Value,
        kernel_size: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        *,
        input_size: Ints,
        name: str | None = None,
    ) -> Value:
        """Gradient of :meth:`avg_pool` from dy; ``input_size`` are x's spatial sizes."""
        return self._one(
            "avg_pool_backward",
            dy,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            ceil_mode=ceil_mode,
            count_include_pad=count_include_pad,
            input_size=input_size,
            name=name,
        )

    def adaptive_avg_pool(
        self, x: Value, output_size: int | Sequence[int | None], *, name: str | None = None
    ) -> Value:
        """The mean of each of ``output_size`` windows (F.adaptive_avg_pool2d).

        x (N, C, spatial...) → (N, C, output_size); None in ``output_size`` leaves a dim as it is.
        Windows of one size, where the sizes divide, are an :meth:`avg_pool`, and one window over
        all is a :meth:`reduction`.
        """
        sizes = () if x.spec is None else x.spec.shape[2:]
        given = output_size if isinstance(output_size, (tuple, list)) else [output_size]
        want = list(given) * (len(sizes) if len(given) == 1 else 1)
        if len(want) == len(sizes) in (1, 2, 3) and all(
            isinstance(n, (int, type(None))) for n in want
        ):
            out = [n if k is None else k for n, k in zip(sizes, want, strict=True)]
            if all(k == 1 for k in out) and all(sizes):
                return self.reduction(x, list(range(2, 2 + len(sizes))), "mean", True, name=name)
            if all(k > 0 and n and n % k == 0 for n, k in zip(sizes, out, strict=True)):
                kernel = [n // k for n, k in zip(sizes, out, strict=True)]
                return self.avg_pool(x, kernel, name=name)
        return self._one("adaptive_avg_pool", x, output_size=output_size, name=name)

    def adaptive_avg_pool_backward(
        self,
        dy: Value,
        output_size: int | Sequence[int | None],
        *,
        input_size: Ints,
        name: str | None = None,
    ) -> Value:
        """Gradient of :meth:`adaptive_avg_pool` from dy; ``input_size`` are x's spatial sizes."""
        return self._one(
            "adaptive_avg_pool_backward",
            dy,
            output_size=output_size,
            input_size=input_size,
            name=name,
        )

    def adaptive_max_pool(
        self, x: Value, output_size: int | Sequence[int | None], *, name: str | None = None
    ) -> Value:
        """The largest element of each of ``output_size`` windows (F.adaptive_max_pool2d)."""
        return self._one("adaptive_max_pool", x, output_size=output_size, name=name)

    def adaptive_max_pool_backward(
        self,
        dy: Value,
        x: Value,
        output_size: int | Sequence[int | None],
        *,
        name: str | None = None,
    ) -> Value:
        """Gradient of :meth:`adaptive_max_pool` from its result's dy; x is pooled again."""
        return self._one("adaptive_max_pool_backward", dy, x, output_size=output_size, name=name)

    def interpolate(
        self,
        x: Value,
        size: Ints | None = None,
        scale_factor: float | Sequence[float] | None = None,
        mode: str = "nearest",
        align_corners: bool | None = False,
        *,
        name: str | None = None,
    ) -> Value:
        """x resized to ``size``, or by ``scale_factor`` (F.interpolate), in 1, 2 or 3 spatial dims.

        x (N, C, spatial...) → (N, C, out...), channels_last where x is. ``mode`` is "nearest",
        "nearest-exact", "linear" (one spatial dim), "bilinear" or "bicubic" (two), "trilinear".

        On a GPU large 16-bit results of "linear" and "bilinear" whose weights are exact in 16 bits
        are made by products of matrices: an infinity or NaN in x then makes NaN of its whole image
        in its channel. Elsewhere it reaches its neighbours, as in torch.
        """
        return self._one(
            "interpolate",
            x,
            size=size,
            scale_factor=scale_factor,
            mode=mode,
            align_corners=align_corners,
            name=name,
        )

    def interpolate_backward(
        self,
        dy: Value,
        size: Ints | None = None,
        scale_factor: float | Sequence[float] | None = None,
        mode: str = "nearest",
        align_corners: bool | None = False,
        *,
        input_size: Ints,
        name: str | None = None,
    ) -> Value:
        """Gradient of :meth:`interpolate` from dy; ``input_size`` are x's spatial sizes."""
        return self._one(
            "interpolate_backward",
            dy,
            size=size,
            scale_factor=scale_factor,
            mode=mode,
            align_corners=align_corners,
            input_size=input_size,
            name=name,
        )
