"""What a model may do in the place of an op whose result depends on the numbers in a tensor."""

from __future__ import annotations

_ONE_SHAPE = (
    "choose with torch.where among results of one shape; in the place of a loop over experts, sort "
    "rows by expert and multiply them by torch.nn.functional.grouped_mm"
)
_ELSE = (
    'else torch.compile(model, backend="cudnngraph") runs it between two graphs, or in a loop the '
    "function around it by torch"
)
#: Ops of torch that ask for numbers by themselves.
ASKING = ("linalg.lstsq",)
#: The mend, by a part of the name of an op or of the line that calls it.
_MENDS = {
    "linalg.lstsq": "for a matrix of full rank take q, r = torch.linalg.qr(a) and "
    "torch.linalg.solve_triangular(r, q.mT @ b, upper=True)",
    "ctc_loss": "give the lengths as tuples of numbers",
    "validate_args=True": "leave validate_args out",
    "tolist": _ONE_SHAPE,
    "bincount": "count by torch.nn.functional.one_hot(x, num_classes).sum(0)",
    "repeat_interleave": "say how many rows that makes, as output_size=",
    "one_hot": "say how many classes there are, as num_classes=",
    **dict.fromkeys(
        ("aten.item", ".item()"),
        "compute with the tensor, in place of the number that .item() gives, or in the place of a "
        "size choose with torch.where among results of one shape",
    ),
}


def mend_of(text: str) -> str:
    """What to do in the place of an op, by its name or the line that calls it."""
    found = (mend for part, mend in _MENDS.items() if part in text)
    return f"{next(found, _ONE_SHAPE)}; {_ELSE}"
