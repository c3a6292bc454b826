# SPDX-License-Identifier: Apache-2.0
"""Few cases of a product of factors, in which every two values of different factors meet."""

from itertools import combinations


def pairwise(*factors, never=()):
    """Return cases (one value of each factor) that hold every pair of values.

    Each case begins with the first pair that is still missing. Its other values are those that
    bring the most missing pairs, of equals the least used; so the same factors give the same cases.

    Args:
        *factors: sequences of values; every value is in a case.
        never: pairs of values, of different factors in their order, that no case may hold.

    Returns:
        Cases as tuples, in the order of the product.
    """
    factors = [list(values) for values in factors]
    apart = {
        ((i, a), (j, b))
        for i, j in combinations(range(len(factors)), 2)
        for a, one in enumerate(factors[i])
        for b, other in enumerate(factors[j])
        if (one, other) in never
    }
    missing = {
        ((i, a), (j, b)): None
        for i, j in combinations(range(len(factors)), 2)
        for a in range(len(factors[i]))
        for b in range(len(factors[j]))
        if ((i, a), (j, b)) not in apart
    }
    used = [[0] * len(values) for values in factors]
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for i in range(len(factors)):
            if i not in case:
                case[i] = _best(i, case, missing, apart, used[i])
        for pair in _pairs(case):
            missing.pop(pair, None)
        for i, value in case.items():
            used[i][value] += 1
        cases.append(tuple(case[i] for i in range(len(factors))))
    return [
        tuple(values[k] for values, k in zip(factors, case, strict=True)) for case in sorted(cases)
    ]


def _pairs(case):
    """All pairs ((factor, value), (factor, value)) of a case, by number."""
    return combinations(sorted(case.items()), 2)


def _best(factor, case, missing, apart, used):
    """Number of the value of a factor that brings most to a case."""

    def worth(value):
        met = [tuple(sorted(((factor, value), other))) for other in case.items()]
        is_allowed = not any(pair in apart for pair in met)
        return is_allowed, sum(pair in missing for pair in met), -used[value]

    return max(range(len(used)), key=worth)
