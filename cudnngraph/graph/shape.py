"""Methods that change the shape: reductions, views, concatenation, pixel shuffles."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import Problem
from ..ir.spec import is_channels_last, is_contiguous
from .core import Core
from .value import Ints, Value


class ShapeMethods(Core):
    """Reductions, views and concatenation."""

    def reduction(
        self,
        x: Value,
        dims: Ints | None = None,
        mode: str = "sum",
        keepdim: bool | Sequence[int] = False,
        *,
        name: str | None = None,
    ) -> Value:
        """The sum, mean, max or min of x, or the max of |x| (amax), over ``dims`` (None for all).

        Reduced dims are dropped, or stay with size 1: all with ``keepdim=True``, or those that
        ``keepdim`` lists.
        """
        return self._one("reduction", x, dims=dims, mode=mode, keepdim=keepdim, name=name)

    def expand(
        self,
        x: Value,
        shape: Sequence[int],
        dims: Sequence[int] | None = None,
        *,
        name: str | None = None,
    ) -> Value:
        """x repeated to ``shape``; dim i of x becomes dim ``dims[i]``, its size that or 1.

        ``dims`` ascends and defaults to the last ones, as torch's expand. ``(C,)`` with
        ``dims=(1,)`` is set along the channels.
        """
        return self._one("expand", x, shape=shape, dims=dims, name=name)

    def reshape(self, x: Value, shape: Sequence[int], *, name: str | None = None) -> Value:
        """The elements of x, in logical order, in another shape; one size may be -1.

        The result lies in memory as torch's does: as x, where strides can say it, else contiguous.
        """
        return self._one("reshape", x, shape=shape, name=name)

    def transpose(self, x: Value, dim0: int, dim1: int, *, name: str | None = None) -> Value:
        """x with two of its dims exchanged. No element moves: the order of the strides changes."""
        return self._one("transpose", x, dim0=dim0, dim1=dim1, name=name)

    def permute(self, x: Value, dims: Sequence[int], *, name: str | None = None) -> Value:
        """x with its dims in the order ``dims``. No element moves: the order of strides changes."""
        return self._one("permute", x, dims=dims, name=name)

    def slice(
        self,
        x: Value,
        dim: int,
        start: int = 0,
        stop: int | None = None,
        step: int = 1,
        *,
        name: str | None = None,
    ) -> Value:
        """Elements start, start + step, … before stop along one dim of x, as Python slices do."""
        return self._one("slice", x, dim=dim, start=start, stop=stop, step=step, name=name)

    def concat(self, x: Sequence[Value], dim: int = 0, *, name: str | None = None) -> Value:
        """The tensors of the list x, of one dtype, one behind the other along ``dim`` (torch.cat).

        The result lies in memory as they do where all lie alike (channels_last, say), else
        contiguous.
        """
        if not x:
            label = name or "concat"
            self.problems.append(
                Problem(f"concat '{label}'", f"x is {x!r}", "a list of one value or more")
            )
            return self._unknown()
        return self._one("concat", *x, dim=dim, name=name)

    def _shuffled(self, op: str, x: Value, factor: int, down: bool) -> Value:
        """Blocks of ``factor`` x ``factor`` pixels between channels and space, by views of x."""
        spec = x.spec
        if spec is None or factor < 1 or len(spec.shape) != 4:
            if spec is not None:
                what = f"x '{spec.name}' {spec.shape} by factor {factor!r}"
                self.problems.append(Problem(op, what, "(N, C, H, W) and a factor >= 1"))
            return self._unknown(x)
        n, c, h, w = spec.shape
        if (h % factor or w % factor) if down else c % factor**2:
            what = f"x '{spec.name}' has shape {spec.shape}"
            expected = f"H and W % {factor} == 0" if down else f"C % {factor**2} == 0"
            self.problems.append(Problem(op, what, expected))
            return self._unknown(x)
        last = is_channels_last(spec.shape, spec.stride) and not is_contiguous(
            spec.shape, spec.stride
        )
        if down:
            h, w = h // factor, w // factor
            split, c = (n, c, h, factor, w, factor), c * factor**2
            channels: Sequence[int] = (1, 3, 5)
            space: Sequence[int] = (2, 4)
        else:
            c //= factor**2
            split = (n, c, factor, factor, h, w)
            h, w = h * factor, w * factor
            channels, space = (1,), (4, 2, 5, 3)
        y = self.reshape(x, split)
        if last:  # the copy is made channels last too
            y = self.reshape(self.permute(y, (0, *space, *channels)), (n, h, w, c))
            return self.permute(y, (0, 3, 1, 2))
        return self.reshape(self.permute(y, (0, *channels, *space)), (n, c, h, w))

    def pixel_shuffle(self, x: Value, upscale_factor: int) -> Value:
        """x (N, C r², H, W) → (N, C, H r, W r) with r = ``upscale_factor`` (F.pixel_shuffle)."""
        return self._shuffled("pixel_shuffle", x, upscale_factor, down=False)

    def pixel_unshuffle(self, x: Value, downscale_factor: int) -> Value:
        """x (N, C, H r, W r) → (N, C r², H, W) with r = ``downscale_factor``, undoing the other."""
        return self._shuffled("pixel_unshuffle", x, downscale_factor, down=True)
