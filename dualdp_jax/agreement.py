# SPDX-License-Identifier: Apache-2.0
"""One run of several processes: one plan, one ledger, one answer to each question about them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from dualdp import twin
from dualdp.exactness import ExactnessError
from dualdp.ledger import Ledger
from dualdp.plan import PrivacyPlan
from dualdp.randomness import RootKey
from dualdp.sealing import Seal
from dualdp_jax.call import split_batch
from dualdp_jax.distributed import Group
from dualdp_jax.sharding import fingerprint, held, pieces

LOADED = "load_checkpoint"
_ROWS = 16  # of the data, that are compared


def one_plan(group: Group, plan: PrivacyPlan) -> PrivacyPlan:
    """The plan of all processes, with the key of process 0; they may differ in nothing else.

    Raises:
        ValueError: they do, on every process.
    """
    words = json.loads(plan.to_json())
    sha256 = words.pop("key_sha256")
    group.same("the plan", words, "Give all of them one plan, or the same arguments.")
    root = RootKey(*group.from_first("the key", _secret(plan) if group.is_first else None))
    if root.sha256 == sha256 and plan.root == root:
        return plan
    return PrivacyPlan.from_json(json.dumps({**words, "key_sha256": root.sha256}), key=root)


def _secret(plan: PrivacyPlan) -> tuple[bytes, int | None]:
    """The key as process 0 sends it to the others, and to nobody else."""
    root = plan.root.require_secret()
    return root.secret, root.seed


def check_data(group: Group, data: tuple[Any, ...]) -> None:
    """Refuse processes with other data: one example could be in two shards of a step.

    Raises:
        ValueError: on every process.
    """
    arrays = split_batch(data)[0]
    group.same("the arrays of the data", [_kind(array) for array in arrays])
    rows = np.unique(np.linspace(0, len(arrays[0]) - 1, _ROWS).astype(np.int64))
    samples = [_sha256([np.asarray(array[rows])]) for array in arrays]
    hint = "Give all of them the whole data; each reads the rows of its devices only."
    group.same(f"the data, of which {len(rows)} rows were compared", samples, hint, shown=False)


def check_run(group: Group, run: Any, state: Any) -> None:
    """Refuse processes that would train other models.

    Raises:
        ValueError: on every process; the first thing that differs is named.
        RuntimeError: they start from other numbers.
    """
    group.same("the run", {
        "parameters": {
            name: [str(leaf.dtype), list(leaf.shape), str(leaf.sharding.spec)]
            for name, leaf in zip(run.parameters.names, run.parameters.trained, strict=True)
        },
        "optimizer": [_kind(leaf) for leaf in jax.tree.leaves(state.opt_state)],
        "mesh": {str(axis): size for axis, size in run.layout.mesh.shape.items()},
        "data axes": list(run.layout.axes),
        "method": run.method,
        "needs_key": run.needs_key,
        "has_aux": run.has_aux,
        "step": state.step,
    })  # fmt: skip
    leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    leaves = [leaf for leaf in leaves if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)]
    check_replicas(group, "the first state", leaves, _sha256(_pieces(leaves)))


def check_replicas(group: Group, place: str, arrays: Sequence[Any], word: str) -> list[bytes]:
    """The word of each process for what it holds of some arrays, by rank.

    Args:
        group: of the processes.
        place: where they stand.
        arrays: on the mesh.
        word: of this process, hexadecimal; 16 bytes of it are compared.

    Raises:
        RuntimeError: two processes hold the same parts, with other numbers in them.
    """
    ours = bytes.fromhex(word)[:16], bytes.fromhex(held(arrays))[:16]
    gathered = group.gather(place, b"".join(ours))
    found = [both[:16] for both in gathered]
    first: dict[bytes, int] = {}
    for rank, both in enumerate(gathered):
        other = first.setdefault(both[16:], rank)
        if found[other] != found[rank]:
            raise RuntimeError(
                f"Process {other} and process {rank} hold other numbers at {place}, where both "
                "should hold the same. Expected parameters that are placed alike, from one seed or "
                "one checkpoint; start all processes again."
            )
    return found


class Account:
    """The ledger of a run of several processes: process 0 writes it, the others follow.

    Process 0 records a step before the sums are formed, and seals it before anyone draws noise: the
    seal that all wait for comes from it. So the file never says less than was released.

    Args:
        group: of the processes.

    Attributes:
        is_filed: whether process 0 writes to a file, so that sums have to be digested.

    Guarantees:
        The ledgers of all processes have the same text.  [test_two_processes_are_one_run]
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._told = 1  # lines that all processes have
        self.is_filed = False

    def opened(
        self,
        plan: PrivacyPlan,
        accountant: str | None,
        path: str | os.PathLike[str] | None,
        **claim: Any,
    ) -> Ledger:
        """The ledger of a new run, once the plan's key is taken for it.

        Args:
            plan: of the run.
            accountant: of the engine.
            path: of the ledger's file; None keeps it in memory.
            **claim: of `PrivacyPlan.claim`.

        Raises:
            AccountingError: the key was used before; on every process.
            FileExistsError: the ledger's file exists; on every process.
        """
        self._group.same("the accountant", accountant)
        made: list[Ledger] = []

        def begin() -> bool:
            made.append(begun(plan, accountant, path, **claim))
            return path is not None

        self.is_filed = self._group.by_first("the ledger", begin)
        if made:
            return made[0]
        follower = twin.Twin(plan, accountant)
        plan.claim(follower, follows=True, **claim)
        return follower

    def resumed(self, call: Callable[[], Ledger], plan: Callable[[Any], PrivacyPlan]) -> Ledger:
        """The ledger of a run that goes on.

        Args:
            call: makes it, on process 0.
            plan: key to plan, on the others.
        """
        made: list[Ledger] = []

        def words() -> Any:
            made.append(call())
            return made[0].to_json(), made[0].state(), _secret(made[0].plan)

        text, state, secret = self._group.by_first("the ledger of the checkpoint", words)
        ledger = made[0] if made else twin.Twin.of(plan(RootKey(*secret)), text, state)
        if not made:
            ledger.plan.claim(ledger, recorder=LOADED, source="", follows=True)
        self._told, self.is_filed = twin.num_lines(ledger), True
        return ledger

    def at(self, step: int) -> AbstractContextManager[None]:
        """A place where a lost process is told as such, whatever it is that fails first."""
        return self._group.collective(_place(step))

    def shared(self, step: int, failed: ExactnessError | None) -> ExactnessError | None:
        """The failed spot check of a step, on every process; of several that of the first one.

        Args:
            step: that was checked.
            failed: what this process found, if anything.
        """
        found = None if failed is None else [str(failed), failed.parameters, failed.relative_error]
        place = f"the spot check of {_place(step)}"
        words = self._group.gather(place, b"" if found is None else json.dumps(found).encode())
        if not any(words):
            return None
        if failed is not None:
            return failed
        message, parameters, error = json.loads(next(word for word in words if word))
        return ExactnessError(message, parameters=parameters, relative_error=error)

    def written(self, place: str, whole: Callable[[], Any], write: Callable[[Any], Any]) -> Any:
        """What process 0 wrote, once it is written; the ledger is in a file from here on."""
        with self._group.collective(place):
            made = whole()
        found = self._group.by_first(place, lambda: write(made))
        self.is_filed = True
        return found

    def sealed(
        self,
        ledger: Ledger,
        step: int,
        params: Sequence[Any] | None,
        sums: Sequence[Any] | None,
        facts: Mapping[str, Any],
    ) -> Seal:
        """The seal of a recorded step, by process 0, which all others check.

        Args:
            ledger: of this process.
            step: that was recorded last.
            params: at which the sums were formed, on the mesh; None where nobody shows them.
            sums: clipped sums, on the mesh; None where nobody shows them.
            facts: further arguments of `Ledger.seal`.

        Raises:
            RuntimeError: a process is lost, or elsewhere.
            AccountingError: the written line is not what this process would have written.
        """
        place = _place(step)
        words: list[bytes] = []
        if params is not None:  # sums that were reduced are the same, whatever they were formed at
            check_replicas(self._group, place, params, fingerprint(params))
        if self.is_filed and sums is not None:
            root = ledger.plan.root.require_secret()
            words = check_replicas(self._group, place, sums, root.digest(_bytes(_pieces(sums))))

        def write() -> Any:
            parts = [np.frombuffer(word, np.uint8) for word in words] or None
            return twin.news(ledger, self._told, ledger.seal(step, parts, **facts))

        news = self._group.by_first(place, write)
        seal = ledger.follow(news) if isinstance(ledger, twin.Twin) else Seal(*news["seal"])
        self._told = twin.num_lines(ledger)
        return seal


