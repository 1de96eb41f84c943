"""``DistributedDataParallel``: torch's contract on paceline's engine.

The same constructor arguments, attributes, methods and ``module.`` prefix as torch's class, so that a
script switches by its import. Arguments that steer torch's reducer around its own limits are accepted and
have nothing left to do; docs/from-ddp.md goes through them one by one.
"""

import copy
import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable

from paceline.agreement import or_refuse
from paceline.buffer_hooks import BufferHook
from paceline.buffer_policies import Policies, Policy
from paceline.buffers import finish_broadcast, start_broadcast
from paceline.comm import Comm, GroupComm, LonelyComm
from paceline.compile.guarding import untraced
from paceline.ddp_arguments import (
    caps_from,
    check_one_group,
    delayed_names,
    deprecated,
    move_to,
    single_device,
    syncs_buffers,
)
from paceline.errors import words_of
from paceline.finite import Mode, read_mode
from paceline.fused_optim import StepEach, StepInBackward
from paceline.hooks import FromTorch, Hook, average, in_dtype
from paceline.joining import WrapperJoin, WrapperJoinHook, join, last_of
from paceline.logging_data import Notes, logging_data
from paceline.places import here
from paceline.precision import Precision
from paceline.reducer import Reducer
from paceline.replication import Replica, comm_for
from paceline.settings import (
    Settings,
    check_deterministic,
    read_seconds,
    read_timeout,
    reducing_in,
    sparse_in,
)
from paceline.torch_names import (
    BROADCAST_NBYTES,
    ReducerFace,
    mark_precision,
    name_parameters,
    trained,
)
from paceline.torch_private import take_over_optimizers
from paceline.waiting import STALL_SECONDS
from paceline.wiring import Joining

WHEN_ASKED: frozenset[Policy] = frozenset({"before_saving"})


