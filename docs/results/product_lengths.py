"""Products by an odd number of columns, as they are, with gaps behind rows, and padded, on a GPU.

    python docs/results/product_lengths.py

The table stands in h100-notes.md: the scores of 4,096 tokens for 50,257 words, and their gradients.
"""

from __future__ import annotations

import torch

TOKENS, WORDS, WIDTH = 4096, 50257, 768
WAYS = {
    "as they are": (WORDS, WORDS),
    "gaps behind rows": (50264, WORDS),
    "padded": (50264, 50264),
}


def times(gap: int, words: int) -> list[float]:
    """Microseconds of y = x wT, dx = y w and dw = yT x, rows of y being ``gap`` elements apart."""
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x, w = torch.randn(TOKENS, WIDTH, **options), torch.randn(words, WIDTH, **options)
    y = torch.as_strided(torch.randn(TOKENS * gap, **options), (TOKENS, words), (gap, 1))
    found = []
    for left, right, out in ((x, w.t(), y), (y, w, x.clone()), (y.t(), x, w.clone())):
        for _ in range(5):
            torch.matmul(left, right, out=out)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            torch.matmul(left, right, out=out)
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 20 * 1e3)
    return found


def main() -> None:
    """See the module's docstring."""
    print(torch.cuda.get_device_name(), torch.__version__)
    for name, way in WAYS.items():
        print(f"| {name} | {' | '.join(f'{us:,.0f}' for us in times(*way))} |")


if __name__ == "__main__":
    main()
