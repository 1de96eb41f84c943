"""Every private torch name that paceline needs, so that a new torch release breaks one file.

Seen on torch 2.11 (Python 3.12, CUDA) and 2.13 (Python 3.11, CPU):

    torch._C._current_graph_task_id            which backward this thread works for; -1 outside of one
    torch.autograd._engine_run_backward        the Python function through which backward() enters the engine
    Variable._execution_engine.queue_callback  run a function when the current backward ends
    torch._C._nn.flatten_dense_tensors         many tensors into one, in one call
    torch._C._nn.unflatten_dense_tensors       and back, as views
    ProcessGroup._get_backend, its options._timeout
    ProcessGroup._get_sequence_number_for_group
    ProcessGroup.get_group_store, distributed_c10d._get_process_group_store
    torch.autograd._unsafe_preserve_version_counter, torch._C.Future
    torch.nn.utils.clip_grad._clip_grads_with_norm_   what clip_grad_norm_ ends in, with the parameters
    torch.utils.data.dataloader._BaseDataLoaderIter, its __next__
    torch._dynamo.compiled_autograd, its compiled_autograd_enabled and _disable
    torch.distributed.autograd._current_context, _is_valid_context, _retrieve_context, and backward as it is
    found in that module; rpc._is_current_rpc_agent_set; a context's number has its maker's id above bit 48
    torch.distributed.optim.optimizer._LocalOptimizer, _ScriptLocalOptimizer   what steps on the owner's side
    torch.distributed.optim.apply_optimizer_in_backward   where it keeps the handles of its hooks
    DTensor(local, spec, requires_grad), its _local_tensor and _spec; AsyncCollectiveTensor
    torch.distributed.tensor.parallel.ddp, its _reconstruct_dtensor, _localize_dtensor and Parameter._st_info
    torch._C._disabled_torch_function_impl
    torch.jit.RecursiveScriptModule            what torch.jit.script() makes
    torch.autograd._profiler_enabled           whether anybody would see a name in a profile
"""

import logging
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch.autograd import Variable

from paceline.places import Sentry, here

Node = torch.autograd.graph.Node
CFuture = torch._C.Future  # what a collective's get_future() returns
NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl

_UNSEEN = nullcontext()
_DOOR = "_engine_run_backward"
_CLIP = "_clip_grads_with_norm_"
_PASS = "backward"  # of torch.distributed.autograd
FAILED_CONTEXTS = 4  # are kept, with their gradients,
LATE_SECONDS = 60.0  # for as long as torch's RPC waits for an answer
_WORKER_SHIFT = 48  # a context's number has its maker's worker id above this bit


def accumulator_of(parameter: torch.Tensor) -> Node:
    """Return the autograd node that writes ``parameter.grad``; keep it, or its hooks are lost.

    A frozen parameter has one too, in wait: it is switched on for the moment of asking.
    """
    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_(True)
    try:
        with torch.enable_grad():
            node = parameter.expand_as(parameter).grad_fn
    finally:
        if frozen:
            parameter.requires_grad_(False)
    assert node is not None
    accumulator = node.next_functions[0][0]
    assert accumulator is not None
    return accumulator


def shown_in_profiles(name: str) -> AbstractContextManager[Any]:
    """Give what is done inside a name in a profile, if one is being taken on this thread."""
    is_taken = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return torch.autograd.profiler.record_function(name) if is_taken else _UNSEEN


