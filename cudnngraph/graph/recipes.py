"""Recipes made of other ops: dropout, image normalisation, one step of AdamW."""

from __future__ import annotations

from ..errors import Problem
from .pointwise import PointwiseMethods
from .shape import ShapeMethods
from .value import Value


class RecipeMethods(ShapeMethods, PointwiseMethods):
    """Compositions for training and for input data."""

    def dropout(self, x: Value, keep: Value, p: float) -> Value:
        """x / (1 - p) where ``keep`` (bool, that of x's shape) holds, else 0.

        ``keep`` is drawn outside, true with probability 1 - p, so that the graph has no state.
        """
        if not 0 <= p < 1:
            self.problems.append(Problem("dropout", f"p={p!r}", "0 <= p < 1"))
            return self._unknown(x)
        return self.where(keep, self.mul(x, 1.0 / (1.0 - p)), 0.0)

    def normalize_images(self, x: Value, scale: Value, shift: Value) -> Value:
        """Pixels x (N, H, W, C) uint8 → x * scale + shift, (N, C, H, W) in the same memory order.

        scale and shift (W, C) float32: the numbers of each channel, repeated for each column, for
        cuDNN is slow on rows of three elements. For ``(x / 255 - mean) / std`` they are
        ``1 / (255 * std)`` and ``-mean / std``. float32; an output in float16 is one pass too.
        """
        spec = x.spec
        if spec is not None and len(spec.shape) != 4:
            what = f"x '{spec.name}' has shape {spec.shape}"
            self.problems.append(Problem("normalize_images", what, "(N, H, W, C)"))
            return self._unknown(scale, shift)
        images = self.to_float(self.permute(x, (0, 3, 1, 2)))
        rows = [
            self.permute(self.reshape(v, (1, 1, *v.spec.shape[-2:])), (0, 3, 1, 2))
            if v.spec is not None and len(v.spec.shape) == 2
            else v
            for v in (scale, shift)
        ]
        return self.add(self.mul(images, rows[0]), rows[1])

    def adamw(
        self,
        param: Value,
        grad: Value,
        exp_avg: Value,
        exp_avg_sq: Value,
        lr: Value,
        bias_correction1: Value,
        bias_correction2: Value,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> tuple[Value, Value, Value]:
        """One step of torch.optim.AdamW → the next (param, exp_avg, exp_avg_sq).

        The first four are of one shape, float32; lr and the bias corrections ``1 - beta ** step``
        have one element each, so that they may change from step to step. All pointwise: outputs of
        the strides of the inputs may be written over them.
        """
        beta1, beta2 = betas
        # Single numbers come first, in ops of their own: a plan may compute them once.
        root = self.sqrt(bias_correction2)
        rate = self.div(self.mul(lr, root), bias_correction1)
        small = self.mul(root, eps)
        kept = self.sub(1.0, self.mul(lr, weight_decay))
        first = self.add(exp_avg, self.mul(self.sub(grad, exp_avg), 1.0 - beta1))
        second = self.add(self.mul(exp_avg_sq, beta2), self.mul(self.mul(grad, grad), 1.0 - beta2))
        step = self.div(self.mul(first, rate), self.add(self.sqrt(second), small))
        return self.sub(self.mul(param, kept), step), first, second
