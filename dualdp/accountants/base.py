# SPDX-License-Identifier: Apache-2.0
"""What the accountants share: a history of events, the table by name, and one root finder.

The root finder serves all inverses. A quantity is within its target where its `height` is at most
0. `bracket` finds two values between which the height changes its sign, and `last_within` narrows
the bracket, to an end that was evaluated and is safe.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Unpack

from dualdp import _validate, mechanisms
from dualdp._validate import AccountingError
from dualdp.mechanisms import BallsInBinsGaussian, Mechanism, Sampling

Height = Callable[[float], float]
_FEW = 25  # chords, before bisections


class Accountant:
    """History of noise releases and their privacy cost.

    Subclasses implement `_check` (raise without a valid bound), `get_delta` and `_epsilon`.

    Args:
        neighboring_relation: `add_or_remove`, `zero_out` or `replace`; `replace` doubles the
            sensitivity.
        group_size: number of examples that are protected together, such as those of one user.
    """

    name: ClassVar[str] = ""

    def __init__(self, *, neighboring_relation: str = "add_or_remove", group_size: int = 1) -> None:
        self.neighboring_relation = _validate.choice(
            "neighboring_relation", neighboring_relation, mechanisms.RELATIONS
        )
        self.group_size = _validate.integer("group_size", group_size, minimum=1)
        if self.neighboring_relation == "replace" and self.group_size > 1:
            raise AccountingError(
                f"group_size={self.group_size} under neighboring_relation='replace' has no proved "
                "bound here. Use 'add_or_remove' with group_size, or group_size=1."
            )
        self._counts: dict[Mechanism, int] = {}

    @property
    def history(self) -> tuple[tuple[Mechanism, int], ...]:
        """Pairs (event, number of releases), in the order in which the events were added."""
        return tuple(self._counts.items())

    def __len__(self) -> int:
        """Return the number of releases."""
        return sum(self._counts.values())

    def step(
        self,
        *,
        noise_multiplier: float,
        sample_rate: float,
        num_steps: int = 1,
        **sampling: Unpack[Sampling],
    ) -> None:
        """Add `num_steps` releases of one sampler; an error leaves the history unchanged.

        They go on with the run before: a pass that it left unfinished is filled first. Another run
        has an accountant of its own, for `merge`.

        Args:
            noise_multiplier: noise standard deviation / max_grad_norm, >= 0 (0 gives inf).
            sample_rate: expected batch size / number of examples.
            num_steps: number of releases.
            **sampling: the sampler that formed the batches, and its sizes; see `Sampling`.
        """
        event = mechanisms.event(
            noise_multiplier=noise_multiplier, sample_rate=sample_rate, **sampling
        )
        self.compose(event, _validate.integer("num_steps", num_steps))

    def compose(self, event: Mechanism, count: int = 1) -> None:
        """Add `count` releases of a mechanism of `dualdp.mechanisms`.

        For an event that spans an epoch (`BallsInBinsGaussian`, `ShuffledGaussian`), one release is
        one step of the epoch, and a second call goes on with the epoch of the first; see `merge`.
        """
        number = _validate.integer("count", count)
        self._check(mechanisms.require(event))
        for other, done in self._counts.items() if isinstance(event, BallsInBinsGaussian) else ():
            if isinstance(other, BallsInBinsGaussian) and other != event and done % other.releases:
                raise AccountingError(
                    f"{event} starts inside the unfinished epoch of {other}, which has one "
                    "assignment. Expected noise_multiplier and sample_rate to change between "
                    "epochs only, under sampler='balls_in_bins'."
                )
        self._counts[event] = self._counts.get(event, 0) + number

    def merge(self, other: Accountant) -> None:
        """Add the history of another accountant of the same data set.

        An epoch that is unfinished in both histories counts as two whole epochs.
        """
        if not isinstance(other, Accountant):
            raise TypeError(f"other={other!r} is {_validate.kind(other)}. Expected an accountant.")
        mine = (self.neighboring_relation, self.group_size)
        theirs = (other.neighboring_relation, other.group_size)
        if mine != theirs:
            raise AccountingError(
                f"The histories hold for (relation, group size) {mine} and {theirs}. "
                "Expected the same for both; account both under one."
            )
        for event, _ in other.history:
            self._check(event)
        for event, count in other.history:
            # Our unfinished epoch is rounded up: the other's steps are of another assignment.
            whole = num_epochs(event, self._counts.get(event, 0)) * event.releases
            self._counts[event] = whole + count

    def get_epsilon(self, *, delta: float) -> float:
        """Return an upper bound on epsilon at `delta`."""
        return self.epsilon_bounds(delta=delta)[2]

    def epsilon_bounds(
        self, *, delta: float, rtol: float | None = None
    ) -> tuple[float, float, float]:
        """Return (0, epsilon, epsilon), an upper bound; no lower one is computed.

        Args:
            delta: float in [0, 1].
            rtol: relative accuracy in epsilon to aim at; None for that of `get_epsilon`.
        """
        target = _validate.probability("delta", delta)
        accuracy = math.inf if rtol is None else _validate.positive("rtol", rtol)
        epsilon = self._epsilon(target, accuracy)
        return 0.0, epsilon, epsilon

    def get_delta(self, *, epsilon: float) -> float:
        """Return an upper bound on delta at `epsilon`."""
        raise NotImplementedError

    def _epsilon(self, delta: float, rtol: float) -> float:
        """Upper bound on epsilon; `rtol` is inf for the usual accuracy."""
        raise NotImplementedError

    def _check(self, event: Mechanism) -> None:
        """Raise AccountingError if this accountant has no valid bound for the event."""
        raise NotImplementedError

    def _sensitivity(self) -> float:
        """L2 sensitivity of the sum to one user, in units of the clipping norm."""
        return self.group_size * (2.0 if self.neighboring_relation == "replace" else 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data that JSON can represent."""
        return {
            "accountant": self.name,
            "neighboring_relation": self.neighboring_relation,
            "group_size": self.group_size,
            "history": [[mechanisms.to_dict(event), count] for event, count in self.history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the state by one of `state_dict`, which may come from any accountant.

        Raises:
            ValueError: a field is missing, unknown or out of range; nothing has changed then.
        """
        if not isinstance(state, Mapping) or not state.keys() >= {"group_size", "history"}:
            raise ValueError(f"state is {state!r:.80}. Expected what state_dict() returned.")
        relation: Any = state.get("neighboring_relation")
        fresh = type(self)(neighboring_relation=relation, group_size=state["group_size"])
        stored = state["history"]
        for item in stored if isinstance(stored, list | tuple) else [stored]:
            if not isinstance(item, list | tuple) or len(item) != 2:
                raise ValueError(
                    f"history holds {item!r}. Expected pairs [event, count], as of state_dict()."
                )
            event, count = mechanisms.from_dict(item[0]), _validate.integer("count", item[1])
            fresh._check(event)
            fresh._counts[event] = fresh._counts.get(event, 0) + count
        self.__dict__.update(fresh.__dict__)

    def __repr__(self) -> str:
        """Return the class, the relation and the number of releases."""
        return f"<{type(self).__name__} {self.neighboring_relation}, {len(self)} releases>"


def num_epochs(event: Mechanism, count: int) -> int:
    """Return how often `count` releases compose the event; an unfinished epoch counts whole.

    Most events are one release. `releases` of the others are the steps of an epoch.
    """
    return -(-count // event.releases)


def as_gaussian(event: Mechanism, *, unsampled: bool = False) -> float | None:
    """Return the noise multiplier if the whole event is one plain Gaussian, else None.

    A shuffled pass uses every example once, in one batch: given the batches, it is one Gaussian
    release (parallel composition). A single bin is a full batch; an assignment kept for E epochs
    repeats the same Gaussian E times, which is one with noise multiplier sigma / sqrt(E). With
    `unsampled` that of the Gaussian without its sampling, which costs at least as much.
    """
    match event:
        case mechanisms.Gaussian(sigma) | mechanisms.ShuffledGaussian(sigma, _):
            return sigma
        case mechanisms.PoissonSubsampledGaussian(
            sigma, rate
        ) | mechanisms.FixedSizeSubsampledGaussian(sigma, rate) if unsampled or rate == 1:
            return sigma
        case BallsInBinsGaussian(sigma, bins, epochs) if unsampled or bins == 1:
            return float(sigma) / math.sqrt(epochs)
    return None


TABLE: dict[str, type[Accountant]] = {}
_METHODS = "step compose get_epsilon get_delta epsilon_bounds state_dict load_state_dict".split()


def create(name: str = "pld", **options: Any) -> Accountant:
    """Return a new accountant with an empty history.

    Args:
        name: `pld` (certified and tight, the default), `rdp`, `prv` (a synonym of `pld`), or a
            registered name.
        **options: `neighboring_relation=`, `group_size=`, and further arguments of the class.

    Returns:
        An `Accountant`.

    Raises:
        ValueError: no accountant has this name.
    """
    return TABLE[require_bound(name)](**options)


def require_bound(name: str) -> str:
    """Return the name of an accountant, all of which give upper bounds.

    Raises:
        ValueError: no accountant has this name.
    """
    return _validate.choice("accountant", name, TABLE)


def register(name: str, cls: type[Accountant]) -> None:
    """Add an accountant of your own to the table of `create`.

    Args:
        name: str, the name to be passed to `create`.
        cls: class, called as `cls(neighboring_relation=..., group_size=...)`; must have `step`,
            `compose`, `get_epsilon`, `get_delta`, `epsilon_bounds`, `state_dict` and
            `load_state_dict`. The base class `Accountant` implements most of them.

    Raises:
        TypeError: the class lacks a method.
        ValueError: the name is taken.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name={name!r} is not a name. Expected a string.")
    missing = [method for method in _METHODS if not callable(getattr(cls, method, None))]
    if missing:
        raise TypeError(f"cls={cls!r} lacks {', '.join(missing)}. Expected an accountant class.")
    if name in TABLE:
        raise ValueError(f"name={name!r} is taken. Expected another name.")
    TABLE[name] = cls


def names() -> tuple[str, ...]:
    """Return the names that `create` accepts, sorted."""
    return tuple(sorted(TABLE))


def height_above(spent: Callable[[float], float], epsilon: float) -> Height:
    """Return the height log(spent(value) / epsilon), limited to +-50 so that chords are finite.

    `spent` is slow, so it is evaluated once for each value.
    """

    @functools.cache
    def height(value: float) -> float:
        found = spent(value)
        return min(50.0, max(-50.0, math.log(found / epsilon))) if found > 0 else -50.0

    return height


def bracket(
    holds: Callable[[float], bool], before: float, value: float, factor: float, end: float
) -> tuple[float, float]:
    """Return the first of `value`, `value * factor`, ... that `holds`, and the one before it.

    Args:
        holds: function of a value, True past the place that is searched.
        before: returned first if `value` itself holds; it does not hold there.
        value: first value to be tried.
        factor: float > 1 for growing values, < 1 for falling ones.
        end: last value to be tried.

    Returns:
        `(before, value)`: the last value that does not hold, and the first that does, which is
        beyond `end` if none does.
    """
    # (value - end) * (factor - 1) <= 0 while the end is not passed, in either direction.
    while (value - end) * (factor - 1) <= 0 and not holds(value):
        before, value = value, value * factor
    return before, value


def last_within(
    good: float, bad: float, height: Height, *, width: float = 1e-10, whole: bool = False
) -> float:
    """Return the last value within the target, between `good` (within) and `bad` (not within).

    Regula falsi (Illinois) on the height against the logarithm of the value, which is nearly
    linear, then bisection. Stops at a relative width, with `whole` at neighboring integers.
    """
    at_good, at_bad = height(good) if good else -50.0, height(bad) if bad else 50.0
    side = 0
    for count in range(200):
        low, high = min(good, bad), max(good, bad)
        middle = 0.5 * (low + high)
        if high - low <= (1 if whole else width * abs(good)) or not low < middle < high:
            break
        if count < _FEW and low > 0:
            # zero of the chord through both ends, kept inside the bracket
            share = at_bad / (at_bad - at_good) if at_bad > at_good else 0.5
            share = min(max(share, 1e-3), 1 - 1e-3)
            start, end = math.log(bad), math.log(good)
            chord = math.exp(start + share * (end - start))
            middle = chord if low < chord < high else middle
        if whole:
            middle = min(max(round(middle), low + 1), high - 1)
        at_middle = height(middle)
        # Illinois: an end that stays twice in a row has its height halved, or the chord would creep
        # towards the root from one side.
        if at_middle <= 0:
            good, at_good = middle, at_middle
            at_bad = at_bad / 2 if side == 1 else at_bad
            side = 1
        else:
            bad, at_bad = middle, at_middle
            at_good = at_good / 2 if side == -1 else at_good
            side = -1
    return good


def check_target(target_epsilon: float, target_delta: float) -> tuple[float, float]:
    """Return the validated target; delta = 0 is refused (Gaussian noise cannot reach it)."""
    epsilon = _validate.positive("target_epsilon", target_epsilon)
    return epsilon, _validate.open_probability("target_delta", target_delta)


def unreachable(epsilon: float, delta: float, what: str) -> AccountingError:
    """Return the error for a target that no setting reaches."""
    return AccountingError(
        f"target_epsilon={epsilon} at target_delta={delta} is out of reach: {what} decides it. "
        "Change the target or the other settings."
    )


def smallest_scale(spent: Callable[[float], float], epsilon: float, delta: float) -> float:
    """Return the smallest noise found, >= 0, at which `spent` is at most `epsilon`.

    `spent` maps a noise multiplier, or a factor of one, to epsilon, and was evaluated at the value
    that is returned; `delta` is for the error message.

    Raises:
        AccountingError: no value up to 1e9 is within the target.
    """
    height = height_above(spent, epsilon)
    if height(0.0) <= 0:  # nothing is released
        return 0.0
    if height(1.0) > 0:
        bad, good = bracket(lambda noise: height(noise) <= 0, 1.0, 2.0, 2.0, 1e9)
        if good > 1e9:
            raise unreachable(epsilon, delta, "no noise multiplier up to 1e9")
    else:
        good, bad = bracket(lambda noise: height(noise) > 0, 1.0, 0.5, 0.5, 1e-9)
        if bad < 1e-9:
            return good
    return last_within(good, bad, height)


def largest_count(spent: Callable[[float], float], epsilon: float, most: float) -> int | None:
    """Return the largest whole number, >= 0, at which `spent` is at most `epsilon`.

    None if it is above `most`. At 0, which is not evaluated, nothing more is spent.
    """
    height = height_above(spent, epsilon)
    good, bad = bracket(lambda count: height(count) > 0, 0.0, 1.0, 4.0, most)
    return None if bad > most else int(last_within(good, bad, height, whole=True))
