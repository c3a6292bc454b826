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
from dualdp.plan.clipping import CLIPPING
from dualdp_torch.parallel.fsdp import refuse_tensor_parallel
from dualdp_torch.per_sample import api
from dualdp_torch.per_sample.analysis_cache import AnalysisCache
from dualdp_torch.per_sample.api import ClippedGradSum, LossFn
from dualdp_torch.per_sample.call import Call, Options
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
    """

    def __init__(self, losses: GraphModule, backend: str | Callable[..., Any]) -> None:
        self._losses, self._backend = losses, backend
        self._factors_of: dict[str, int] = {}  # name of each sum -> index of its factors
        self._places: dict[str, int] = {}  # name of each parameter -> its argument
        self._compiled: Callable[..., Any] | None = None

    @in_full_precision
    def __call__(self, request: _Request, inputs: Sequence[Any]) -> list[Tensor]:
        """Return the joint graph's outputs, or raise what the tracer or a compiler raised."""
        arguments, parameters = request.arguments(inputs), request.call.parameters
        if self._compiled is None:
            self._compiled = self._built(request, arguments, len(inputs))
        if self._places.keys() != parameters.keys() or any(
            arguments[self._places[name]] is not p for name, p in parameters.items()
        ):
            raise NotCompiledError("its parameters are not those of the compiled graph")
        with torch.no_grad():
            found = list(self._compiled(*arguments))
            if isinstance(self._backend, str) and not found[0].is_cuda:
                return found
            return [output.clone() for output in found]  # a replayed graph writes to the same ones

    def numbers(self, request: _Request, found: Sequence[Tensor]) -> tuple[Numbers, Tensor]:
        """Return the outputs as numbers of the batch, and () bool: norms are finite and precise."""
        norms, losses, are_valid, *rest = found[len(self._factors_of) :]
        count = len({*self._factors_of.values()})
        numbers = Numbers(
            norms,
            losses,
            None,  # the graph's own factors are its only weights
            sums=dict(zip(self._factors_of, found, strict=False)),
            factors={name: rest[index] for name, index in self._factors_of.items()},
            bounds=request.bounds,
            clipping=request.clipping,
            doubt=rest[count] if len(rest) > count else None,
        )
        return numbers, are_valid

    def _built(self, request: _Request, arguments: Sequence[Tensor], num_inputs: int) -> Any:
        """Joint graph, traced and compiled."""
        given = arguments[2:]
        if not all(map(torch.is_tensor, given)):
            raise NotCompiledError("the graph takes a number that Python computes")
        where = {id(tensor): i for i, tensor in enumerate(given)}
        trained = {name: where[id(p)] for name, p in request.call.parameters.items()}
        if any(t.requires_grad and i not in trained.values() for i, t in enumerate(given)):
            raise NotCompiledError("the graph takes a tensor with a gradient that is no parameter")
        sources = [where[id(tensor)] for tensor in given[:num_inputs]]

        def step(mask: Tensor, bounds: Tensor, *given: Tensor) -> list[Tensor]:
            leaves = [tensor.detach() for tensor in given]
            versions = [tensor._version for tensor in leaves]
            parameters = {name: leaves[i].requires_grad_() for name, i in trained.items()}
            inputs = [leaves[i] for i in sources]
            found = self._joint(request, mask, bounds, parameters, inputs)
            if versions != [tensor._version for tensor in leaves]:
                raise NotCompiledError("the forward writes to a buffer or to the batch")
            return found

        with torch.enable_grad():
            joint = make_fx(step, tracing_mode="fake")(*arguments)
        refuse_draws(joint)
        self._places = {name: 2 + i for name, i in trained.items()}
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
        last = [] if gradients.doubt is None else [gradients.doubt]
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
        options: Options,
        backend: str | Callable[..., Any],
    ) -> None:
        self._loss_fn, self._model, self._backend = loss_fn, model, backend
        self._clipping, self._options = clipping, options
        self.programs: list[Program] = []
        self.reasons: list[str] = []
        # By number of examples and analyses, which are kept alive so that they stay distinct.
        self._failed, self._checked = (set[tuple[int, AnalysisCache]]() for _ in range(2))
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
        return self.of_batch(batch, max_grad_norm, mask, self._options.check)[0]

    @never_compiled
    def of_batch(
        self,
        batch: tuple[Any, ...],
        max_grad_norm: Any,
        mask: Tensor | None,
        check: str,
        seed: int | None = None,
    ) -> tuple[ClippedGradSum, bool]:
        """Return the sum of one batch, and if its graph was compared with plain autograd.

        `seed` is that of a check; None for the next one of the cache.
        """
        options, purpose = replace(self._options, check=check), ("clipped_grad_sum", self._clipping)
        own = replace(options, physical_batch_size=None)
        call = Call.of(self._loss_fn, self._model, batch, own, (*purpose, "compiled"), mask)
        bounds = clipping_bounds(call.parameters, self._clipping, max_grad_norm)
        grads, was_compared = dict[str, Tensor](), False
        norms, losses = list[Tensor](), list[Tensor]()
        for part, count in self._parts(call):
            request = _Request(part, bounds, self._clipping)
            numbers, compared = self._compiled(request, seed)
            if numbers is None:
                norms = []
                break
            for name, total in (numbers.sums or {}).items():
                grads[name] = grads[name] + total if name in grads else total
            norms.append(numbers.norms[:count])
            losses.append(numbers.losses[:count])
            was_compared |= compared
        if not norms:
            terms = {"max_grad_norm": max_grad_norm, "clipping": self._clipping, "mask": mask}
            return api.clipped_grad_sum(
                self._loss_fn, self._model, *batch, **terms, **vars(options)
            ), False
        each = torch.cat(losses)
        each = each if mask is None else each.where(mask.to(each.device), 0)
        return ClippedGradSum(grads, torch.cat(norms), each, None), was_compared

    def _parts(self, call: Call) -> Iterator[tuple[Call, int]]:
        """Yield calls of `physical_batch_size` rows, and how many of these are examples.

        The last example is repeated in place of absent ones, and masked.
        """
        n, size = call.batch.n, self._options.physical_batch_size
        if size is None:
            yield call, n
            return
        mask = torch.ones(n, dtype=torch.bool) if call.mask is None else call.mask
        for start in range(0, n, size):
            rows = torch.arange(start, start + size)
            inside = rows.clamp(max=n - 1)
            own = mask[inside.to(mask.device)] & (rows < n).to(mask.device)
            yield replace(call, batch=call.batch.rows(inside), mask=own), min(size, n - start)

    def _compiled(self, request: _Request, seed: int | None) -> tuple[Numbers | None, bool]:
        """Return numbers of the compiled graph, None to run eagerly, and if they were compared."""
        call = request.call
        if call.batch.n < 2 or not call.parameters:
            return None, False
        if not call.cache.is_known:
            call.examine()  # raises for a model that mixes examples
        key = call.batch.n, call.cache
        if not call.cache.is_known or key in self._failed:  # too few examples to see it; no graph
            return None, False
        check = call.options.check
        is_due = check == "always" or (check == "first" and key not in self._checked)
        start = Start.of(call.model, is_checked=True) if is_due else None
        try:
            program, found = self._run(request)
        except NotCompiledError as error:
            self._failed.add(key)
            self._note(str(error))
            return None, False
        numbers, are_valid = program.numbers(request, found)
        if not bool(are_valid):  # of this batch only; the only look at the host
            return None, False
        is_due = is_due and (call.mask is None or bool(call.mask.any()))
        checked = replace(call, is_checked=is_due, start=start)
        compared = api.was_compared(checked, numbers, self._again(request), seed)
        if compared:
            self._checked.add(key)
        return numbers, compared

    def _run(self, request: _Request) -> tuple[Program, list[Tensor]]:
        """Return the program for this batch, and its outputs."""
        call = request.call
        size = call.chunk_size()
        if call.cache.problem:
            raise NotCompiledError(call.cache.problem)
        if size is not None and size < call.batch.n:
            raise NotCompiledError(f"the memory suffices for {size} examples at once")
        if torch.is_autocast_enabled(call.batch.tensors()[0].device.type):
            raise NotCompiledError("autocast is on around the call")
        if below_static(request.bounds):
            raise NotCompiledError("squares of float32 underflow at so small a max_grad_norm")
        self._request, self._found = request, None
        try:
            guarded = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)
            with torch.enable_grad(), guarded:
                self._losses(*call.batch.arguments())
        except Exception as error:  # of Dynamo, the tracer, a compiler; the loss's own comes again
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
            return (program.numbers(request, found)[0].losses,)

        return run

    def _again(self, request: _Request) -> api.Compute:
        """Return a function from a call on another model to the numbers of its own graph."""

        def compute(call: Call) -> tuple[Numbers, Any]:
            options = replace(call.options, check="off")
            other = CompiledGradSum(
                self._loss_fn, call.model, self._clipping, options, self._backend
            )
            again = replace(request, call=replace(call, options=options))
            numbers, _ = other._compiled(again, None)
            if numbers is None:
                raise RuntimeError(f"The step can't be compiled again: {other.reasons}.")
            return numbers, None

        return compute

    def _note(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)
            name = type(self._model).__name__
            _log.warning("The clipped sum of %s runs eagerly: %s.", name, reason)


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
    require_module("The model", model)
    refuse_tensor_parallel(model, "compile_clipped_grad_sum", "use clipped_grad_sum")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn={loss_fn!r} is not callable. Expected loss_fn(model, *batch).")
    if physical_batch_size is not None:
        _validate.integer("physical_batch_size", physical_batch_size, minimum=2)
    options = Options(method, physical_batch_size, check=check)
    return CompiledGradSum(loss_fn, model, clipping, options, backend)