class DistributedDataParallel(nn.Module, Joinable):
    """Wrap a module so that all ranks train it as one, with torch's names for everything."""

    # What torch's composable replicate() sets around a forward, for Dynamo to cut graphs by.
    _active_ddp_module: "DistributedDataParallel | None" = None

    @untraced
    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        deterministic: bool = False,
        check_finite: bool | Mode = False,
        loader_check: bool = True,
        stall_seconds: float = STALL_SECONDS,
        timeout_seconds: float | None = None,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        check_one_group(process_group, device_mesh)
        comm = comm_for(process_group, device_mesh, module)
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.batched_grad_copy = batched_grad_copy
        self.mixed_precision = mixed_precision
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        if check_reduction:
            deprecated("check_reduction has no effect; leave it out")
        self.forward_sync_buffers = syncs_buffers(broadcast_buffers, forward_sync_buffers)
        self.require_forward_param_sync = True
        self._sync_by_default = True
        self._joining = Joining("initial")
        self._notes = Notes()
        self._buffer_hook: BufferHook | None = None

        def read() -> Settings:
            if not isinstance(module, nn.Module):
                raise TypeError(
                    f"DistributedDataParallel wraps a torch.nn.Module, got {type(module).__name__}"
                )
            self.device_ids, self.output_device = single_device(module, device_ids, output_device)
            precision = None if mixed_precision is None else Precision.of(mixed_precision)
            hook = reducing_in(precision, average, module)
            if deterministic:
                check_deterministic(hook, sparse_in(module))
            return Settings(
                caps=caps_from(bucket_cap_mb, bucket_cap_mb_list),
                hook=hook,
                deterministic=deterministic,
                check_finite=read_mode(check_finite),
                loader_check=loader_check,
                stall_seconds=read_seconds("stall_seconds", stall_seconds),
                timeout_seconds=read_timeout(timeout_seconds),
                precision=precision,
                take_state=init_sync,
                buffers=Policies.of("before_saving"),  # or whenever this wrapper asks
                forward_sync_buffers=self.forward_sync_buffers,
                left_out=frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ())),
                delayed=delayed_names(module, delay_all_reduce_named_params, param_to_hook_all_reduce),
                skip_unused=skip_all_reduce_unused_params,
                may_use_differ=find_unused_parameters,
                is_group_chosen=process_group is not None or device_mesh is not None,
            )

        self._settings = or_refuse(comm, read)
        self.parameters_to_ignore = set(self._settings.left_out)
        self.bucket_bytes_cap_list = list(self._settings.caps.nbytes) if bucket_cap_mb_list else []
        self.broadcast_bucket_size = BROADCAST_NBYTES
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.module = module
        self._attach(comm)
        self._lazy_init_ran = False

    @staticmethod
    def _earlier(module: nn.Module) -> Replica | None:
        """Return what an earlier wrapper has attached to a module: the newest wrapper takes it over."""
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        reference = _wrappers.get(inner)
        wrapper = reference() if reference is not None else None
        return wrapper._replica if wrapper is not None else None

    def _attach(self, comm: Comm, original: Replica | None = None) -> None:
        self._group = _GroupReference(comm.group if isinstance(comm, GroupComm | LonelyComm) else None)
        earlier = self._earlier(self.module)
        self._replica: Replica | None = Replica(self.module, comm, self._settings, original, earlier)
        self._replica.wrapper = weakref.ref(self)
        self._replica.due.policies = WHEN_ASKED
        if self._engine is not None:
            self._engine.before_first = weakref.WeakMethod(self._take_over_optimizers)
        self.require_backward_grad_sync = self._sync_by_default
        if self._settings.precision is not None:
            mark_precision(self.module, self._settings.precision.param, self._settings.left_out)
        _wrappers[self.module] = weakref.ref(self)
        # The wrapper is the user's handle: when it goes, the module is plain again and may be wrapped anew.
        weakref.finalize(self, self._replica.end).atexit = False

    # ---- what torch's users and frameworks read --------------------------------------------------

    @property
    def process_group(self) -> Any:
        """The group over which gradients are reduced, or None for a process alone."""
        return self._group.group

    @property
    def reducer(self) -> ReducerFace:
        """The engine, under the names of torch's reducer."""
        return ReducerFace(self._engine)

    @property
    def _engine(self) -> Reducer | None:
        return self._replica.reducer if self._replica else None

    @property
    def device(self) -> torch.device:
        """Where the first parameter is."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @property
    def device_type(self) -> str:
        """The kind of device that the module is on."""
        return self.device.type

    @property
    def is_multi_device_module(self) -> bool:
        """Whether the module's parameters are on several devices."""
        return len({p.device for p in self.module.parameters()}) > 1

    @property
    def broadcast_buffers(self) -> bool:
        """Whether buffers are taken from rank 0 before a forward."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = bool(value)

    @property
    def bucket_bytes_cap(self) -> int:
        """The size that buckets may have, in bytes."""
        return self._settings.caps.nbytes[-1]

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward started now would be reduced. Scripts set it to accumulate without
        ``no_sync()``.
        """
        reducers = self._replica.reducers_in_use() if self._replica else []
        return reducers[-1].around.sync if reducers else self._sync_by_default

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._sync_by_default = bool(value)
        for reducer in self._replica.reducers_in_use() if self._replica else ():
            reducer.around.sync = bool(value)

    # ---- training --------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; buffers are made equal first, as torch does."""
        if torch.compiler.is_compiling():
            return self._forward_in_trace(*inputs, **kwargs)
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"), self._timed():
            output = self._run_ddp_forward(*inputs, **kwargs)
        return self._post_forward(output)

    def _forward_in_trace(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module inside compiled code, where nothing can be exchanged.

        Buffers are made equal at the end of the backward before, in place of before the forward.
        """
        if self._replica is None or self._join_config.enable or self._buffer_hook:
            self._prepare_eagerly()
        elif self.forward_sync_buffers and self.training and torch.is_grad_enabled():
            self._replica.due.is_put_off = True
        if self.device_ids:
            inputs, kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
        return self._run_ddp_forward(*inputs, **kwargs)

    @untraced
    def _prepare_eagerly(self) -> None:
        """Do before a forward what compiled code cannot do; this breaks the graph."""
        self._pre_forward()

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Prepare a forward, and move its inputs to the device."""
        if self._replica is None and torch.is_grad_enabled():
            self._attach(comm_for(self._group.group, None, self.module))
        self._take_over_optimizers()
        self._before_forward()
        if not self.device_ids:
            return inputs, kwargs
        return self.to_kwargs(inputs, kwargs, self.device_ids[0])

    @classmethod
    def _get_active_ddp_module(cls) -> None:
        """Answer Dynamo, which would cut a graph for torch's class: gradients leave ours in one piece."""

    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        """Stand around the forward of subclasses that replace ours."""
        yield

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module itself. Subclasses that call something else of it override this."""
        return self.module(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        """End a forward."""
        self._after_forward()
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        return output

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> tuple[Any, Any]:
        """Move inputs to a device."""
        device = torch.device(self.device_type, device_id)
        return move_to(device, inputs), move_to(device, kwargs)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        recorder = self._engine.recorder if self._engine and torch.is_grad_enabled() else None
        if recorder:
            recorder.forward_begins()
        yield
        if recorder:
            recorder.forward_ends()

    def _before_forward(self) -> None:
        if self._join_config.enable and torch.is_grad_enabled():
            Join.notify_join_context(self)
            self.meet_in_join(joined=False)
        elif self._check_sync_bufs_pre_fwd():
            self._sync_buffers(0)

    def _after_forward(self) -> None:
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers(0)

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward makes the ranks' buffers equal."""
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and self._replica is not None
            and (self._replica.size > 1 or self._buffer_hook is not None)
            and not self._replica.buffers.is_empty()
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of the backwards inside local; the next backward outside reduces their sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def _is_rehearsed(self) -> bool:
        return self._live_replica().comm.own_control() is not None

    # ---- communication hooks ---------------------------------------------------------------------

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Have ``hook(state, bucket) -> Future`` reduce the buckets, from the next backward on.

        A hook of paceline's own goes to ``paceline.replica(model).set_hook(hook)``.
        """
        if self._is_rehearsed and not here().is_pretended:
            raise ValueError(
                "a hook in torch's form communicates over a process group, and a rehearsal has none; "
                "rehearse with one of paceline.hooks"
            )
        with self._noting_errors():
            self._set_hook(FromTorch(state, hook), getattr(hook, "__qualname__", type(hook).__qualname__))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Take one of the hooks that torch has built in, by its name."""
        hooks = {"ALLREDUCE": average, "FP16_COMPRESS": in_dtype(torch.float16, average)}
        self._set_hook(hooks[comm_hook_type.name], str(comm_hook_type))

    def _set_hook(self, hook: Hook, name: str) -> None:
        if self._settings.precision is not None:
            raise ValueError(
                "mixed_precision reduces by a hook of its own, so no other communication hook can be "
                "registered; leave one of them out"
            )
        self._live_replica().set_hook(hook)
        self._notes.hook = name
        self._settings = dataclasses.replace(self._settings, hook=hook)

    def _live_replica(self) -> Replica:
        if self._replica is None:  # loaded from a pickle, and not used yet
            self._attach(comm_for(self._group.group, None, self.module))
        assert self._replica is not None
        return self._replica

    # ---- the optimizer inside backward -----------------------------------------------------------

    def _register_fused_optim(
        self, optim: type[torch.optim.Optimizer], *args: Any, optim_params: Any = None, **kwargs: Any
    ) -> None:
        """Make an optimizer whose steps run inside backward, bucket by bucket."""
        if not isinstance(optim, type) or not issubclass(optim, torch.optim.Optimizer):
            raise ValueError(
                f"Optimizer {optim!r} does not have a functional counterpart, or anything that could step a "
                "bucket; give a class of torch.optim's"
            )
        parameters = [p for p in self._live_replica().parameters() if p.requires_grad]
        chosen = parameters if optim_params is None else list(optim_params)
        self._live_replica().set_consumer(StepInBackward(optim(chosen, *args, **kwargs)))

    def _take_over_optimizers(self) -> None:
        """Let optimizers that torch has put into backward wait for the reduced gradients."""
        if self._lazy_init_ran or self._replica is None:
            return
        self._lazy_init_ran = True
        optimizers = take_over_optimizers(self._replica.parameters())
        if optimizers and self._engine is not None:
            self._live_replica().set_consumer(StepEach(optimizers))

    # ---- buffers ---------------------------------------------------------------------------------

    def _register_buffer_comm_hook(
        self, state: Any, hook: Any, comm_hook_location: Any = "POST_FORWARD"
    ) -> None:
        """Have ``hook(state, {name: buffer})`` make the buffers equal, before or after each forward."""
        self._buffer_hook = BufferHook.of(state, hook, comm_hook_location)

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that are made equal, by name."""
        return self._replica.buffers.named() if self._replica else {}

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """The buffers that are made equal."""
        return list(self.named_module_buffers.values())

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Take one rank's buffers, or other tensors. For buffer hooks: every rank calls this."""
        tensors = self.modules_buffers if bufs is None else bufs
        finish_broadcast(start_broadcast(tensors, self._live_replica().comm, authoritative_rank))

    def _check_sync_bufs_pre_fwd(self) -> bool:
        """Tell whether the next forward makes the buffers equal before it runs."""
        return self.will_sync_module_buffers() and not self._has_buffer_hook("POST_FORWARD")

    def _check_sync_bufs_post_fwd(self) -> bool:
        """Tell whether it does so afterwards."""
        return self.will_sync_module_buffers() and self._has_buffer_hook("POST_FORWARD")

    def _has_buffer_hook(self, location: str) -> bool:
        return self._buffer_hook is not None and self._buffer_hook.location == location

    def _sync_buffers(self, source: int = 0, *, is_trained: bool = True) -> None:
        """Make the buffers equal; ``is_trained`` says that a backward follows here."""
        replica = self._live_replica()
        if self._buffer_hook is None:
            replica.sync_buffers(source, in_passing=True)
            return
        futures = self._buffer_hook.run(self.named_module_buffers)
        replica.buffers.forget()
        if self._engine is not None and is_trained and torch.is_grad_enabled():
            self._engine.wait_at_end(futures)
        else:
            for future in futures:
                future.wait()

    # ---- ranks that run out of batches -----------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join | AbstractContextManager[None]:
        """Train inside although the ranks have different numbers of batches."""
        if self._is_rehearsed:  # torch's own needs a process group
            divide_by: Literal["initial", "active"] = "initial" if divide_by_initial_world_size else "active"
            early: Literal["stop", "continue"] = "stop" if throw_on_early_termination else "continue"
            return join(self, divide_by=divide_by, early=early) if enable else nullcontext()
        return WrapperJoin(
            self,
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> WrapperJoinHook:
        """Return what torch's ``Join`` calls on ranks that have run out of batches."""
        initial = kwargs.get("divide_by_initial_world_size", True)
        return WrapperJoinHook(self, Joining("initial" if initial else "active"))

    @property
    def join_device(self) -> torch.device:
        """Where the tensors of torch's ``Join`` are."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The group whose ranks join."""
        return self.process_group

    def begin_join(self, joining: Joining) -> None:
        """Remember how ranks that run out are treated. Called when torch's ``Join`` is made."""
        replica = self._live_replica()
        if replica.is_joining:
            raise RuntimeError("join() inside join(): end the outer block first")
        if self._engine is not None:
            self._engine.check_may_join()
        self._joining = joining
        self._notes.has_joined = True

    def leave_join(self) -> None:
        """Forget the block, however it has ended."""
        self._join_config = type(self._join_config).construct_disabled_join_config()
        self._live_replica().leave_join()

    def meet_in_join(self, *, joined: bool) -> bool:
        """Agree on one iteration inside ``join()``: whose buffers are taken, and if a reduction follows.

        Every rank comes here once for each forward that some rank runs.
        """
        reducer = self._engine
        if reducer is None:
            return False
        reducer.set_joining(self._joining)
        plans = (self.require_backward_grad_sync, self.will_sync_module_buffers())
        told = reducer.exchange(b"join", b"-" if joined else b"%d%d" % plans)
        active = [rank for rank, frame in enumerate(told) if frame != b"-"]
        # A rank without a forward takes part at once in what the others do after theirs.
        is_due_here = joined or not self._has_buffer_hook("POST_FORWARD")
        if any(told[rank].endswith(b"1") for rank in active) and is_due_here:
            self._sync_buffers(active[-1], is_trained=not joined)  # as torch chooses
        follows = any(told[rank].startswith(b"1") for rank in active)
        if joined:
            self.require_forward_param_sync = follows
        return follows

    def keep_company(self) -> None:
        """Take part in the others' next backward with nothing to add."""
        self._live_replica().keep_company()

    def end_join(self, *, is_last: bool) -> None:
        """Take the weights of a rank that has finished last. Called by torch's ``Join`` on every rank."""
        self._join_config = type(self._join_config).construct_disabled_join_config()
        if self._engine is not None:
            self._engine.set_joining(None)
            claims = self._engine.exchange(b"last", b"%d" % is_last)
            self._authoritative_rank = last_of(claims)
            self._live_replica().take_parameters(self._authoritative_rank)
            if self.forward_sync_buffers:
                self._live_replica().sync_buffers(self._authoritative_rank)

    # ---- figures ---------------------------------------------------------------------------------

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """Return what torch's class returns; ``paceline.replica(model).stats()`` says more."""
        return logging_data(self, self._live_replica(), self._notes)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Time the first ten steps, and then every n-th."""
        with self._noting_errors():
            self._live_replica().sample_stats(every=sample_rate)

    def rows_to_explain(self) -> dict[str, str]:
        """Say what ``paceline.replica(model).explain()`` cannot know: what this wrapper does itself."""
        count = len(self._live_replica().buffers.named())
        if not count or not self.forward_sync_buffers:
            return {}
        how = "rank 0's" if self._buffer_hook is None else "by a hook of their own"
        when = "after" if self._has_buffer_hook("POST_FORWARD") else "before"
        return {"buffers": f"{count}, made equal {when} each forward that follows a reduced backward: {how}"}

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._notes.error = words_of(error)
            raise

    # ---- what else torch has ---------------------------------------------------------------------

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Leave parameters and buffers to each rank; to be called before the module is wrapped."""
        module._ddp_params_and_buffers_to_ignore = list(params_and_buffers_to_ignore)  # type: ignore[assignment]

    def _set_static_graph(self) -> None:
        """Accept torch's hint; nothing depends on it here."""
        self.static_graph = True

    def _update_process_group(self, new_process_group: Any) -> None:
        """Go on with the ranks of another group. Every rank of it calls this."""
        replica = self._live_replica()
        replica.change_group(new_process_group)
        self._group = _GroupReference(replica.comm.group if isinstance(replica.comm, GroupComm) else None)

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """Yield the parameters that a wrapper of this module reduces."""
        return trained(module) if named_params else (parameter for _, parameter in trained(module))

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Return the trained parameters, and for each whether its gradient is expected to be sparse."""
        parameters = [p for _, p in trained(self.module) if p.requires_grad]
        plan = self._live_replica().plan
        sparse = {plan.specs[index].name for index in plan.sparse}
        names = name_parameters(self.module, parameters)
        return parameters, [names[place] in sparse for place in range(len(parameters))]

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[torch.Tensor]) -> dict[int, str]:
        """Map the places of the trained parameters to their names."""
        return name_parameters(self.module, parameters)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether the plan follows the order in which gradients were seen to arrive.

        torch's optimizers inside hooks wait for it, and expect to wait longer for a static graph.
        """
        backwards = 2 if self.static_graph else 1
        return self._engine is not None and self._engine.is_plan_learned and self._engine.step >= backwards

    @property
    def _distributed_rank(self) -> int:
        return self._live_replica().rank

    def _remove_autograd_hooks(self) -> None:
        """Stop watching the parameters: the module is plain again."""
        if self._replica is not None:
            self._replica.detach()

    def _check_reducer_finalized(self) -> None:
        """Raise if a backward is still running."""
        if self._engine is not None:
            self._engine.check_idle()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Accept torch's switch; nothing is cloned here."""

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[int]) -> Any:
        """Move inputs to the one device."""
        device = torch.device(self.device_type, device_ids[0])
        return [move_to(device, inputs)], [move_to(device, kwargs)]

    def gather(self, outputs: Sequence[Any], output_device: Any) -> Any:
        """Return the one device's output."""
        return outputs[0]

    # ---- copies and pickles ----------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Leave the engine behind: what is loaded starts its own at the first forward with gradients."""
        hook = self._replica.hook if self._replica is not None else self._settings.hook
        return {
            **self.__dict__,
            "_replica": None,
            "_settings": dataclasses.replace(self._settings, hook=hook),
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> "DistributedDataParallel":
        """Copy the module; the copy is watched from the start, and no rank has to wait for the others."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        twin.require_forward_param_sync = False
        if self._replica is not None:
            twin._attach(self._replica.comm, self._replica)
        return twin


# The newest wrapper of each module. Weak on both sides: a wrapper holds its module.
_wrappers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[DistributedDataParallel]]
_wrappers = weakref.WeakKeyDictionary()


class _GroupReference:
    """A process group inside a module's state: shared by copies, forgotten by pickles."""

    def __init__(self, group: Any = None) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> "_GroupReference":
        return self

    def __reduce__(self) -> Any:
        return (_GroupReference, ())
