# SPDX-License-Identifier: Apache-2.0
"""Clipped gradient sums by one compiled graph: forward, backward, norms, factors and sums.

Dynamo reads the user's loss, and guards everything in it that the graph depends on. Its graph of
the losses is run once under the capture, on tensors without data, and all that the rules then do is
traced. No operation of this joint graph reads data on the host, and no shape depends on data, so it
suits a compiler and a CUDA graph. A call without such a graph runs eagerly, by name.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dualdp import _validate
from dualdp.exactness import CHECKS
from dualdp.plan.clipping import CLIPPING
from dualdp_torch.parallel.fsdp import refuse_tensor_parallel
from dualdp_torch.per_sample.api import (
    ClippedGradSum,
    Compute,
    LossFn,
    check_numbers,
    clipped_grad_sum,
)
from dualdp_torch.per_sample.call import Call
from dualdp_torch.per_sample.checks.identity import Numbers
from dualdp_torch.per_sample.clip import (
    below_static,
    clipped_sums,
    clipping_bounds,
    static_clip_factors,
)
from dualdp_torch.per_sample.model_checks import require_module
from dualdp_torch.per_sample.parameter_use import never_compiled
from dualdp_torch.per_sample.random_state import Start
from dualdp_torch.rules import choices
from dualdp_torch.rules.base import Tensor
from dualdp_torch.rules.precision import in_full_precision

_log = logging.getLogger("dualdp")
#: Methods whose sums come from captured uses in one pass.
METHODS = ("auto", "book_keeping", "materialize")


class NotCompiledError(Exception):
    """A call has no compiled graph and runs eagerly; the message gives the reason."""


class _TracedCall(Call):
    """Call on tensors without data, of which no example can be analysed."""

    def examine(self) -> NoReturn:
        """Refuse a forward that uses parameters otherwise than the examined one."""
        raise NotCompiledError("the graph uses parameters otherwise than the eager forward")


@dataclass(frozen=True)
class _Request:
    """One batch with its clipping bounds: group -> C."""

    call: Call
    bounds: Mapping[str, float]
    clipping: str

    def arguments(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return mask (n,), bounds (groups,), the inputs, and parameters that are no input."""
        device, known = self.call.batch.tensors()[0].device, {id(tensor) for tensor in inputs}
        mask = self.call.mask
        mask = torch.ones(self.call.batch.n, dtype=torch.bool) if mask is None else mask
        bounds = torch.tensor([*self.bounds.values()], dtype=torch.float64)
        others = [p for p in self.call.parameters.values() if id(p) not in known]
        return [mask.to(device), bounds.to(device), *inputs, *others]


