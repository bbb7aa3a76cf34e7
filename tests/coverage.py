"""Records of what each sample graph runs as on an H200, and their table in docs/support.md.

``docs/coverage.json`` says it of every case that is not float64, and of its gradient: "plan" (one
of cuDNN's), "steps" (several plans), "both" (plans and torch steps) or "torch", without generated
kernels; under "left", which ops torch runs with them, and why. The tests that ask
the real cuDNN library write it, and hold it, case by case: where cuDNN takes more than the file
says, or less, one fails. :func:`table` counts the cases of each row of :data:`ROWS`; a case is in
the last row whose pattern finds its name.
"""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.gradients import differentiable
from tests.samples import BF16, F16, F64, Case, enumerate_cases

PATH = Path(__file__).parents[1] / "docs" / "coverage.json"
HOW_TO_WRITE = (
    "docs/coverage.json says otherwise; run: pytest tests/deviceless/test_lowering.py "
    "--write-coverage && python docs/generate.py"
)


def counted(case: Case) -> bool:
    """Whether the table counts a case: cuDNN has no float64."""
    return case.dtype != F64


def expected() -> dict[str, set[str]]:
    """The cases of which docs/coverage.json says what they, and what their gradients run as."""
    cases = [case for case in enumerate_cases() if counted(case)]
    return {
        "forward": {case.id for case in cases},
        "gradient": {case.id for case in cases if differentiable(case)},
    }


@lru_cache
def read() -> dict[str, Any]:
    """The file: the version of cuDNN that was asked, and by case what it runs as."""
    known: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return known


def write(
    planned: Iterable[tuple[str, str, str]],
    left: Iterable[tuple[str, str, Mapping[str, str]]],
    cudnn: int,
) -> None:
    """Put (case, "forward" or "gradient", what it runs as) into the file, and what is left to torch
    of it, and drop old cases."""
    made: dict[str, Any] = {"cudnn": cudnn, "forward": {}, "gradient": {}}
    torch: dict[str, dict[str, Any]] = {"forward": {}, "gradient": {}}
    if PATH.exists():
        made |= {of: dict(read()[of]) for of in ("forward", "gradient")}
        torch |= {of: dict(cases) for of, cases in read().get("left", {}).items()}
    for case, of, outcome in planned:
        made[of][case] = outcome
    for case, of, ops in left:
        torch[of][case] = dict(ops)
    for of, cases in expected().items():
        made[of] = {case: made[of][case] for case in sorted(cases & set(made[of]))}
        here = sorted(cases & set(torch[of]))
        torch[of] = {case: torch[of][case] for case in here if torch[of][case]}
    made["left"] = torch
    PATH.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


# -- rows -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A feature: the regular expression ``cases`` finds the names that :func:`place` gives them."""

    family: str
    what: str
    cases: str


