"""Every private torch name that paceline needs, so that a new torch release breaks one file.

Seen on torch 2.11 (Python 3.12, CUDA) and 2.13 (Python 3.11, CPU):

    torch._C._current_graph_task_id            which backward this thread works for; -1 outside of one
    torch.autograd._engine_run_backward        the Python function through which backward() enters the engine
    Variable._execution_engine.queue_callback  run a function when the current backward ends
    torch._C._nn.flatten_dense_tensors         many tensors into one, in one call
    torch._C._nn.unflatten_dense_tensors       and back, as views
    torch._C._storage_Use_Count                how many tensors lie in one memory
    RemovableHandle.hooks_dict_ref, .id        where a hook stands among others
    torch._chunk_cat                           many tensors into one, on a GPU by one kernel for any number
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
    torch.jit._recursive.create_script_module  how it makes one
    torch.autograd._profiler_enabled           whether anybody would see a name in a profile
"""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch.autograd import Variable

Node = torch.autograd.graph.Node
CFuture = torch._C.Future  # what a collective's get_future() returns
NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl

_UNSEEN = nullcontext()
_DOOR = "_engine_run_backward"
_CLIP = "_clip_grads_with_norm_"
_PASS = "backward"  # of torch.distributed.autograd
_WORKER_SHIFT = 48  # a context's number has its maker's worker id above this bit


def put_first(handle: Any) -> None:
    """Have a hook called before all others of its kind."""
    handle.hooks_dict_ref().move_to_end(handle.id, last=False)


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


def is_held(parameter: torch.Tensor, *, in_own_memory: bool = True) -> bool:
    """Tell whether anybody but the caller, who has it once, holds a parameter's gradient.

    A gradient ``in_own_memory`` is held as well by who holds another tensor in that memory.
    """
    return _holders_of(parameter, in_own_memory) > _holders_if_alone(in_own_memory)


def _holders_of(parameter: torch.Tensor, in_own_memory: bool) -> int:
    gradient: Any = parameter.grad
    users = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) if in_own_memory else 0
    return sys.getrefcount(gradient) + users


@cache
def _holders_if_alone(in_own_memory: bool) -> int:
    parameter = torch.zeros(1, device="cpu", requires_grad=True)
    parameter.grad = torch.zeros(1, device="cpu")
    gradient = parameter.grad
    count = _holders_of(parameter, in_own_memory)
    del gradient
    return count


def flatten(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Copy tensors behind each other into one new flat tensor."""
    flat: torch.Tensor = torch._C._nn.flatten_dense_tensors(tensors)
    return flat


def flatten_crowd(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Do the same on a GPU for any number of tensors by one kernel, which reads where they are from memory.

    None may be empty, or a single number. Not while a graph is recorded: that memory is gone when it is run.
    """
    flat: torch.Tensor = torch._chunk_cat(tensors, 0, 1)
    return flat.squeeze_(0)  # no view: what is handed out later has to be a view of this very tensor


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


def around_scripting(inside: Callable[[torch.nn.Module], AbstractContextManager[None]]) -> None:
    """Have every module that ``torch.jit`` compiles compiled inside a context."""
    maker: Any = torch.jit._recursive
    make = maker.create_script_module

    def make_inside(module: Any, *args: Any, **kwargs: Any) -> Any:
        with inside(module):
            return make(module, *args, **kwargs)

    maker.create_script_module = make_inside


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


def counters_of(group: Any) -> list[Callable[[], int]]:
    """Return what counts the collectives that a process group has started, for each backend that does."""
    backends: list[Any] = []
    for kind in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):  # none for this kind
            backend = group._get_backend(torch.device(kind))
            if not any(backend is other for other in backends):
                backends.append(backend)
    counters = []
    for backend in backends:
        with contextlib.suppress(AttributeError, RuntimeError):
            backend._get_sequence_number_for_group()
            counters.append(backend._get_sequence_number_for_group)
    return counters


def store_of(group: Any) -> Any:
    """Return the key-value store through which the ranks of a process group have met, or None."""
    from torch.distributed import distributed_c10d as c10d

    for find in (lambda: group.get_group_store(), lambda: c10d._get_process_group_store(group)):
        try:
            if (store := find()) is not None:
                return store
        except (AttributeError, KeyError, RuntimeError):
            continue
    return None


def host_of(store: Any) -> str | None:
    """Return the host at which the ranks of a store have met, if it has one."""
    while store is not None:
        if host := getattr(store, "host", None):
            return str(host)
        store = getattr(store, "underlying_store", None)
    return None


def current_task() -> int:
    """Return the number of the backward that this thread works for; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def call_when_backward_ends(function: Callable[[], None]) -> None:
    """Have a function called at the end of the backward that this thread works for."""
    Variable._execution_engine.queue_callback(function)


def engine_door() -> Callable[..., Any]:
    """Return the Python function through which every backward enters the engine."""
    door: Callable[..., Any] = getattr(torch.autograd, _DOOR)
    return door


def set_engine_door(door: Callable[..., Any]) -> None:
    """Put another function in its place."""
    setattr(torch.autograd, _DOOR, door)


def compiled_autograd() -> Any:
    """Return the module of compiled autograd if it is in use, else None."""
    compiler: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiler if compiler is not None and compiler.compiled_autograd_enabled else None


def without_compiled_autograd(compiler: Any) -> AbstractContextManager[Any]:
    """Let backwards inside be run by the engine, which compiled autograd would trace."""
    context: AbstractContextManager[Any] = compiler._disable()
    return context


def pass_door() -> Callable[..., Any] | None:
    """Return the function by which a pass of distributed autograd is run, where there is one."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.autograd.is_available():
        return None
    door: Callable[..., Any] = getattr(dist.autograd, _PASS)
    return door


def set_pass_door(door: Callable[..., Any]) -> None:
    """Put another function in its place."""
    setattr(torch.distributed.autograd, _PASS, door)


def context_of(number: int) -> Any:
    """Return a distributed autograd context, which holding on to keeps in memory. Raises if it has ended."""
    autograd: Any = torch.distributed.autograd
    return autograd._retrieve_context(number)


def loader_iterators() -> Any:
    """Return the class of everything that iterates over a DataLoader."""
    from torch.utils.data import dataloader

    return dataloader._BaseDataLoaderIter


def remote_optimizers() -> Any:
    """Return the module of torch's DistributedOptimizer. Imports it, which takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit.script, that torch itself uses
        from torch.distributed.optim import optimizer
    return optimizer