def flatten(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Copy tensors behind each other into one new flat tensor."""
    flat: torch.Tensor = torch._C._nn.flatten_dense_tensors(tensors)
    return flat


def unflatten(flat: torch.Tensor, like: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """View a flat tensor as contiguous tensors of the given shapes."""
    views: Sequence[torch.Tensor] = torch._C._nn.unflatten_dense_tensors(flat, like)
    return views


def leaves_below(outputs: Iterable[Any]) -> set[int]:
    """Return the ``id`` of every leaf tensor that a backward from ``outputs`` would reach.

    Walks the graph: only after a failure, or when a module has got other parameters.
    """
    nodes = [getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs]
    stack = [node for node in nodes if node is not None]
    seen, leaves = set(stack), set()
    while stack:
        node = stack.pop()
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        if hasattr(node, "run_function"):  # a re-entrant checkpoint hides what it is going to compute again
            leaves |= _parameters_in(node.run_function)
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                stack.append(below)
    return leaves


def _parameters_in(function: Any, depth: int = 4) -> set[int]:
    """Return the ``id`` of every parameter of the modules that a function is, is bound to, or closes over."""
    if isinstance(function, torch.nn.Module):
        return {id(parameter) for parameter in function.parameters()}
    if isinstance(function, torch.Tensor):
        return {id(function)}
    if depth == 0:
        return set()
    cells = getattr(function, "__closure__", None) or ()
    inner = [getattr(function, name, None) for name in ("__self__", "func", "args", "__wrapped__")]
    inner += [cell.cell_contents for cell in cells if cell != type(cell)()]
    inner += list(function) if isinstance(function, list | tuple) else []
    return set().union(*(_parameters_in(part, depth - 1) for part in inner if part is not None))


def take_over_optimizers(parameters: Iterable[torch.Tensor]) -> dict[int, Sequence[Any]]:
    """Return, by the parameters' ids, the optimizers that ``_apply_optimizer_in_backward`` has attached.

    Its hooks, which would step before the reduction, are taken off.
    """
    owned = [p for p in parameters if hasattr(p, "_in_backward_optimizers")]
    if not owned:
        return {}
    from torch.distributed.optim import apply_optimizer_in_backward as attached

    for parameter in owned:
        handles: Any = attached.param_to_optim_hook_handle_map
        for handle in handles.get(parameter, ()):
            handle.remove()
    return {id(p): p._in_backward_optimizers for p in owned}


def is_dtensor(tensor: object) -> bool:
    """Tell whether a tensor is a DTensor. Where their module is not loaded there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor: the tensor itself, outside of any graph."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def placed_like(part: torch.Tensor, like: Any) -> Any:
    """Return a DTensor that has this very part here, and is placed like another."""
    from torch.distributed.tensor import DTensor

    make: Any = DTensor
    # Made around the other's part: copies of a DTensor fail in torch if it was made around a view.
    placed = make(like._local_tensor, like._spec, requires_grad=False)
    placed._local_tensor = part
    return placed


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a functional collective has computed, once it is there; any other tensor as it is."""
    wait = getattr(tensor, "wait", None)
    return tensor if wait is None else wait()


def take_over_localizing(module: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Return the parameters that torch's transform has made plain, each with a DTensor placed as before.

    The transform's hooks, which would replace the parameters in each forward, are taken off.
    """
    found = [parameter for parameter in module.parameters() if hasattr(parameter, "_st_info")]
    if not found:
        return []
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ddp

    theirs: Any = (ddp._reconstruct_dtensor, ddp._localize_dtensor)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in theirs]:
            hooks.pop(key)
    make: Any = DTensor
    return [(p, make(p.detach(), p._st_info, requires_grad=p.requires_grad)) for p in found]


def takes_hooks(module: torch.nn.Module) -> bool:
    """Tell whether functions can be hung around a module's forward; a scripted one refuses them."""
    scripted: Any = torch.jit.RecursiveScriptModule  # type: ignore[attr-defined]
    return not isinstance(module, scripted)


def agent_is_set() -> bool:
    """Tell whether this process takes part in RPC, without which there is no distributed autograd."""
    return bool(_agent_probe()())


@cache
def _agent_probe() -> Callable[[], bool]:
    import torch.distributed as dist

    if not dist.is_available() or not dist.rpc.is_available():
        return bool  # of nothing: False
    rpc: Any = dist.rpc
    probe: Callable[[], bool] = rpc._is_current_rpc_agent_set
    return probe


def context_number() -> int | None:
    """Return the number of the distributed autograd context that this thread computes in, if any."""
    if not agent_is_set():
        return None
    import torch.distributed as dist

    autograd: Any = dist.autograd
    try:
        return int(autograd._current_context()._context_id())
    except RuntimeError:  # an agent, but no context
        return None


def context_is_live(number: int) -> bool:
    """Tell whether this process knows a distributed autograd context that has not ended."""
    if not agent_is_set():
        return False
    import torch.distributed as dist

    autograd: Any = dist.autograd
    try:
        autograd._is_valid_context(number)
    except RuntimeError:
        return False
    return True


def context_is_ours(number: int) -> bool:
    """Tell whether a distributed autograd context was made by this process."""
    import torch.distributed as dist

    rpc: Any = dist.rpc
    return int(rpc.get_worker_info().id) == number >> _WORKER_SHIFT


