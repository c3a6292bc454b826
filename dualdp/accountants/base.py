# SPDX-License-Identifier: Apache-2.0
"""Base class of the accountants: a history of events, its composition, and a table by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

from dualdp import _validate, mechanisms
from dualdp._validate import AccountingError
from dualdp.mechanisms import BallsInBinsGaussian, Mechanism, Sampling


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
        self._relation = _validate.choice(
            "neighboring_relation", neighboring_relation, mechanisms.RELATIONS
        )
        self._group_size = _validate.integer("group_size", group_size, minimum=1)
        if self._relation == "replace" and self._group_size > 1:
            raise AccountingError(
                f"group_size={self._group_size} under neighboring_relation='replace' has no proved "
                "bound here. Use 'add_or_remove' with group_size, or group_size=1."
            )
        self._counts: dict[Mechanism, int] = {}

    @property
    def neighboring_relation(self) -> str:
        """Neighboring relation under which all results of this accountant hold."""
        return self._relation

    @property
    def group_size(self) -> int:
        """Number of examples that are protected together."""
        return self._group_size

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
        mine = (self._relation, self._group_size)
        theirs = (other._relation, other._group_size)
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
        return self._group_size * (2.0 if self._relation == "replace" else 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data that JSON can represent."""
        return {
            "accountant": self.name,
            "neighboring_relation": self._relation,
            "group_size": self._group_size,
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
        return f"<{type(self).__name__} {self._relation}, {len(self)} releases>"

    def __eq__(self, other: object) -> bool:
        """Return True if the serialized states are equal."""
        if not isinstance(other, Accountant):
            return NotImplemented
        return json.dumps(self.state_dict()) == json.dumps(other.state_dict())

    __hash__ = None  # type: ignore[assignment]  # mutable


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
    if name == "gdp" and name not in TABLE:
        raise ValueError(
            f"accountant='gdp' is unknown: the central limit theorem bounds nothing. Expected one "
            f"of {', '.join(names())}; accountants.gdp_epsilon gives the number of papers."
        )
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