ROWS = (
    Row("convolutions", "convolution + bias, activation, residual", "^conv_bias_act-"),
    Row("convolutions", "convolution + batch norm, activation, residual", "^conv_bn_act-"),
    Row("convolutions", "depthwise, with the same", "^conv_(bias|bn)_act-depthwise"),
    Row("convolutions", "depthwise-separable as one graph", "^conv_bias_act-separable"),
    Row("convolutions", "transposed convolution + bias, activation, residual", "^conv_transpose-"),
    Row("norms", "`layer_norm`, add in front, activation behind", "^(layer_norm-|view-norm_of)"),
    Row("norms", "`rms_norm`, the same", "^rms_norm-"),
    Row("norms", "`normalize`: rows by their norms", "^normalize-"),
    Row("norms", "`instance_norm`, the same", "^image_norm-instance"),
    Row("norms", "`group_norm`, by composition", "^image_norm-group"),
    Row("norms", "the same by `group_affine`, for inference", "^group_affine-"),
    Row("norms", "`batch_norm_train`, activation behind", "^batch_norm_train-"),
    Row("products", "`matmul`, `linear` + bias, activation, residual", "^(matmul|view-linear)"),
    Row("products", "`grouped_matmul`: experts", "^grouped_matmul-"),
    Row("products", "`mlp`: Linear → activation → Linear, SwiGLU, GeGLU", "^view-(mlp|swiglu)"),
    Row("attention", "full, causal, bottom-right; grouped heads", "^sdpa-"),
    Row("attention", "sliding window", "^sdpa-window"),
    Row("attention", "additive mask", r"^sdpa-(\w*mask_add|gqa_mask|s_192_mask)"),
    Row("attention", "boolean mask", "^sdpa-mask_bool"),
    Row("attention", "`block_mask`", "^sdpa-block_mask"),
    Row("attention", "ALiBi, its own slopes or given ones", "^sdpa-(alibi|slopes)"),
    Row("attention", "soft cap", "^sdpa-softcap"),
    Row("attention", "sink", "^sdpa-sink"),
    Row("attention", "dropout by seed and offset", "^sdpa-dropout_seed"),
    Row("attention", "dropout by a mask", r"^sdpa-\w*dropout(?!_seed)"),
    Row("attention", "lengths of padded sequences", r"^sdpa-\w*length"),
    Row("attention", "packed sequences, `sdpa_varlen`", "^(sdpa_varlen|ragged_offsets)-"),
    Row("attention", "pages of a cache, `sdpa_paged`: decode", "^sdpa_paged-decode"),
    Row("attention", "the same: prefill", "^sdpa_paged-prefill"),
    Row("attention", "rotary positions, `rope`", "^rope-"),
    Row("8 bits", "int8 convolution + scales, rounding", "^int8-conv-"),
    Row("8 bits", "int8 transposed convolution", "^int8-conv_transpose-"),
    Row("8 bits", "int8 product", "^int8-matmul-"),
    Row("8 bits", "FP8 convolution + scales, largest value", "^fp8-conv-"),
    Row("8 bits", "FP8 transposed convolution", "^fp8-conv_transpose-"),
    Row("8 bits", "FP8 product", "^fp8-matmul-"),
    Row("8 bits", "FP8 attention, `sdpa_fp8`", "^fp8-sdpa-"),
    Row("8 bits", "`quantize`, `dequantize`", r"^(int8|fp8)-(de)?(quantize|dynamic)"),
    Row("images", "max, average and adaptive pooling", r"^resample-(adaptive_)?(max|avg)_pool"),
    Row("images", "nearest, linear and cubic interpolation", "^resample-(interpolate|decoder)"),
    Row("images", "`pixel_shuffle`, `pixel_unshuffle`", "^resample-pixel"),
    Row("images", "convolution + pooling", "^resample-stem"),
    Row("images", "interpolation + concatenation", "^resample-decoder"),
    Row("images", "uint8 pixels to normalised images", "^pointwise-pixels"),
    Row("others", "`softmax`, `log_softmax`", "^softmax-"),
    Row("others", "`cross_entropy`, by composition", "^loss-"),
    Row("others", "reductions", "^reduction-"),
    Row("others", "dropout + add", "^pointwise-dropout_add"),
    Row("others", "AdamW update", "^pointwise-adamw"),
    Row("others", "pointwise graphs", "^pointwise-(?!pixels|dropout_add|adamw)"),
    Row(
        "others",
        "views and what moves elements, `concat`",
        r"^(view|concat)-(?!(linear|mlp|swiglu|norm_of))",
    ),
    Row("others", "ops of torch, `aten`", "^aten-"),
)

# Cases of the ops of gradients: the names by which they are put into rows, and whether they are
# gradients. Their marks are not counted: most compute the forward as well.
_GRADIENTS = (
    (r"grouped_wgrad", "grouped_matmul-", True),
    (r"wgrad_", "conv_bias_act-", True),
    (r"packed_attention_", "sdpa_varlen-", True),
    (r"attention_", "sdpa-", True),
    (r"(layer_norm|rms_norm)_", r"\1-", True),
    (r"instance_norm_", "image_norm-instance_", True),
    (r"norm_backward_", "batch_norm_train-", True),
    (r"norm_", "batch_norm_train-", False),
    (r"nll_loss_", "loss-", True),
    (r"((?:log_)?softmax)-", r"softmax-\1-", True),
    (r"((?:adaptive_)?(?:max|avg)_pool|interpolate)_backward", r"resample-\1", True),
    (r"(sum|mean|max|min)_", r"reduction-\1_", False),
    (r"(\w+)_backward", r"pointwise-\1", True),
    (r"expand_", "pointwise-expand_", False),
)


