"""Solve a linear program after its equal variables and equal rows are merged.

Regular layouts make programs with few kinds of variables and rows. The method is colour refinement (Grohe, Kersting,
Mladenov and Selman, "Dimension Reduction via Colour Refinement", 2014):

1. Give variables of equal cost one colour, and rows of equal right side and kind one colour.
2. Split a colour of variables if two of its variables have different sums of coefficients over the rows of some colour.
   Split colours of rows in the same way, by sums over variables. Repeat until no colour is split.
3. Keep one variable and one row for each colour, and solve this smaller program.

Both programs have the same optimum. Take any optimum of the large program, and replace each variable by the mean of its
colour: the result satisfies all rows at the same cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Programs with fewer variables are solved as they are, in milliseconds.
MIN_VARIABLES = 2_000


@dataclass(frozen=True, eq=False)
class LinearProgram:
    """Minimise ``cost @ x`` for x >= 0, where ``A @ x <= right``, or ``== right`` in rows with ``is_equal``.

    ``A`` has the coefficient ``value[i]`` in row ``row_offsets[i]`` and column ``column_offsets[i]``. No entry is
    listed twice.
    """

    cost: np.ndarray
    row_offsets: np.ndarray
    column_offsets: np.ndarray
    value: np.ndarray
    right: np.ndarray
    is_equal: np.ndarray


def solve(program: LinearProgram, min_variables: int = MIN_VARIABLES) -> tuple[float, np.ndarray] | None:
    """The optimum and the dual value of each row; None if the solver has no solution.

    Args:
        program: the program.
        min_variables: smallest number of variables for which equal variables are merged.
    """
    if len(program.cost) < min_variables:
        return _solve_whole(program)
    row_color, column_color = _refine(program)
    merged = _merge(program, row_color, column_color)
    if merged is None:
        return _solve_whole(program)
    solved = _solve_whole(merged)
    if solved is None:
        return None
    return solved[0], (solved[1] / np.bincount(row_color))[row_color]


def _solve_whole(program: LinearProgram) -> tuple[float, np.ndarray] | None:
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    is_equal = program.is_equal
    matrix = coo_matrix(
        (program.value, (program.row_offsets, program.column_offsets)), (len(program.right), len(program.cost))
    ).tocsr()
    solved = linprog(
        program.cost,
        A_ub=matrix[~is_equal],
        b_ub=program.right[~is_equal],
        A_eq=matrix[is_equal],
        b_eq=program.right[is_equal],
        method="highs",
    )
    if solved.fun is None:
        return None
    duals = np.zeros(len(program.right))
    duals[~is_equal], duals[is_equal] = solved.ineqlin.marginals, solved.eqlin.marginals
    return float(solved.fun), duals


def _refine(program: LinearProgram) -> tuple[np.ndarray, np.ndarray]:
    """The colours of the rows and of the variables. Hashes distinguish colours; :func:`_merge` checks them."""
    value = _number(program.value)
    row_color, column_color = _number(program.right, program.is_equal), _number(program.cost)
    while True:
        sums = np.zeros(len(row_color), dtype=np.uint64)
        np.add.at(sums, program.row_offsets, _hash_colour(column_color[program.column_offsets], value))
        new_row_color = _number(row_color, sums)
        sums = np.zeros(len(column_color), dtype=np.uint64)
        np.add.at(sums, program.column_offsets, _hash_colour(new_row_color[program.row_offsets], value))
        new_column_color = _number(column_color, sums)
        if new_row_color.max(initial=0) == row_color.max(initial=0) and new_column_color.max(
            initial=0
        ) == column_color.max(initial=0):
            return new_row_color, new_column_color
        row_color, column_color = new_row_color, new_column_color


def _number(*keys: np.ndarray) -> np.ndarray:
    """Number the different tuples of keys, and return the number of each entry's tuple."""
    number = np.zeros(len(keys[0]), dtype=np.int64)
    for key in keys:
        value = np.unique(key, return_inverse=True)[1].ravel()
        number = np.unique(number * (int(value.max(initial=0)) + 1) + value, return_inverse=True)[1].ravel()
    return number


def _hash_colour(color: np.ndarray, value: np.ndarray) -> np.ndarray:
    """A hash of a colour and the number of a coefficient (the finalizer of SplitMix64)."""
    mixed = color.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + value.astype(np.uint64) + np.uint64(1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def _merge(program: LinearProgram, row_color: np.ndarray, column_color: np.ndarray) -> LinearProgram | None:
    """The program with one row and one variable per colour; None if the colours do not satisfy the theorem."""
    by_row = _sum_coefficients(program.row_offsets, column_color[program.column_offsets], program.value, row_color)
    by_column = _sum_coefficients(program.column_offsets, row_color[program.row_offsets], program.value, column_color)
    if by_row is None or by_column is None:
        return None
    first_row, first_column = np.unique(row_color, return_index=True)[1], np.unique(column_color, return_index=True)[1]
    merged_row, merged_column, value = by_row
    cost = program.cost[first_column] * np.bincount(column_color)
    return LinearProgram(cost, merged_row, merged_column, value, program.right[first_row], program.is_equal[first_row])


def _sum_coefficients(
    line: np.ndarray, across: np.ndarray, value: np.ndarray, color: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """``(colours of lines, colours across, sum of coefficients)``; None if lines of one colour have different sums.

    Args:
        line: the row or column of each coefficient.
        across: the colour of its column or row.
        value: the coefficient.
        color: the colour of each line.
    """
    width = int(across.max(initial=0)) + 1
    pair, number, count = np.unique(line * width + across, return_inverse=True, return_counts=True)
    lowest, highest = np.full(len(pair), np.inf), np.full(len(pair), -np.inf)
    np.minimum.at(lowest, number.ravel(), value)
    np.maximum.at(highest, number.ravel(), value)
    if (lowest != highest).any():
        return None
    merged, number, lines = np.unique(
        color[pair // width] * width + pair % width, return_inverse=True, return_counts=True
    )
    total = count * lowest
    smallest, largest = np.full(len(merged), np.inf), np.full(len(merged), -np.inf)
    np.minimum.at(smallest, number.ravel(), total)
    np.maximum.at(largest, number.ravel(), total)
    if (smallest != largest).any() or (lines != np.bincount(color)[merged // width]).any():
        return None
    return merged // width, merged % width, smallest
