"""Normalisations: of batches, images, groups of channels, and rows."""

from __future__ import annotations

from typing import Any

from ..errors import Problem
from ..ir.spec import numel
from .pointwise import PointwiseMethods
from .shape import ShapeMethods
from .value import Value


class NormMethods(ShapeMethods, PointwiseMethods):
    """Normalisations and their gradients."""

    # -- over a batch, an image or a group of channels -----------------------------------------

    def batch_norm(
        self,
        x: Value,
        running_mean: Value,
        running_var: Value,
        weight: Value | None = None,
        bias: Value | None = None,
        *,
        eps: float = 1e-5,
        name: str | None = None,
    ) -> Value:
        """Batch normalisation with given statistics (F.batch_norm with training=False).

        ``(x - mean) / sqrt(var + eps) * weight + bias`` along dim 1; parameters (C,) in x's dtype
        or float32.
        """
        return self._one(
            "batch_norm", x, running_mean, running_var, weight, bias, eps=eps, name=name
        )

    def batch_norm_apply(
        self,
        x: Value,
        mean: Value,
        inv_std: Value,
        weight: Value,
        bias: Value,
        *,
        name: str | None = None,
    ) -> Value:
        """``(x - mean) * inv_std * weight + bias`` along dim 1: what :meth:`batch_norm_train` does
        with the statistics it has found. Parameters (C,) in x's dtype or float32.
        """
        return self._one("batch_norm_apply", x, mean, inv_std, weight, bias, name=name)

    def batch_norm_train(
        self,
        x: Value,
        weight: Value,
        bias: Value,
        running_mean: Value | None = None,
        running_var: Value | None = None,
        *,
        eps: float = 1e-5,
        momentum: float = 0.1,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Batch normalisation with the batch's own statistics (F.batch_norm with training=True).

        x (N, C, ...), the rest (C,) in x's dtype or float32 → (y, mean, inv_std), mean and
        1 / sqrt(var + eps) of the batch, (C,) in float32, var biased. With the running statistics
        two more: ``(1 - momentum) * running + momentum * batch``, there with the unbiased variance.
        Gradients flow through y alone.
        """
        outputs = self._apply(
            "batch_norm_train",
            (x, weight, bias, running_mean, running_var),
            {"eps": eps, "momentum": momentum},
            name,
        )
        return tuple(outputs[:3] if running_mean is None and running_var is None else outputs)

    def batch_norm_backward(
        self,
        dy: Value,
        x: Value,
        weight: Value,
        mean: Value,
        inv_std: Value,
        *,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Gradients (dx, dweight, dbias) of :meth:`batch_norm_train` from its y's dy.

        dy has the shape and dtype of x; mean and inv_std are those that the forward returned.
        """
        return tuple(self._apply("batch_norm_backward", (dy, x, weight, mean, inv_std), {}, name))

    def instance_norm(
        self,
        x: Value,
        weight: Value | None = None,
        bias: Value | None = None,
        *,
        eps: float = 1e-5,
        return_stats: bool = False,
        name: str | None = None,
    ) -> Any:
        """Normalisation of each channel of each image (F.instance_norm without running statistics).

        ``(x - mean) / sqrt(var + eps) * weight + bias`` over the spatial dims of x (N, C, ...);
        weight and bias, both or neither, (C,) in x's dtype or float32. → y like x; with
        ``return_stats=True`` the three (y, mean, inv_std), the latter two float32, (N, C, 1, ...).
        """
        outputs = self._apply(
            "instance_norm", (x, weight, bias), {"eps": eps, "return_stats": return_stats}, name
        )
        return tuple(outputs) if return_stats is True else outputs[0]

    def instance_norm_backward(
        self,
        dy: Value,
        x: Value,
        mean: Value,
        inv_std: Value,
        weight: Value | None = None,
        *,
        name: str | None = None,
    ) -> Any:
        """Gradients (dx, dweight, dbias) of :meth:`instance_norm` from its y's dy.

        dy has the shape and dtype of x; mean and inv_std are those that the forward returned.
        Without a weight dx alone.
        """
        outputs = self._apply("instance_norm_backward", (dy, x, mean, inv_std, weight), {}, name)
        return outputs[0] if weight is None else tuple(outputs)

    def group_affine(
        self,
        x: Value,
        num_groups: int,
        weight: Value | None = None,
        *,
        eps: float = 1e-5,
        name: str | None = None,
    ) -> Any:
        """Shift and factor of a group norm ``(x + shift) * factor``, by channel and image.

        x (N, C, ...), weight (C,) in x's dtype or float32 → shift and factor (N, C, 1, ...) in
        float32, or float64 of such an x: ``-mean`` of the channel's group, and ``weight / sqrt(var
        + eps)``. For inference: it has no gradient.
        """
        attrs = {"num_groups": num_groups, "eps": eps}
        return tuple(self._apply("group_affine", (x, weight), attrs, name))

    def group_norm(
        self,
        x: Value,
        num_groups: int,
        weight: Value | None = None,
        bias: Value | None = None,
        *,
        eps: float = 1e-5,
    ) -> Value:
        """F.group_norm: each group of channels of each image, then * weight + bias per channel.

        x (N, C, ...), weight and bias (C,) in x's dtype or float32. An :meth:`instance_norm` over
        groups in the place of channels, x seen as (N, num_groups, ...): a channels_last x is copied
        for it, and y is contiguous. For inference :meth:`group_affine` copies nothing.
        """
        spec = x.spec
        if spec is None or len(spec.shape) < 2 or num_groups < 1 or spec.shape[1] % num_groups:
            if spec is not None:
                what = f"x '{spec.name}' has shape {spec.shape}, num_groups={num_groups!r}"
                self.problems.append(
                    Problem("group_norm", what, "(N, C, ...) with C % num_groups == 0")
                )
            return self._unknown(*(v for v in (x, weight, bias) if v is not None))
        n, c = spec.shape[:2]
        if num_groups == c and (weight is None) == (bias is None) and spec.shape[2:]:
            return self.instance_norm(x, weight, bias, eps=eps)  # type: ignore[no-any-return]
        width = numel(spec.shape[1:]) // num_groups
        y = self.instance_norm(self.reshape(x, (n, num_groups, width)), eps=eps)
        y = self.reshape(y, spec.shape)
        # cuDNN gets a vector wrong that broadcasts over images and elements, so it is repeated for
        # each image: a column beside the matrix that a contiguous image is.
        shape = (n, c, *(1,) * (len(spec.shape) - 2))
        for apply, vector in ((self.scale, weight), (self.bias, bias)):
            if vector is not None:
                each = self.expand(vector, (n, c), (1,))
                y = apply(y, self.reshape(each, shape))
        return y

    # -- normalisation over trailing dims ------------------------------------------------------

    def layer_norm(
        self,
        x: Value,
        weight: Value,
        bias: Value | None = None,
        *,
        eps: float = 1e-5,
        return_stats: bool = False,
        name: str | None = None,
    ) -> Any:
        """Layer normalisation over the dims of the weight (F.layer_norm), the last ones of x.

        ``(x - mean) / sqrt(var + eps) * weight + bias``; weight and bias have the shape of those
        dims, and x's dtype or float32. → y like x; with ``return_stats=True`` the three
        (y, mean, inv_std), the latter two float32, x's shape with 1 for every normalised dim.
        """
        outputs = self._apply(
            "layer_norm", (x, weight, bias), {"eps": eps, "return_stats": return_stats}, name
        )
        return tuple(outputs) if return_stats is True else outputs[0]

    def rms_norm(
        self,
        x: Value,
        weight: Value,
        bias: Value | None = None,
        *,
        eps: float = 1e-5,
        return_stats: bool = False,
        name: str | None = None,
    ) -> Any:
        """Root-mean-square normalisation over the dims of the weight (F.rms_norm), x's last ones.

        ``x / sqrt(mean(x * x) + eps) * weight + bias``; weight and bias have the shape of those
        dims, and x's dtype or float32. → y like x; with ``return_stats=True`` the pair
        (y, inv_std), inv_std float32, x's shape with 1 for every normalised dim.
        """
        outputs = self._apply(
            "rms_norm", (x, weight, bias), {"eps": eps, "return_stats": return_stats}, name
        )
        return tuple(outputs) if return_stats is True else outputs[0]

    def normalize(self, x: Value, *, eps: float = 1e-12, name: str | None = None) -> Value:
        """x (..., D) by the Euclidean norm of each row (F.normalize over the last dim).

        ``x / max(sqrt(sum(x * x)), eps)`` → y like x. The sums are taken in float32, so rows of
        zeros stay zeros in float16 too, where torch's eps is 0.
        """
        return self._one("normalize", x, eps=eps, name=name)

    def layer_norm_backward(
        self,
        dy: Value,
        x: Value,
        weight: Value,
        mean: Value,
        inv_std: Value,
        *,
        bias_grad: bool = True,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Gradients (dx, dweight, dbias) of :meth:`layer_norm` from its y's dy.

        dy has the shape and dtype of x; mean and inv_std are those that the forward returned.
        ``bias_grad=False`` leaves the last one out.
        """
        outputs = self._apply(
            "layer_norm_backward", (dy, x, weight, mean, inv_std), {"bias_grad": bias_grad}, name
        )
        return tuple(outputs if bias_grad is True else outputs[:2])

    def rms_norm_backward(
        self,
        dy: Value,
        x: Value,
        weight: Value,
        inv_std: Value,
        *,
        bias_grad: bool = True,
        name: str | None = None,
    ) -> tuple[Value, ...]:
        """Gradients (dx, dweight, dbias) of :meth:`rms_norm` from its y's dy.

        dy has the shape and dtype of x; inv_std is the one that the forward returned.
        ``bias_grad=False`` leaves the last one out.
        """
        outputs = self._apply(
            "rms_norm_backward", (dy, x, weight, inv_std), {"bias_grad": bias_grad}, name
        )
        return tuple(outputs if bias_grad is True else outputs[:2])