def place(id: str) -> tuple[str, bool]:
    """The name by which a case is put into a row, and whether it is one of a gradient's op."""
    for pattern, name, gradient in _GRADIENTS:
        placed, found = re.subn(f"^gradients-{pattern}", name, id)
        if found:
            return placed, gradient
    return id, False


def row_of(id: str) -> Row | None:
    """The last row that finds a case."""
    name, _ = place(id)
    return next((row for row in reversed(ROWS) if re.search(row.cases, name)), None)


# -- the table -------------------------------------------------------------------------------------

_NARROW = (F16, BF16)
_KINDS = ("plan", "steps", "both", "torch")


def _marks(outcomes: Iterable[str]) -> str:
    """Count the outcomes of cases, in words."""
    count = Counter(outcomes)
    return ", ".join(f"{kind} {count[kind]}" for kind in _KINDS if count[kind])


def _grids() -> Iterator[tuple[Sequence[Case], Sequence[Case]]]:
    """The cases that are run on the CPU, then those on a GPU: of graphs, and of gradients."""
    for names in (
        ("tests.cpu.test_samples", "tests.cpu.grad.test_grad"),
        ("tests.gpu.test_samples", "tests.gpu.test_gradients"),
    ):
        graphs, derived = (importlib.import_module(name).CASES for name in names)
        yield graphs, derived


def left_table() -> str:
    """How many graphs have torch steps, before and after, and one line for each reason why."""
    known = read()
    before = [kind for of in ("forward", "gradient") for kind in known[of].values()]
    after = [ops for of in ("forward", "gradient") for ops in known["left"][of].values()]
    count = sum(kind in ("both", "torch") for kind in before)
    reasons: dict[str, Counter[str]] = {}
    for ops in after:
        for op, why in ops.items():
            reasons.setdefault(why, Counter())[op] += 1
    lines = [
        f"Of {len(before)} graphs and gradients {count} have torch steps where cuDNN alone is "
        f"asked, and {len(after)} where kernels are generated too. What is left, and why:",
        "",
        "| Why | Ops, with the number of graphs |",
        "|---|---|",
    ]
    for why, found in sorted(reasons.items(), key=lambda each: -sum(each[1].values())):
        told = ", ".join(f"`{op}` {many}" for op, many in found.most_common())
        lines.append(f"| {why} | {told} |")
    return "\n".join(lines) + "\n"


def table() -> str:
    """One line for each row: what its cases and their gradients run as, how many are run where."""
    known = read()
    by_row: dict[Row, list[Case]] = {row: [] for row in ROWS}
    for case in enumerate_cases():
        row = row_of(case.id)
        assert row is not None, f"{case.id} is in no row of ROWS"
        by_row[row].append(case)
    grids = [({c.id for c in graphs}, {c.id for c in grads}) for graphs, grads in _grids()]
    lines = [
        "| What | float16, bfloat16 | float32, 8 bits | gradient, 16 bits | gradient, float32 "
        "| on the CPU | on a GPU |",
        "|---|---|---|---|---|---|---|",
    ]
    family = ""
    for row, cases in by_row.items():
        if row.family != family:
            family = row.family
            lines.append(f"| **{family}** | | | | | | |")
        cells = []
        for gradient in (False, True):
            for narrow in (True, False):
                said = known["gradient" if gradient else "forward"]
                of = [case.id for case in cases if (case.dtype in _NARROW) == narrow]
                cells.append(_marks(said[id] for id in of if id in said and not place(id)[1]))
        for graphs, derived in grids:
            plain = sum(case.id in graphs and not place(case.id)[1] for case in cases)
            grads = sum(case.id in graphs and place(case.id)[1] for case in cases)
            grads += sum(case.id in derived for case in cases)
            cells.append(f"{plain} + {grads}")
        lines.append(f"| {row.what} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