def gradients_in_context(number: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients of a distributed autograd context: the tensors themselves."""
    import torch.distributed as dist

    autograd: Any = dist.autograd
    found: dict[torch.Tensor, torch.Tensor] = autograd.get_gradients(number)
    return found


def before_clipping(check: Callable[[Sequence[torch.Tensor]], None]) -> None:
    """Have ``check`` called with the parameters whose gradients ``clip_grad_norm_`` is about to clip."""
    clipping: Any = torch.nn.utils.clip_grad
    clip = getattr(clipping, _CLIP)

    def check_and_clip(parameters: Any, *args: Any, **kwargs: Any) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        check(parameters)
        clip(parameters, *args, **kwargs)

    setattr(clipping, _CLIP, check_and_clip)


class StepChecker(Protocol):
    """Who looks before an optimizer steps on the gradients of a context, in the process that owns them."""

    def before_remote_step(self, context: int, parameters: Sequence[torch.Tensor]) -> None:
        """Raise if the optimizer of these parameters must not step."""

    def during_remote_step(self) -> AbstractContextManager[None]:
        """Surround a step of an ordinary optimizer on such gradients."""

    def meant(self, error: BaseException) -> BaseException:
        """Return what was raised by before_remote_step(), wherever that ran; or the error itself."""


_step_checkers: list[StepChecker] = []  # at most one: the guard's


@torch.jit.ignore  # type: ignore[untyped-decorator]
def _check_scripted_step(context: int, parameters: list[torch.Tensor]) -> None:
    for checker in _step_checkers:
        checker.before_remote_step(context, parameters)


class _CheckedScript(torch.nn.Module):
    """A scripted optimizer that asks before it steps. Called in the place of torch's own."""

    make: Callable[..., Any]
    compile_lock: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.inner = type(self).make(*args, **kwargs)

    @torch.jit.export
    def step(self, autograd_ctx_id: int) -> None:
        _check_scripted_step(autograd_ctx_id, self.inner._local_params)
        self.inner.step(autograd_ctx_id)


def check_remote_steps(checker: StepChecker) -> None:
    """Have a checker asked before every step of a DistributedOptimizer, for as long as the process lives.

    That imports the optimizers, and takes seconds: to be called when RPC is in use.
    """
    if _step_checkers:
        return
    _step_checkers.append(checker)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.script, that torch itself uses
        from torch.distributed.optim import optimizer

    theirs: Any = optimizer
    step, step_all = theirs._LocalOptimizer.step, theirs.DistributedOptimizer.step

    def check_and_step(local: Any, context: int) -> None:
        checker.before_remote_step(context, local._local_params)
        with checker.during_remote_step():
            step(local, context)

    def step_and_tell(remote: Any, context: int) -> None:
        # Those of this process that were scripted before anybody could look into them.
        for parameters in _scripted_here(remote):
            checker.before_remote_step(context, parameters)
        try:
            step_all(remote, context)
        except Exception as error:
            raise checker.meant(error) from None

    theirs._LocalOptimizer.step = check_and_step
    theirs.DistributedOptimizer.step = step_and_tell
    _CheckedScript.make, _CheckedScript.compile_lock = (
        theirs._ScriptLocalOptimizer,
        theirs._ScriptLocalOptimizer.compile_lock,
    )
    theirs._ScriptLocalOptimizer = _CheckedScript


def _scripted_here(remote: Any) -> Iterable[Sequence[torch.Tensor]]:
    """Yield the parameters of a DistributedOptimizer's scripted parts in this process."""
    for reference in remote.remote_optimizers:
        if reference.is_owner():
            part = reference.local_value()
            if hasattr(part, "_local_params"):
                yield list(part._local_params)


def unnoticed_by_autograd(tensors: tuple[torch.Tensor, ...]) -> AbstractContextManager[Any]:
    """Let tensors be written inside although a forward has saved them whose backward is still to come."""
    autograd: Any = torch.autograd
    context: AbstractContextManager[Any] = autograd._unsafe_preserve_version_counter(tensors)
    return context


def backend_of(group: Any, device: str) -> str | None:
    """Name the backend of a process group that serves a kind of device, if one does."""
    try:
        return str(group._get_backend(torch.device(device)).name())
    except RuntimeError:
        return None


def timeout_of(group: Any, device: torch.device) -> float:
    """Return how many seconds a process group waits for its slowest rank."""
    try:
        limit: timedelta = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return 1800.0
    return limit.total_seconds()


def sequence_of(group: Any) -> int:
    """Count the collectives that a process group has started, where its backend counts them."""
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return 0


def store_of(group: Any) -> Any:
    """Return the key-value store through which the ranks of a process group have met, or None."""
    from torch.distributed import distributed_c10d as c10d

    for find in (lambda: group.get_group_store(), lambda: c10d._get_process_group_store(group)):
        try:
            return find()
        except (AttributeError, KeyError, RuntimeError):
            continue
    return None


def current_task() -> int:
    """Return the number of the backward that this thread works for; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


class EndListener(Protocol):
    """Who wants to know that a backward ends. ``name`` puts several in the same order on every rank."""

    name: bytes

    def on_backward_over(self) -> None:
        """Hear, before anybody closes, that the backward has computed everything."""

    def on_backward_end(self) -> None:
        """Close the backward. Like the one before, called by the engine in the streams of its caller."""


class BackwardListener(EndListener, Protocol):
    """Who wants to know how every backward begins and ends."""

    @property
    def parameters(self) -> Iterable[torch.Tensor]:
        """Those whose gradients it waits for."""

    def on_nested_begin(self) -> None:
        """Hear that a backward is going to run inside a backward of this thread."""

    def on_nested_end(self) -> None:
        """Hear that a backward inside a backward has ended; this thread is back in the outer one."""

    def on_backward_begin(self, leaves: Callable[[], set[int]]) -> None:
        """Hear that an outermost backward starts.

        ``leaves`` returns the ids of the tensors whose gradient it computes.
        """

    def on_backward_left(self) -> None:
        """Hear that an outermost backward has ended, in whatever way."""

    def on_backward_failing(self, error: BaseException, leaves: Callable[[], set[int]]) -> None:
        """Hear that an outermost backward raised, on the thread that had started it. Wait for nobody.

        ``leaves`` returns the ids of the tensors whose gradient it was to compute.
        """

    def on_backward_raised(self, error: BaseException) -> None:
        """Settle with the other ranks that the backward raised. Every listener has been told before."""


class _EngineWatch(Sentry[Any]):
    """Stands at the one Python door of the autograd engine while somebody listens.

    The engine's own callbacks tell when a backward has ended. They stay silent when it raises, and a callback
    queued inside a nested backward (re-entrant checkpointing) fires at the nested end. Both are visible here.
    A listener hears of the backwards of its own place (see paceline.places).
    """

    def __init__(self) -> None:
        super().__init__()
        self._depth = threading.local()
        self._ending: dict[int, list[Any]] = {}
        self._entry: Callable[..., Any] | None = None
        self.making_graphs = 0  # backwards under way with create_graph=True, on whatever threads

    def add(self, listener: BackwardListener) -> None:
        self._items.add(listener)
        here().has_come(listener)
        self._stand()

    def remove(self, listener: BackwardListener) -> None:
        place = self._items.discard(listener)
        if place is not None:
            place.has_gone(listener)
        self.forget(listener)
        self._leave_if_idle()

    def _stand(self) -> None:
        if self._entry is None:
            self._entry = getattr(torch.autograd, _DOOR)
            setattr(torch.autograd, _DOOR, self._run)

    def _leave(self) -> None:
        # Somebody may have wrapped us in turn; then the door stays ours, and costs nothing.
        if getattr(torch.autograd, _DOOR) == self._run:
            setattr(torch.autograd, _DOOR, self._entry)
            self._entry = None

    def forget(self, listener: EndListener) -> None:
        """Call a listener no more for backwards that were cut short."""
        # Only this thread works for the tasks that the listener waits for; others may add theirs meanwhile.
        for task, waiting in list(self._ending.items()):
            others = [other for other in waiting if other is not listener]
            if not others:
                self._ending.pop(task, None)
            elif len(others) < len(waiting):
                self._ending[task] = others

    def call_at_end(self, listener: EndListener) -> list[Any]:
        """Have a listener called when the backward that this thread works for ends.

        Returns the others that are called, too.

        Several replicas may be reached by one backward, in different orders on different ranks. They are
        closed together, in the order of their names.
        """
        task = current_task()
        waiting = self._ending.setdefault(task, [])
        waiting.append(listener)
        if waiting[0] is listener:  # several threads may be here at once, in distributed autograd
            Variable._execution_engine.queue_callback(partial(self._end, task))
        return [other for other in waiting if other is not listener]

    def _end(self, task: int) -> None:
        listeners = sorted(self._ending.pop(task, ()), key=_name_of)  # none, if they were told to forget it
        for listener in listeners:
            listener.on_backward_over()
        for listener in listeners:
            listener.on_backward_end()

    def in_order(self) -> list[Any]:
        """Return the listeners of this place, in the order of their names: the same on every rank."""
        listeners = self._items.here()
        return sorted(listeners, key=_name_of) if len(listeners) > 1 else listeners

    @staticmethod
    def inside() -> bool:
        """Tell whether this thread is inside a backward."""
        return bool(torch._C._current_graph_task_id() != -1)

    def nested(self) -> bool:
        """Whether this thread is inside a backward that was started by a backward."""
        return getattr(self._depth, "value", 0) > 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run(self, outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        assert self._entry is not None
        if torch._C._current_graph_task_id() != -1:
            return self._run_nested(outputs, *args, **kwargs)
        # torch.autograd.grad writes no .grad, so it is nobody's business here.
        if not kwargs.get("accumulate_grad"):
            return self._entry(outputs, *args, **kwargs)
        listeners = self.in_order()
        makes_graph, inputs = args[2:4] if len(args) > 3 else (False, ())
        leaves = _Leaves(outputs, inputs)
        try:
            for listener in listeners:
                listener.on_backward_begin(leaves)
            self.making_graphs += bool(makes_graph)
            with _keeping_compiled_autograd_out(listeners, leaves):
                return self._entry(outputs, *args, **kwargs)
        except BaseException as error:
            listeners = self.in_order()
            for listener in listeners:
                listener.on_backward_failing(error, leaves)
            for listener in listeners:
                listener.on_backward_raised(error)
            raise
        finally:
            self.making_graphs -= bool(makes_graph)
            for listener in listeners:
                listener.on_backward_left()

    def _run_nested(self, outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        assert self._entry is not None
        self._depth.value = getattr(self._depth, "value", 0) + 1
        for listener in self._items.here():
            listener.on_nested_begin()
        try:
            return self._entry(outputs, *args, **kwargs)
        finally:
            self._depth.value -= 1
            if not self._depth.value:
                for listener in self._items.here():
                    listener.on_nested_end()


class _Leaves:
    """The ids of the tensors whose gradient a backward computes, found out when somebody asks."""

    def __init__(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        self._outputs = outputs
        self._inputs = inputs
        self._found: set[int] | None = None

    def __call__(self) -> set[int]:
        if self._found is None:
            inputs = self._inputs
            self._found = {id(tensor) for tensor in inputs} if inputs else leaves_below(self._outputs)
        return self._found


def _keeping_compiled_autograd_out(
    listeners: Sequence[BackwardListener], leaves: Callable[[], set[int]]
) -> AbstractContextManager[Any]:
    """Run a backward that somebody listens to by the engine: compiled autograd traces what listens."""
    compiler: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiler is None or not compiler.compiled_autograd_enabled:
        return nullcontext()
    if all(leaves().isdisjoint(map(id, listener.parameters)) for listener in listeners):
        return nullcontext()
    _say_that_compiled_autograd_is_out()
    context: AbstractContextManager[Any] = compiler._disable()
    return context


@cache
def _say_that_compiled_autograd_is_out() -> None:
    logging.getLogger("paceline").warning(
        "compiled autograd is on; the backwards of replicated models go without it, so that their gradients "
        "are reduced"
    )


def _name_of(listener: EndListener) -> bytes:
    return listener.name


engine_watch = _EngineWatch()


class PassListener(Protocol):
    """Who wants to know of the passes of distributed autograd whose backward is called in this process."""

    name: bytes

    def turn_of(self, context: int) -> AbstractContextManager[Any]:
        """Wait inside until no other pass through the same parameters runs a backward."""

    def on_pass_begin(self, context: int) -> None:
        """Hear that the backward of a pass starts."""

    def on_pass_returned(self, context: int) -> None:
        """Look at what it has left, and raise if that is wrong."""

    def on_pass_failing(self, context: int, error: BaseException) -> None:
        """Hear that it raised. Wait for nobody."""

    def on_pass_raised(self, context: int, error: BaseException) -> BaseException | None:
        """Settle with the other ranks that it raised; return what has been raised here in its course."""

    def on_pass_left(self, context: int) -> None:
        """Hear that it has ended, in whatever way."""


class _PassWatch(Sentry[Any]):
    """Stands at ``torch.distributed.autograd.backward`` while somebody listens.

    Its engine says neither which pass a gradient is of, nor that a pass has failed, and it makes a plain
    RuntimeError of every exception. All three are known here, in the process that calls it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._present = threading.local()
        self._entry: Callable[..., Any] | None = None
        self._failed: deque[tuple[float, Any]] = deque(maxlen=FAILED_CONTEXTS)

    def add(self, listener: PassListener) -> None:
        self._items.add(listener)
        self._stand()

    def remove(self, listener: PassListener) -> None:
        self._items.discard(listener)
        self._leave_if_idle()

    @property
    def context(self) -> int | None:
        """The context whose backward this thread has called, and is in."""
        return getattr(self._present, "context", None)

    def _stand(self) -> None:
        import torch.distributed as dist

        if self._entry is None and dist.is_available() and dist.autograd.is_available():
            self._entry = getattr(dist.autograd, _PASS)
            setattr(dist.autograd, _PASS, self._run)

    def _leave(self) -> None:
        import torch.distributed as dist

        if self._entry is not None and getattr(dist.autograd, _PASS) == self._run:
            setattr(dist.autograd, _PASS, self._entry)
            self._entry = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run(self, context_id: int, *args: Any, **kwargs: Any) -> None:
        assert self._entry is not None
        listeners = sorted(self._items.here(), key=_name_of)
        with ExitStack() as turns:
            for listener in listeners:  # in one order on every thread
                turns.enter_context(listener.turn_of(context_id))
            before, self._present.context = self.context, context_id
            try:
                self._forget_failed()
                for listener in listeners:
                    listener.on_pass_begin(context_id)
                self._entry(context_id, *args, **kwargs)
                for listener in listeners:
                    listener.on_pass_returned(context_id)
            except BaseException as error:
                self._keep_failed(context_id)
                for listener in listeners:
                    listener.on_pass_failing(context_id, error)
                for known in [listener.on_pass_raised(context_id, error) for listener in listeners]:
                    if known is not None and known is not error:
                        raise known from None
                raise
            finally:
                self._present.context = before
                for listener in listeners:
                    listener.on_pass_left(context_id)

    def _keep_failed(self, number: int) -> None:
        """Keep a context in memory whose parts may fail still.

        When torch hears of that, it writes to the context whether it is there or not (context.cpp,
        addOutstandingRpc): another pass fails with this one's error, or the process dies.
        """
        autograd: Any = torch.distributed.autograd
        with suppress(RuntimeError):  # it has ended already
            self._failed.append((time.monotonic(), autograd._retrieve_context(number)))

    def _forget_failed(self) -> None:
        with suppress(IndexError):  # several threads may be here at once
            while self._failed[0][0] < time.monotonic() - LATE_SECONDS:
                self._failed.popleft()


pass_watch = _PassWatch()


@dataclass(frozen=True)
class Drawn:
    """What was drawn from an iterator of a DataLoader so far: how many batches, and when the last one."""

    iterator: object
    count: int
    at: int


class _LoaderWatch(threading.local):
    """Counts, by thread, what is drawn from DataLoaders."""

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._draws = 0

    def note(self, iterator: Any) -> None:
        self._draws += 1
        self._counts[iterator] = self._counts.get(iterator, (0, 0))[0] + 1, self._draws

    def drawn(self) -> list[Drawn]:
        """Return what was drawn from each iterator that is still there."""
        if not self._draws:
            return []
        return [Drawn(iterator, *told) for iterator, told in list(self._counts.items())]


@cache
def watch_loaders() -> None:
    """Look at each batch that a DataLoader hands out, for as long as the process lives."""
    from torch.utils.data import dataloader

    kind: Any = dataloader._BaseDataLoaderIter
    draw = kind.__next__

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def draw_and_note(iterator: Any) -> Any:
        batch = draw(iterator)
        loader_watch.note(iterator)
        return batch

    kind.__next__ = draw_and_note


class _ModuleWatch:
    """Counts what changes in the structure of any module: parameters and parts, set or removed."""

    def __init__(self) -> None:
        self.changes = 0
        self._is_on = False

    def start(self) -> None:
        """Look from now on, for as long as the process lives."""
        if not self._is_on:
            self._is_on = True
            modules: Any = torch.nn.modules.module
            modules.register_module_parameter_registration_hook(self._note)
            modules.register_module_module_registration_hook(self._note)
            self._watch_removals()

    def _watch_removals(self) -> None:
        remove: Any = torch.nn.Module.__delattr__  # no hook tells of it

        def remove_and_note(module: torch.nn.Module, name: str) -> None:
            remove(module, name)
            self.changes += 1

        torch.nn.Module.__delattr__ = remove_and_note  # type: ignore[method-assign]

    def _note(self, _module: Any, _name: str, value: Any) -> None:
        self.changes += value is not None


loader_watch = _LoaderWatch()
module_watch = _ModuleWatch()
