"""Index arithmetic of generated kernels, held against numpy's views."""

from __future__ import annotations

import math
import random

import numpy as np

from cudnngraph.kernels.index import Digit, Sum, Var, counter, digits, place, reshaped


def values(index: Sum, var: Var) -> np.ndarray:
    """The sum at every value of its variable, by its code."""
    text = index.code({var: "v"}).replace("u", "").replace("/", "//")
    return np.broadcast_to(eval(text, {"v": np.arange(var.extent)}), (var.extent,))


def factored(total: int, rng: random.Random) -> list[int]:
    """A shape of so many elements, with extents of 1 among them."""
    found = []
    while total > 1:
        extent = rng.choice([n for n in range(2, total + 1) if total % n == 0])
        found.append(extent)
        total //= extent
        if rng.random() < 0.2:
            found.append(1)
    return found or [1]


def test_views_of_views_read_what_numpy_reads() -> None:
    assert sum(map(views_of_views_are_numpys, range(2000))) > 1600


def views_of_views_are_numpys(seed: int) -> bool:
    """Whether there is an index for random views; if so it is right."""
    rng = random.Random(seed)
    total = rng.choice([12, 24, 36, 60, 64, 96, 120, 180])
    var = Var("v", total)
    shape = factored(total, rng)
    seen = np.arange(total).reshape(shape)  # the view, as numbers of elements of the memory
    steps = []
    for _ in range(rng.randint(1, 4)):  # from the memory to the view
        what = rng.choice(["permute", "reshape", "slice"])
        if what == "permute":
            order = rng.sample(range(seen.ndim), seen.ndim)
            steps.append(("permute", order, None))
            seen = seen.transpose(order)
        elif what == "reshape":
            to = factored(seen.size, rng)
            steps.append(("reshape", list(seen.shape), to))
            seen = seen.reshape(to)
        else:
            dim = rng.randrange(seen.ndim)
            start = rng.randrange(seen.shape[dim])
            steps.append(("slice", dim, start))
            seen = seen[(slice(None),) * dim + (slice(start, None),)]
    var = Var("v", seen.size)
    index = digits(counter(var), seen.shape)
    for what, a, b in reversed(steps):  # from the view back to the memory
        if what == "permute":
            index = [index[a.index(dim)] for dim in range(len(a))]
        elif what == "slice":
            index[a] = index[a] + b
        else:
            back = reshaped(index, b, a)
            if back is None:
                return False  # such as (4, 9) turned round and read as (6, 6), which carries
            index = back
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found = place(index, strides)
    assert np.array_equal(values(found, var), seen.ravel())
    assert found.most >= seen.max()
    return True


def test_what_is_read_in_the_order_of_memory_is_read_at_the_counter() -> None:
    var = Var("v", 2 * 3 * 4 * 5)
    index = digits(counter(var), (2, 3, 4, 5))
    assert place(index, (60, 20, 5, 1)) == counter(var)
    split = reshaped(index, (2, 3, 4, 5), (6, 2, 10))
    assert split is not None and place(split, (20, 10, 1)) == counter(var)


def test_slopes_along_lanes() -> None:
    var = Var("v", 2 * 6 * 8)
    n, c, w = digits(counter(var), (2, 6, 8))
    assert counter(var).slope(var, 8) == 1
    assert (w.slope(var, 8), c.slope(var, 8), n.slope(var, 8)) == (1, 0, 0)
    assert (w.slope(var, 16), c.slope(var, 16)) == (None, None)
    assert place((n, c, w), (48, 1, 6)).slope(var, 4) == 6
    assert (place((c, w), (8, 1)) + 3).multiple(var, 8) == 1
    assert place((n, w), (8, 1)).multiple(var, 8) == 8


def test_a_number_that_is_cut() -> None:
    var = Var("v", 4)
    index = counter(var) + 8
    assert index.cut(4, 100) == Sum((), 2)
    assert index.cut(3, 100) is None
    assert Sum.of({Digit(var, 1, 4): 3}, 1).cut(3, 4) == Sum(((Digit(var, 1, 4), 1),), 0)


def test_places_of_a_part_of_a_concatenation_are_its_own() -> None:
    """Of 7 places along a dim a part has 5: its index goes up to 6, and is asked for up to 4."""
    var = Var("v", 3 * 7 * 2)
    _, along, _ = digits(counter(var), (3, 7, 2))
    there = values(along, var) < 5
    channel = reshaped((Sum(), along, Sum()), (1, 5, 1), (5,))
    assert channel is not None
    assert (values(channel[0], var) == values(along, var))[there].all()


def test_a_digit_is_not_cut_where_that_is_no_digit() -> None:
    var = Var("v", 21)
    digit = Sum.of({Digit(var, 1, 7): 1})  # v % 7, and (v % 7) % 5 is not v % 5
    assert digit.cut(1, 5) is None
    assert digit.cut(1, 7) == digit
    even = Sum.of({Digit(var, 1, 6): 1}).cut(1, 3)
    assert even is not None and (values(even, var) == np.arange(21) % 6 % 3).all()