class Program:
    """Joint graph of one graph of losses, traced and compiled at its first call.

    Its arguments are those of `_Request.arguments`; its outputs are the sums, norms, losses, if all
    norms are finite and precise, the factors, and perhaps the doubt.

    Attributes:
        was_checked: bool, True once its numbers were compared with plain autograd.
    """

    def __init__(self, losses: GraphModule, backend: str | Callable[..., Any]) -> None:
        self._losses, self._backend = losses, backend
        self._keeps_outputs = isinstance(backend, str)  # on a CPU
        self._num_inputs = sum(node.op == "placeholder" for node in losses.graph.nodes)
        self._reason: str | None = None
        self._factors_of: dict[str, int] = {}  # name of each sum -> index of its factors
        self._has_doubt = False
        self._compiled: Callable[..., Any] | None = None
        self.was_checked = False

    def __call__(self, request: _Request, inputs: Sequence[Any]) -> list[Tensor]:
        """Return the joint graph's outputs, or raise the reason why there are none."""
        if self._reason is None:
            try:
                return self._run(request, inputs)
            except Exception as error:  # of the tracer, of a compiler, of the graph: a way is left
                self._reason = reason_of(error)
        raise NotCompiledError(self._reason)

    @in_full_precision
    def _run(self, request: _Request, inputs: Sequence[Any]) -> list[Tensor]:
        arguments, parameters = request.arguments(inputs), request.call.parameters
        if self._compiled is None:
            self._compiled = self._built(request, arguments)
        if self._names != [*parameters] or any(
            arguments[i] is not p for i, p in zip(self._at, parameters.values(), strict=True)
        ):
            raise NotCompiledError("its parameters are not those of the compiled graph")
        with torch.no_grad():
            found = list(self._compiled(*arguments))
            if self._keeps_outputs and not found[0].is_cuda:
                return found
            return [output.clone() for output in found]  # a replayed graph writes to the same ones

    def numbers(self, request: _Request, found: Sequence[Tensor]) -> Numbers:
        """Return the outputs as numbers of the batch."""
        norms, losses, _, *factors = found[len(self._factors_of) :]
        doubt = factors.pop() if self._has_doubt else None

        return Numbers(
            norms,
            losses,
            None,  # the graph's own factors are its only weights
            sums=dict(zip(self._factors_of, found, strict=False)),
            factors={name: factors[index] for name, index in self._factors_of.items()},
            bounds=request.bounds,
            clipping=request.clipping,
            doubt=doubt,
        )

    def are_valid(self, found: Sequence[Tensor]) -> bool:
        """True if every norm is finite and precise: the only look at the host."""
        return bool(found[len(self._factors_of) + 2])

    def _built(self, request: _Request, arguments: Sequence[Tensor]) -> Any:
        """Joint graph, traced and compiled."""
        call, given = request.call, arguments[2:]
        if not all(map(torch.is_tensor, given)):
            raise NotCompiledError("the graph takes a number that Python computes")
        where = {id(tensor): i for i, tensor in enumerate(given)}
        sources = [where[id(tensor)] for tensor in given]
        trained = {name: where[id(p)] for name, p in call.parameters.items()}
        if any(t.requires_grad and i not in trained.values() for i, t in enumerate(given)):
            raise NotCompiledError("the graph takes a tensor with a gradient that is no parameter")

        def step(mask: Tensor, bounds: Tensor, *given: Tensor) -> list[Tensor]:
            leaves = [tensor.detach() for tensor in given]
            versions = [tensor._version for tensor in leaves]
            parameters = {name: leaves[i].requires_grad_() for name, i in trained.items()}
            inputs = [leaves[i] for i in sources[: self._num_inputs]]
            found = self._joint(request, mask, bounds, parameters, inputs)
            if versions != [tensor._version for tensor in leaves]:
                raise NotCompiledError("the forward writes to a buffer or to the batch")
            return found

        with torch.enable_grad(), choices.static():
            joint = make_fx(step, tracing_mode="fake")(*arguments)
        refuse_draws(joint)
        self._names, self._at = [*trained], [2 + i for i in trained.values()]
        compiler = self._backend
        if isinstance(compiler, str):
            compiler = torch._dynamo.lookup_backend(compiler)
        with torch.no_grad():
            return compiler(joint, [*arguments])

    def _joint(
        self,
        request: _Request,
        mask: Tensor,
        bounds: Tensor,
        parameters: dict[str, Tensor],
        inputs: Sequence[Tensor],
    ) -> list[Tensor]:
        """Outputs of the joint graph, by an eager call on the graph of losses."""

        def losses(model: nn.Module, *batch: Any) -> Tensor:
            outputs = self._losses(*inputs)
            if len(outputs) != 1:
                raise NotCompiledError(
                    "the forward keeps a tensor beside the losses, as an attribute or a buffer"
                )
            found: Tensor = outputs[0]
            return found

        changed = {"loss_fn": losses, "parameters": parameters, "mask": mask}
        found = _TracedCall(**{**vars(request.call), **changed}).captured()
        if found is None:
            raise NotCompiledError("too few examples have a finite loss")
        gradients, each, _ = found
        of_groups = dict(zip(request.bounds, bounds.unbind(0), strict=True))
        factors, are_valid = static_clip_factors(gradients, of_groups, request.clipping, mask)
        sums = clipped_sums(gradients, factors)
        distinct = {id(factor): factor for factor in factors.of.values()}
        index = {key: k for k, key in enumerate(distinct)}
        self._factors_of = {name: index[id(factors.of[name])] for name in sums}
        doubt = gradients.doubt
        self._has_doubt, last = doubt is not None, [] if doubt is None else [doubt]
        return [*sums.values(), factors.norms, each, are_valid, *distinct.values(), *last]


