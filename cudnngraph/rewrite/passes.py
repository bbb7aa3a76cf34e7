"""Rewrites of a graph before it is cut into steps.

A boolean mask of attention becomes an additive one, since cuDNN has no other, and the rows of masks
are aligned; a 16-bit sum becomes a float32 one that is rounded; a reshape, transpose or slice of
what lies in memory becomes a view, another way to address it that costs nothing, and stands behind
what a product's plan can do besides; what is joined is written in its place.
"""

from __future__ import annotations

from ..ir.spec import GraphSpec
from ..policy import Policy
from .annotate import marked
from .concat import slices
from .masks import aligned_masks, numeric_masks
from .packed import gradients_laid_alike, offsets_of_sequences
from .reductions import wide_sums
from .row_layout import in_memory_order
from .views import views, views_behind


def legalize(spec: GraphSpec, policy: Policy) -> GraphSpec:
    """The graph that plans are chosen for and that records name steps of.

    It is the graph with its marks, and ready to be cut unless the policy allows one plan alone.
    """
    annotated = marked(spec, policy.deterministic)
    return annotated if policy.fallback == "error" else prepared(annotated)


def prepared(spec: GraphSpec) -> GraphSpec:
    """The graph that is cut: numeric and aligned masks, float32 sums, views and slices for what
    needs no copy, views behind what a product's plan may do, and the strides and the offsets of
    packed sequences.
    """
    seen = aligned_masks(views(wide_sums(numeric_masks(spec))))
    made = slices(views_behind(in_memory_order(seen)))
    return offsets_of_sequences(gradients_laid_alike(made))
