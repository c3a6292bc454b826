# SPDX-License-Identifier: Apache-2.0
"""Certified lower bounds on epsilon: what the accountants' upper bounds are compared with.

The same mass tables and the same composition as above, rounded to the other side: neighbouring
cells are merged (post-processing, so the result is dominated), masses are taken too small, and what
the window wraps in is taken off.
"""

import math

import numpy as np

from dualdp import mechanisms
from dualdp.accountants.base import as_gaussian, num_epochs
from dualdp.accountants.pld_engine import composition, pairs
from dualdp.accountants.pld_engine.composition import (
    Curve,
    Direction,
    Grid,
    Pmf,
    Sum,
    TiltError,
    Window,
)
from dualdp.accountants.pld_engine.pairs import Subsampled, Term

#: Mechanisms whose dominating pair no data set attains, so that it gives no lower bound.
NOT_ATTAINED = (mechanisms.BallsInBinsGaussian, mechanisms.FixedSizeSubsampledGaussian)


def lower_pmf(p_cells, q_cells, index, spacing, counts, infinite):
    """Return a dominated pmf by merging neighbouring cells; second order for a smooth density.

    The fraction alpha of a cell below the edge g and beta of the cell above it, merged, have
    likelihood ratio e^g exactly if alpha (e^g q_j - p_j) = beta (p_{j+1} - e^g q_{j+1}), and at
    least e^g if "<=" holds: alpha = s / (e^g deficit_j), beta = s / surplus_{j+1}, any s >= 0.
    """
    p = np.maximum(p_cells.mass - p_cells.mass_error, 0.0)
    deficit = (q_cells.excess + q_cells.excess_error) * np.exp(index[1:] * spacing)
    surplus = np.maximum(p_cells.excess - p_cells.excess_error, 0.0)
    alpha, beta = flux(deficit, surplus)
    used = np.zeros_like(p)
    used[:, :-1] += alpha
    used[:, 1:] += beta
    mass = np.zeros((p.shape[0], index.size))
    mass[:, 1:-1] = alpha * p[:, :-1] + beta * p[:, 1:]
    mass[:, :-1] += np.maximum(1 - used, 0.0) * p  # the rest goes down to its lower edge
    return Pmf(mass * (1 - 1e-14), index, infinite * (1 - 1e-12), p_cells.slack, counts)


