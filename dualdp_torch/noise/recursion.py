# SPDX-License-Identifier: Apache-2.0
"""Correlated noise of bands and buffered Toeplitz strategies, from rows of the noise before.

The rows take the noise away from what was released, so they are a cache only: in no checkpoint,
pickle or `repr`, and drawn again from the key by a run that is resumed.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from dualdp.plan.correlated.noise import (
    Path,
    Recursion,
    branch_at,
    recursion_of,
    require_affordable,
)
from dualdp_torch.rules.base import Tensor

_SECONDS = 10.0  # between two lines about the progress
_log = logging.getLogger("dualdp")
#: Rows of a plan, by the identity of the object.
_kept: dict[int, tuple[weakref.ref[Any], Rows]] = {}


class Rows:
    """State of a recursion before `step`: for each part of the noise some rows, which are secret.

    Args:
        layout: names, shapes, dtypes, devices and pieces of the sums, on which the normals depend.
    """

    def __init__(self, layout: Any) -> None:
        self.layout, self.step, self.path = layout, 0, Path()
        self._rows: dict[int, list[Tensor]] = {}

    def lead_to(self, step: int, path: Path, layout: Any) -> bool:
        """Return True if the noise of `step` comes after these rows."""
        before = tuple(stretch for stretch in path if stretch[0] < self.step)
        return self.step <= step and self.path == before and self.layout == layout

    def advance(self, recursion: Recursion, path: Path, normals: list[Tensor]) -> list[Tensor]:
        """Return the noise of `step`, one tensor a part, and move to the next step.

        Args:
            recursion: `Recursion` of the strategy.
            path: branches of the steps.
            normals: (k,) normals of each part, times the standard deviation of z; overwritten.
        """
        decays = recursion.decays
        for part, noise in enumerate(normals):
            empty = [] if decays is None else [noise.new_zeros(len(noise)) for _ in decays]
            rows = self._rows.get(part, empty)
            for tap, row in zip(recursion.taps, rows, strict=decays is not None):
                noise.sub_(row * tap)  # rounded twice, on any device and in any part
            noise.mul_(recursion.scale)
            if decays is None:
                self._rows[part] = [noise, *rows][: len(recursion.taps)]
            else:
                for index, decay in enumerate(decays):  # not in place: of inference mode, perhaps
                    rows[index] = (rows[index] * decay).add_(noise)
                self._rows[part] = rows
        self.step += 1
        self.path = tuple(stretch for stretch in path if stretch[0] < self.step)
        return normals

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "The rows of correlated noise can't be copied: they take the noise away. A resumed run "
            "draws them again from its key."
        )


def noise_of(
    plan: Any,
    step: int,
    path: Path,
    layout: Any,
    size: int,
    draw: Callable[[int, int], list[Tensor]],
) -> list[Tensor]:
    """Return the noise of a step, whose tensors may not be changed; keep its rows for the next.

    Steps that are asked for in another order, on another branch or in another layout are drawn from
    step 0 on, to the same numbers.

    Args:
        plan: `PrivacyPlan`, whose correlation has a recursion.
        step: index of the release.
        path: branches of the steps that lead to it.
        layout: what the normals depend on, besides key, step and branch; compared by `==`.
        size: numbers that the noise has here.
        draw: function of (step, branch) that returns the normals of each part, (k,) each.

    Raises:
        AccountingError: more normals would be drawn again than 10^14.

    Guarantees:
        The same bits, whether the steps before were just drawn or not.
            [test_any_order_of_the_steps_gives_the_same_noise]
        No copy or pickle has the rows.  [test_rows_are_in_no_pickle_and_no_repr]
    """
    recursion = recursion_of(plan.correlation)
    assert recursion is not None
    plan_id = id(plan)
    rows = _taken(plan_id, step, path, layout)
    if rows is None:
        require_affordable(plan.correlation, step, size)
        forget(plan_id)  # frees the memory of rows that lead elsewhere
        rows = Rows(layout)
    told = time.monotonic()
    while True:
        noise = rows.advance(recursion, path, draw(rows.step, branch_at(path, rows.step)))
        if rows.step > step:
            break
        if time.monotonic() - told > _SECONDS:
            told = time.monotonic()
            _log.warning("Correlated noise is drawn again: step %d of %d.", rows.step, step)
    if rows.step != plan.num_steps:
        _kept[plan_id] = weakref.ref(plan, lambda _: forget(plan_id)), rows
    return noise


def _taken(plan_id: int, step: int, path: Path, layout: Any) -> Rows | None:
    """Kept rows if they lead to a step, taken out: no failed step or thread leaves half of it."""
    kept = _kept.pop(plan_id, None)
    if kept is not None and not kept[1].lead_to(step, path, layout):
        _kept[plan_id] = kept
        return None
    return kept and kept[1]


def forget(plan_id: int) -> None:
    """Free the rows of the plan with this `id`."""
    _kept.pop(plan_id, None)
