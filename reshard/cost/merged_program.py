"""Solve a linear program after its equal variables and equal constraints are merged.

Regular layouts make programs with few kinds of variables and constraints. The method is colour refinement (Grohe,
Kersting, Mladenov and Selman, "Dimension Reduction via Colour Refinement", 2014):

1. Give variables of equal cost one colour, and constraints of equal right side and kind one colour.
2. Split a colour of variables if two of its variables have different sums of coefficients over the constraints of some
   colour. Split colours of constraints in the same way, by sums over variables. Repeat until no colour is split.
3. Keep one variable and one constraint for each colour, and solve this smaller program.

Both programs have the same optimum. Take any optimum of the large program, and replace each variable by the mean of its
colour: the result satisfies all constraints at the same cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Programs with fewer variables are solved as they are, in milliseconds.
MIN_VARIABLES = 2_000


@dataclass(frozen=True, eq=False)
class LinearProgram:
    """Minimise ``cost @ x`` for x >= 0, where ``A @ x <= right``, or ``== right`` for constraints with ``is_equal``.

    Each row of ``A`` is a constraint, and each column a variable. ``value[i]`` is the coefficient of variable
    ``variable[i]`` in constraint ``constraint[i]``. No coefficient is listed twice; the others are 0.
    """

    cost: np.ndarray
    constraint: np.ndarray
    variable: np.ndarray
    value: np.ndarray
    right: np.ndarray
    is_equal: np.ndarray


def solve(program: LinearProgram, min_variables: int = MIN_VARIABLES) -> tuple[float, np.ndarray] | None:
    """The optimum and the dual value of each constraint; None if the solver has no solution.

    Args:
        program: the program.
        min_variables: smallest number of variables for which equal variables are merged.
    """
    if len(program.cost) < min_variables:
        return _solve_whole(program)
    constraint_color, variable_color = _refine(program)
    merged = _merge(program, constraint_color, variable_color)
    if merged is None:
        return _solve_whole(program)
    solved = _solve_whole(merged)
    if solved is None:
        return None
    return solved[0], (solved[1] / np.bincount(constraint_color))[constraint_color]


def _solve_whole(program: LinearProgram) -> tuple[float, np.ndarray] | None:
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    is_equal = program.is_equal
    matrix = coo_matrix(
        (program.value, (program.constraint, program.variable)), (len(program.right), len(program.cost))
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
    """The colours of the constraints and of the variables. Hashes distinguish colours; :func:`_merge` checks them."""
    value = _number(program.value)
    constraint_color, variable_color = _number(program.right, program.is_equal), _number(program.cost)
    while True:
        sums = np.zeros(len(constraint_color), dtype=np.uint64)
        np.add.at(sums, program.constraint, _hash_colour(variable_color[program.variable], value))
        new_constraint_color = _number(constraint_color, sums)
        sums = np.zeros(len(variable_color), dtype=np.uint64)
        np.add.at(sums, program.variable, _hash_colour(new_constraint_color[program.constraint], value))
        new_variable_color = _number(variable_color, sums)
        if new_constraint_color.max(initial=0) == constraint_color.max(initial=0) and new_variable_color.max(
            initial=0
        ) == variable_color.max(initial=0):
            return new_constraint_color, new_variable_color
        constraint_color, variable_color = new_constraint_color, new_variable_color


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


def _merge(program: LinearProgram, constraint_color: np.ndarray, variable_color: np.ndarray) -> LinearProgram | None:
    """The program with one constraint and one variable per colour; None if the colours do not satisfy the theorem."""
    by_constraint = _sum_coefficients(
        program.constraint, variable_color[program.variable], program.value, constraint_color
    )
    by_variable = _sum_coefficients(
        program.variable, constraint_color[program.constraint], program.value, variable_color
    )
    if by_constraint is None or by_variable is None:
        return None
    first_constraint, first_variable = (
        np.unique(constraint_color, return_index=True)[1],
        np.unique(variable_color, return_index=True)[1],
    )
    merged_constraint, merged_variable, value = by_constraint
    cost = program.cost[first_variable] * np.bincount(variable_color)
    return LinearProgram(
        cost,
        merged_constraint,
        merged_variable,
        value,
        program.right[first_constraint],
        program.is_equal[first_constraint],
    )


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