def begun(
    plan: PrivacyPlan,
    accountant: str | None,
    path: str | os.PathLike[str] | None,
    **claim: Any,
) -> Ledger:
    """A new ledger, once the plan's key is taken for its run; `claim` as in `Account.opened`."""
    opened = Ledger(plan, accountant, path)
    try:
        plan.claim(opened, **claim)
    except BaseException:
        opened.discard()
        raise
    return opened


def _place(step: int) -> str:
    """What a step is called when processes say where they stand."""
    return f"step {step}"


def _kind(array: Any) -> list[Any]:
    """Dtype and shape, to be compared."""
    return [str(getattr(array, "dtype", type(array))), list(np.shape(array))]


def _bytes(arrays: Sequence[Any]) -> list[Any]:
    """A head, and the bytes of each array."""
    arrays = [np.asarray(array, order="C") for array in arrays]
    head = repr([(array.shape, array.dtype.str) for array in arrays]).encode()
    return [head, *(array.reshape(-1).view(np.uint8).data for array in arrays if array.size)]


def _pieces(arrays: Sequence[Any]) -> list[Any]:
    """What this process holds of some arrays."""
    return [piece for array in arrays for piece in pieces(array)]


def _sha256(arrays: Sequence[Any]) -> str:
    state = hashlib.sha256()
    for part in _bytes(arrays):
        state.update(part)
    return state.hexdigest()
