"""Limits of the search by measurement: what is tried, how often it is timed, and what is a tie."""

from __future__ import annotations

TIE_RATIO = 1.02  # within this factor the smaller workspace wins
FASTEST_RATE = 1.25  # times the rates that torch reaches: none of a plan is higher
LEFT_SHARE = 0.01  # of a graph's time: a search ends when no more than this can be gained
UNCOMPARED_SHARE = 0.005  # of it that close ways which are not measured again may differ by
MAX_EXPECTED_SPEEDUP = 2.0  # how much faster than its first plan a part's best plan may be
PATIENCE = 5  # plans in a row that are no gain, after which the rest of a list is left alone
PRUNED_OVER = 1.35  # times the least that tiles are predicted to take: not built behind others
MIN_GAIN = 0.98
CLOSE_RATIO = 1.12  # ways to cut the graph within this factor are measured whole
FINALIST_RATIO = 1.08  # ways within this factor of a part's best are measured again, longer
FINAL_VARIANTS = 5
QUICK_ROUNDS, FINAL_ROUNDS = 5, 21
TRIALS_KEPT = 8  # steps whose random data stay on the GPU
MEMORY_PLACEMENTS = 4  # in memory, at which short kernels are compared,
PLACED_ROUNDS = 7  # so often at each
SPACER_BYTES = 11 << 20
IN_CONTEXT_VARIANTS = 3  # plans of a step that are timed with the whole graph around them,
IN_CONTEXT_RATIO = 1.12  # those within this factor of the one that is fastest alone,
IN_CONTEXT_AT_ONCE = 6  # of several steps beside those that were taken,
IN_CONTEXT_SHARE = 0.01  # of a step that takes this share of the graph's time,
IN_CONTEXT_LARGE_SHARE = 0.1  # (with a plan for this share of it, graphs load the GPU differently)
IN_CONTEXT_BUDGETS = 4.0  # within this many budgets of an anchor,
IN_CONTEXT_LEFT = 0.5  # and this share of what is left of the time for the whole;
IN_CONTEXT_GAIN = 0.997  # a plan has to bring the graph's time below this
ALIKE_ROUNDS, ALIKE = 11, 1.003  # of graphs that differ in one step; out at this factor
AT_ONCE = 8  # plans that are timed in one turn at the GPU, while no worker checks any
BUILT_AHEAD = 6  # plans of a step that is searched alone, built before they are asked for,
BUILT_TOGETHER = 2  # so many of them by one worker, which knows the step then
REGIONS_AHEAD = 24  # regions of most worth, whose next plans are built before they are asked for
KERNELS_OF = 4  # steps of which all schedules of the generated kernel are tried at once
SEARCHED_SHARE = 0.85  # of the time for the whole: then what was chosen is built, and timed whole
EXPLORED_SHARE = 0.6  # of the time for the whole: the rest is to compare what is close
BEGUN_SHARE = 0.75  # of it, after which no other form of a graph or model is searched