def refuse_draws(graph: GraphModule) -> None:
    """Refuse a graph that draws random numbers, which a check could not draw again."""
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            continue
        names = [argument.name for argument in node.target._schema.arguments]
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        if "dropout_p" not in names or given.get("dropout_p", 0.0):  # attention may not draw
            raise NotCompiledError(f"{node.target} draws random numbers")


def reason_of(error: Exception) -> str:
    """Return the first line of an error, and its kind unless it is a reason itself."""
    text = next(iter(str(error).strip().splitlines()), "")
    return text if isinstance(error, NotCompiledError) else f"{type(error).__name__}: {text}"


class CompiledGradSum:
    """`clipped_grad_sum` of one loss and model by compiled graphs; see `compile_clipped_grad_sum`.

    Attributes:
        programs: list of `Program`, one for each graph of the losses that Dynamo found.
        reasons: list of the reasons why calls ran eagerly, each once.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        model: nn.Module,
        clipping: str,
        method: str,
        physical_batch_size: int | None,
        backend: str | Callable[..., Any],
        check: str,
    ) -> None:
        self._loss_fn, self._model, self._backend = loss_fn, model, backend
        self._clipping, self._method, self._check = clipping, method, check
        self._size = physical_batch_size
        self.programs: list[Program] = []
        self.reasons: list[str] = []
        self._failed: dict[Any, Any] = {}
        self._checked: dict[Any, Any] = {}
        self._request: _Request | None = None
        self._found: tuple[Program, list[Tensor]] | None = None

        def losses(*batch: Any) -> Any:
            return loss_fn(model, *batch)

        # Dynamo counts the graphs of a code object, which other compiled sums would share.
        own = types.FunctionType(
            losses.__code__.replace(), losses.__globals__, "losses", None, losses.__closure__
        )
        self._losses = torch.compile(own, backend=self._take, fullgraph=True, dynamic=False)

    @never_compiled
    def __call__(
        self,
        *batch: Any,
        max_grad_norm: float | Tensor | Mapping[str, float],
        mask: Tensor | None = None,
    ) -> ClippedGradSum:
        """Return `(grads, norms, losses, None)` as `clipped_grad_sum`.

        Another batch, bound or mask of the same shapes needs no other graph.
        """
        return self.of_batch(batch, max_grad_norm, mask, self._check)[0]

    @never_compiled
    def of_batch(
        self,
        batch: tuple[Any, ...],
        max_grad_norm: Any,
        mask: Tensor | None,
        check: str,
        drawn: int | None = None,
    ) -> tuple[ClippedGradSum, bool]:
        """Return the sum of one batch, and if its graph was compared with plain autograd.

        `drawn` is the seed of a check; None for the next one of the cache.
        """
        call = Call.checked(
            self._loss_fn,
            self._model,
            batch,
            ("clipped_grad_sum", self._clipping, "compiled"),
            method=self._method,
            mask=mask,
            check=check,
        )
        call.drawn = drawn
        bounds = clipping_bounds(call.parameters, self._clipping, max_grad_norm)
        found: list[tuple[Numbers, int]] = []
        was_compared = False
        for part, count in self._parts(call):
            numbers, compared = self._compiled(_Request(part, bounds, self._clipping))
            if numbers is None:
                found = []
                break
            found.append((numbers, count))
            was_compared |= compared
        if not found:
            eager = clipped_grad_sum(
                self._loss_fn,
                self._model,
                *batch,
                max_grad_norm=max_grad_norm,
                clipping=self._clipping,
                mask=mask,
                method=self._method,
                physical_batch_size=self._size,
                check=check,
            )
            return eager, False
        grads: dict[str, Tensor] = {}
        for numbers, _ in found:
            for name, total in (numbers.sums or {}).items():
                grads[name] = grads[name] + total if name in grads else total
        norms = torch.cat([numbers.norms[:count] for numbers, count in found])
        losses = torch.cat([numbers.losses[:count] for numbers, count in found])
        losses = losses if mask is None else losses.where(mask.to(losses.device), 0)
        return ClippedGradSum(grads, norms, losses, None), was_compared

    def _parts(self, call: Call) -> Iterator[tuple[Call, int]]:
        """Yield calls of `physical_batch_size` rows, and how many of these are examples.

        The last example is repeated in place of absent ones, and masked.
        """
        n, size = call.batch.n, self._size
        if size is None:
            yield call, n
            return
        mask = torch.ones(n, dtype=torch.bool) if call.mask is None else call.mask
        for start in range(0, n, size):
            rows = torch.arange(start, start + size)
            inside = rows.clamp(max=n - 1)
            own = mask[inside.to(mask.device)] & (rows < n).to(mask.device)
            yield replace(call, batch=call.batch.rows(inside), mask=own), min(size, n - start)

    def _compiled(self, request: _Request) -> tuple[Numbers | None, bool]:
        """Return numbers of the compiled graph, None to run eagerly, and if they were compared."""
        call = request.call
        if call.batch.n < 2 or not call.parameters:
            return None, False
        if not call.cache.is_known:
            call.examine()  # raises for a model that mixes examples
        if not call.cache.is_known:  # too few examples to see it
            return None, False
        key = call.batch.n, id(call.cache)
        if key in self._failed:
            return None, False
        may_check = call.check == "always" or (call.check == "first" and key not in self._checked)
        start = Start.of(call.model, is_checked=True) if may_check else None
        try:
            program, found = self._run(request)
        except NotCompiledError as error:
            self._failed[key] = call.cache  # kept alive so that its id stays unique
            self._note(str(error))
            return None, False
        if not program.are_valid(found):  # of this batch only
            return None, False
        numbers = program.numbers(request, found)
        is_due = call.check == "always" or not program.was_checked
        is_due = is_due and (call.mask is None or bool(call.mask.any()))
        if start is None or not is_due:
            return numbers, False
        checked = replace(call, is_checked=True, start=start)
        check_numbers(checked, numbers, self._again(request))
        program.was_checked |= checked.was_compared
        if checked.was_compared:
            self._checked[key] = call.cache
        return numbers, checked.was_compared

    def _run(self, request: _Request) -> tuple[Program, list[Tensor]]:
        """Return the program for this batch, and its outputs."""
        call = request.call
        call.choose_chunk_size()
        if call.cache.problem:
            raise NotCompiledError(call.cache.problem)
        if call.chunk is not None and call.chunk < call.batch.n:
            raise NotCompiledError(f"the memory suffices for {call.chunk} examples at once")
        if torch.is_autocast_enabled(call.batch.tensors()[0].device.type):
            raise NotCompiledError("autocast is on around the call")
        if below_static(request.bounds):
            raise NotCompiledError("squares of float32 underflow at so small a max_grad_norm")
        self._request, self._found = request, None
        try:
            guarded = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)
            with torch.enable_grad(), guarded:
                self._losses(*call.batch.arguments())
        except NotCompiledError:
            raise
        except Exception as error:  # of Dynamo; one of the loss itself comes again
            raise NotCompiledError(reason_of(error)) from error
        finally:
            found, self._request, self._found = self._found, None, None
        if found is None:
            raise NotCompiledError("torch.compile is switched off here")
        return found

    def _take(self, losses: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Compiler that Dynamo calls with each graph of the losses."""
        program = Program(losses, self._backend)
        self.programs.append(program)

        def run(*inputs: Any) -> tuple[Tensor, ...]:
            request = self._request
            if request is None:
                raise NotCompiledError("the losses were called from elsewhere")
            found = program(request, inputs)
            self._found = program, found
            return (program.numbers(request, found).losses,)

        return run

    def _again(self, request: _Request) -> Compute:
        """Return a function from a call on another model to the numbers of its own graph."""

        def compute(call: Call) -> tuple[Numbers, Any]:
            other = CompiledGradSum(
                self._loss_fn, call.model, self._clipping, self._method, None, self._backend, "off"
            )
            numbers, _ = other._compiled(replace(request, call=replace(call, check="off")))
            if numbers is None:
                raise RuntimeError(f"The step can't be compiled again: {other.reasons}.")
            return numbers, None

        return compute

    def _note(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)
            _log.warning(
                "The clipped sum of %s runs eagerly: %s.", type(self._model).__name__, reason
            )


