"""Rewrites of a graph before it is cut into steps.

- GELU and SiLU that are written out become these ops.
- Boolean attention masks become additive ones, since cuDNN has no others; their rows are aligned.
- Attention that no engine of cuDNN's reads as it lies is copied to rows, or becomes two matmuls.
- 16-bit sums become float32 sums and a cast.
- Reshapes, transposes and slices become views if memory allows, and move behind the epilogues of
  matmuls.
- Results of pointwise ops lie as most of what these read; in rows or batches, if matmuls and norms
  read them so.
- Gradients of resizing by much go through one dim after the other.
- Channels that convolutions read of an image are copied to one of their own.
- Operands of a concatenation are written in place, and joined before views that show them.
"""

from __future__ import annotations

from ..device.rules import Values, following
from ..ir.spec import GraphSpec
from ..policy import Policy
from .annotate import annotate
from .attention import attention_with_engines
from .concat import concat_before_views, concat_in_place
from .conv_slices import dense_slices
from .known_functions import name_functions
from .masks import align_masks, bool_masks_to_additive
from .packed import insert_ragged_offsets, match_gradient_strides
from .pointwise_layout import lay_pointwise
from .reductions import float32_reductions
from .resizing import resize_dim_by_dim
from .row_layout import propagate_row_layout
from .row_strides import lay_batches, lay_rows
from .views import alias_views, sink_views


def legalize(spec: GraphSpec, policy: Policy, instead: Values = ()) -> GraphSpec:
    """The graph that plans are chosen for and that records name steps of.

    It is the graph with its marks, and ready to be cut unless the policy allows one plan alone.
    ``instead`` has the rewrites follow other thresholds than those of the GPU.
    """
    annotated = annotate(spec, policy.deterministic)
    if policy.fallback == "error":
        return annotated
    with following(instead):
        return prepared(annotated)


def prepared(spec: GraphSpec) -> GraphSpec:
    """The graph that is cut: functions by their names, numeric and aligned masks, attention in rows
    or as products, float32 sums, views and slices for what needs no copy, views behind what a
    product's plan may do, results of pointwise ops as their operands lie, gradients of resizing dim
    by dim, and the strides and the offsets of packed sequences.
    """
    named = name_functions(spec)
    seen = alias_views(float32_reductions(bool_masks_to_additive(named)))
    seen = lay_rows(align_masks(attention_with_engines(seen)))
    seen = lay_pointwise(resize_dim_by_dim(concat_before_views(seen)))
    made = concat_in_place(lay_batches(sink_views(propagate_row_layout(dense_slices(seen)))))
    return insert_ragged_offsets(match_gradient_strides(made))