def flux(deficit, surplus):
    """Fractions of the cells below and above each inner edge, at most 1 together in each cell."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        below = np.where(deficit[:, :-1] > 0, 1 / deficit[:, :-1], 0.0)
        above = np.where(surplus[:, 1:] > 0, 1 / surplus[:, 1:], 0.0)
        below[~np.isfinite(below)] = 0.0
        above[~np.isfinite(above)] = 0.0
        half = deficit * surplus / (deficit + surplus)
        half[~np.isfinite(half)] = 0.0
        lifted = np.sqrt(half[:, :-1] * half[:, 1:])
        lifted[(below == 0) | (above == 0)] = 0.0

    total = np.zeros_like(deficit)
    total[:, :-1] += lifted * below
    total[:, 1:] += lifted * above
    total = np.maximum(total * (1 + 1e-14), 1.0)
    lifted = lifted / np.maximum(total[:, :-1], total[:, 1:])
    return lifted * below, lifted * above


def lower_pmfs(terms, grid, tail):
    """Yield dominated pmfs of all terms, 64 rows at a time."""
    most = composition.MAX_LOSS
    for term in terms:
        low, high = term.pairs.span(tail)
        low, high = max(float(low.min()), -most), min(float(high.max()), most)
        ends = (
            math.floor(min(0, low) / grid.spacing) - 1,
            math.ceil(max(0, high) / grid.spacing) + 1,
        )
        for start in range(0, term.counts.size, 64):
            rows = np.arange(start, min(start + 64, term.counts.size))
            index = grid.edges(*ends)
            both = [term.pairs.cells(rows, index * grid.spacing, of_q) for of_q in (False, True)]
            if term.flipped:
                both, index = [cells.reversed() for cells in reversed(both)], -index[::-1]
            infinite = np.full(rows.size, infinite_mass(term))
            yield lower_pmf(*both, index, grid.spacing, term.counts[rows], infinite)


def infinite_mass(term):
    """Return the mass at infinite losses, which atoms alone have."""
    family, sign = term.pairs, -1 if term.flipped else 1
    if not isinstance(family, pairs.Atoms):
        return 0.0
    return (family.q if term.flipped else family.p)[family.loss == sign * math.inf].sum()


def wrapped(curve, start):
    """Return a bound on the delta that mass outside the window adds inside it."""
    window, total = curve.window, curve.total
    length = window.size * window.spacing
    decay = (window.chernoff - window.tilt) * length
    if window.tilt <= 0 or decay <= 0:
        return math.inf
    outside = total.log_mgf_chernoff - window.chernoff * start * window.spacing
    left = math.exp(-window.tilt * length) / -math.expm1(-window.tilt * length)
    right = math.exp(min(outside + curve.relative - decay, 700)) / -math.expm1(-decay)
    return left + right


class LowerCurve(Curve):
    """Delta of a composed pmf with every error taken off it."""

    def __init__(self, total, start):
        super().__init__(total, start)
        mass = np.maximum(self.mass - self.rounding, 0.0)
        first, second = composition.tail_sums(mass, self.window)
        self.first, self.second = first * (1 - self.error), second * (1 + self.error)
        self.scale -= 2 * self.relative
        self.slack = -self.slack
        self.constant = -math.expm1(total.log_finite) * (1 - 1e-12) - wrapped(self, start)

    def epsilon(self, delta):
        """Return an epsilon below which delta is larger for certain; -inf if none is known."""
        found, is_at_start = super().epsilon(delta)
        if self.constant > delta:
            return math.inf
        return -math.inf if is_at_start or found == math.inf else found

    def delta(self, epsilon):
        """Return a lower bound on delta at an epsilon in the window."""
        return super().delta(epsilon) if self.is_resolved else 0.0


def lower_curve(terms, octave, tail, window, start=0):
    """Compose dominated pmfs in a window."""
    total = Sum(window)
    total.add(lower_pmfs(terms, Grid(window.spacing, octave), tail))
    return LowerCurve(total, start)


def plan(guide, leak, start):
    """(tilt, length, chernoff) of the shortest window that leaks at most `leak` into itself."""
    theta, value, _, _ = guide.resolved()
    if theta.size < 2:
        raise TiltError
    log_leak = math.log(leak)
    with np.errstate(divide="ignore", invalid="ignore"):
        gaps = theta[None, :] - theta[:, None]
        right = (value - theta * start - log_leak)[None, :] / gaps
    right[gaps <= 0] = np.inf
    length = np.maximum(-log_leak / theta, right.min(axis=1))
    best = int(np.argmin(length[:-1]))
    return theta[best], length[best], theta[int(np.argmin(right[best]))]


def lower_epsilon(terms, delta, upper, rtol=1e-2):
    """A certified lower bound on epsilon of composed pairs, 0 if none is known.

    `upper` is an upper bound, below which the window is placed. The lattice is made finer until the
    bounds differ by `rtol`, a few times at most.
    """
    direction, best = Direction(terms), 0.0
    leak = min(1e-3, 0.1 * rtol) * delta
    guide, spacing = direction.guide(delta), direction.base_spacing(1e-2) / 2
    reach = min(float(np.mean(np.abs(term.pairs.span(0.1)[0]))) for term in terms)
    spacing = min(spacing, max(0.05 * reach, 0.01 * spacing))
    margin = 0.04 * upper + 4 * spacing
    for _ in range(6):
        start = max(upper - margin, 0.0)
        try:
            tilt, length, chernoff = plan(guide, leak, start)
            fine = max(spacing, length / (1 << 20))
            size = 1 << max(6, math.ceil(math.log2(length / fine + 4)))
            window = Window(float(tilt), float(chernoff), fine, size)
            made = lower_curve(terms, 128, direction.tail(leak), window, math.floor(start / fine))
        except TiltError:
            break
        found = made.epsilon(delta)
        best = max(best, found)
        if upper - best <= max(rtol * upper, 1e-6) or fine > spacing:
            break
        if found == -math.inf and start > 0:
            margin *= 3  # epsilon is below the window
        else:
            spacing /= 3
    return min(best, upper)


def lower(made, delta, rtol=1e-2):
    """A certified lower bound on epsilon of an accountant's history, 0 if none is known."""
    upper = made.epsilon_bounds(delta=delta, rtol=rtol)[2]
    history = [(e, n) for e, n in made.history if n and not isinstance(e, NOT_ATTAINED)]
    events = [(e, num_epochs(e, n)) for e, n in history]
    if not events or not 0 < upper < math.inf:
        return 0.0
    views = [(made, False, False), (made, True, False)]
    if made.neighboring_relation == "replace":
        views = [(made, False, True)]
    terms = [
        [Term(*pair, flipped) for pair in attained(made, events, exact)]
        for made, flipped, exact in views
    ]
    return max(lower_epsilon(one, delta, upper, rtol) for one in terms)


def attained(made, events, exact):
    """Pairs of all events that some data sets attain, with their counts."""
    group = made.group_size
    factor = group * (2 if made.neighboring_relation == "replace" else 1)
    rows, found = [], []
    for event, number in events:
        sigma = as_gaussian(event)
        match event:
            case _ if sigma is not None:
                rows.append((sigma / factor, 1.0, number))
                continue
            case mechanisms.PoissonSubsampledGaussian(sigma, rate) if group == 1 and not exact:
                rows.append((sigma, rate, number))
                continue
            case mechanisms.PoissonSubsampledGaussian(sigma, rate):
                family = pairs.mixture(sigma, rate, group)
                family = pairs.substitution(sigma, rate) if exact else family
            case mechanisms.Laplace(scale):
                family = pairs.laplace(scale / factor)
            case mechanisms.DiscreteGaussian(sigma):
                family = pairs.discrete_gaussian(sigma, factor)
            case mechanisms.RandomizedResponse(noise, buckets):
                family = pairs.randomized_response(noise, buckets)
            case mechanisms.ApproximateDP(epsilon, delta):
                family = pairs.black_box(epsilon, delta)
            case mechanisms.MassTable(p, q):
                family = pairs.table(p, q)
        found.append((family, np.array([float(number)])))
    if rows:
        sigmas, rates, counts = np.array(rows, dtype=float).T
        found.append((Subsampled(sigmas, rates), counts))
    return found