def compile_clipped_grad_sum(
    loss_fn: LossFn,
    model: nn.Module,
    *,
    clipping: str = "flat",
    method: str = "auto",
    physical_batch_size: int | None = None,
    backend: str | Callable[..., Any] = "inductor",
    check: str = "first",
) -> CompiledGradSum:
    """Return `clipped_grad_sum` of a loss and a model as a function that runs compiled graphs.

    Forward, backward, norms, clip factors and sums are one graph, without an operation that reads
    data on the host. There is one graph for each shape, dtype, device, training flag, and whatever
    else the forward reads (torch.compile guards it, but for methods replaced on a class, hooks on
    all modules and the environment); values of parameters, buffers, batch, mask
    and C are arguments. With `physical_batch_size` batches of any size run on one shape.

    A call whose forward has no such graph runs eagerly: one that draws random numbers (dropout),
    writes buffers, breaks Dynamo's graph (recurrent layers), or has a layer without a rule. The
    reason is logged once, as a warning of the logger "dualdp", and kept in `reasons`. A single
    batch with a norm that is not finite, or that cancels, runs eagerly without a warning.

    Args:
        loss_fn: callable, see `clipped_grad_sum`; without aux.
        model: module, see `clipped_grad_sum`.
        clipping: str, see `clipped_grad_sum`.
        method: str, one of "auto", "book_keeping" and "materialize".
        physical_batch_size: int, rows that a graph takes: larger batches are split, and absent rows
            filled with masked copies. None: one graph for each number of examples.
        backend: str or callable, a backend of `torch.compile`: "inductor" (on a CPU it needs a C++
            compiler), "cudagraphs", "aot_eager", ...
        check: str, when a graph's numbers are compared with plain autograd of two examples, as in
            `clipped_grad_sum`: "first" (the first batch of every graph), "always" or "off".

    Returns:
        `CompiledGradSum`, called as `compiled(*batch, max_grad_norm=, mask=None)`.

    Raises:
        TypeError, ValueError: a wrong argument.

    Source: Bu et al. 2023 (book-keeping), traced as one graph.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> loss = lambda model, x: model(x).square().sum(1)
    >>> compiled = compile_clipped_grad_sum(loss, model, backend="eager")
    >>> compiled(torch.ones(4, 3), max_grad_norm=1.0).grads["bias"].shape
    torch.Size([2])
    """
    _validate.choice("clipping", clipping, CLIPPING)
    _validate.choice("method", method, METHODS)
    _validate.choice("check", check, CHECKS)
    require_module("The model", model)
    refuse_tensor_parallel(model, "compile_clipped_grad_sum", "use clipped_grad_sum")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn={loss_fn!r} is not callable. Expected loss_fn(model, *batch).")
    if physical_batch_size is not None:
        physical_batch_size = _validate.integer(
            "physical_batch_size", physical_batch_size, minimum=2
        )
    return CompiledGradSum(loss_fn, model, clipping, method, physical_batch_size, backend, check)
