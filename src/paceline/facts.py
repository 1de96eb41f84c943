"""What there is to say about a replica, collected for ``explain()``."""

from typing import Any

from torch import nn

from paceline.buffer_policies import Policy
from paceline.comm import GroupComm
from paceline.explain import Facts
from paceline.hooks import name_of
from paceline.settings import Settings
from paceline.sharded import count_sharded


def facts_of(replica: Any) -> Facts:
    """Collect what there is to say about a replica."""
    settings, plan, reducer = replica.settings, replica.plan, replica.reducer
    module = replica._module()
    wrapper = None if replica.wrapper is None else replica.wrapper()
    return Facts(
        type(module).__name__,
        replica.rank,
        replica.size,
        plan,
        backend=backend_name(replica),
        seconds=replica.comm.seconds,
        step=replica.step,
        left_out=sorted(settings.left_out),
        sharded="" if module is None else count_sharded(module.parameters()),
        is_plan_learned=reducer is not None and reducer.is_plan_learned,
        plan_changes=reducer.recorder.plan_changes if reducer else 0,
        hook=name_of(replica.hook),
        unused=settings.unused,
        skip_unused=settings.skip_unused,
        guard=settings.guard,
        buffers=[] if module is None else _buffer_facts(module, settings),
        precision=settings.precision,
        consumer=reducer.wiring.consumer if reducer else None,
        joining=reducer.wiring.joining if reducer else None,
        rows={} if wrapper is None else wrapper.rows_to_explain(),
    )


def _buffer_facts(module: nn.Module, settings: Settings) -> list[tuple[Policy, int]]:
    """Return the policy and the size of each buffer."""
    own = settings.own(module)
    return [
        ("never" if name in own else settings.buffers.of_buffer(name), buffer.nbytes)
        for name, buffer in module.named_buffers()
    ]


def backend_name(replica: Any) -> str:
    """Name what a replica's gradients travel over; nothing for a process alone."""
    comm, kinds = replica.comm, sorted({spec.device.type for spec in replica.plan.specs})
    if comm.own_control() is not None:
        return "threads"  # a rehearsal
    found = [comm.backend_on(kind) for kind in kinds] if isinstance(comm, GroupComm) else []
    return ", ".join(backend for backend in found if backend)
