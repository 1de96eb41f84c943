"""One rank of a large world in which nobody else is there: a fake process group, and frames that echo.

The engine runs as it would; its collectives go to a group that answers at once, and where it asks the other
ranks, each of them says what this rank says, or what it has said in a run before. Everything is written down.

Private names of torch, seen in 2.11 and 2.13: ``torch.testing._internal.distributed.fake_pg`` (registers the
backend "fake"), ``distributed_c10d._new_group_with_tag``,
``torch.autograd._engine_run_backward``, and two functions that empty caches of ``torch.distributed.tensor``.
"""

import json
import os
import random
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils.data import DataLoader

from paceline.agreement import traits_of
from paceline.call_site import users_line
from paceline.collective_log import FRAME, NEW_GROUP, Collective, Group, name_bytes
from paceline.comm import Comm, GroupComm, Pending, SoloComm
from paceline.control import Control
from paceline.fake_tensors import Listener, NoValues, exchange_contents, no_values
from paceline.frames import Kind, Opening
from paceline.places import Place, working_at
from paceline.registry import registry
from paceline.torch_collectives import described, known_group
from paceline.watches.modules import module_watch

MACHINE_RANKS = 8  # ranks of one machine, as LOCAL_RANK has it

Said = dict[tuple[bytes, int], bytes]  # by topic and number, a frame
Told = Mapping[tuple[bytes, int], Mapping[int, bytes]]  # and by rank, where it is known what others say


class Seat(Place):
    """Where one rank of a fake world works."""

    is_pretended = True

    def __init__(self, rank: int, size: int, told: Told) -> None:
        super().__init__()
        self.rank = rank
        self.size = size
        self.log: list[Collective] = []
        self.told = told
        self.says: Said = {}
        self.reducers: dict[bytes, Any] = {}
        self._controls: dict[str, EchoControl] = {}

    def has_come(self, listener: Any) -> None:
        self.reducers[listener.name] = listener

    def over(self, group: Any) -> Comm:
        """Return the comm over a group; who is alone in one has nobody to talk to."""
        if group.size() == 1:
            return SoloComm()
        name = str(group.group_name)
        if name not in self._controls:
            self._controls[name] = EchoControl(self, known_group(group), group.rank())
        return FakeComm(group, self._controls[name])

    def add(self, kind: str, group: Group, **rest: Any) -> None:
        """Write down what this rank does."""
        self.log.append(Collective(kind, group, where=users_line(), **rest))

    def heard(self, name: str, given: Mapping[str, Any]) -> None:
        """Write down a collective of torch."""
        if name != "wait_tensor":
            self.log.append(described(name, given))

    def leave(self) -> None:
        """Take everything off again that replicas have hung up here."""
        for control in self._controls.values():
            for replica in registry.beside(control):
                replica.detach()


# ---- the engine's side ---------------------------------------------------------------------------


class EchoControl(Control):
    """Frames in a world where nobody answers: what this rank says, the others say as well."""

    def __init__(self, seat: Seat, group: Group, rank: int) -> None:
        super().__init__()
        self.label = repr(group.ranks[:1] + group.ranks[-1:]).encode() + b"%d" % group.number
        self.group = group
        self._seat = seat
        self._rank = rank
        self._posted: dict[bytes, deque[bytes]] = defaultdict(deque)
        self._collected: dict[bytes, int] = defaultdict(int)

    def post(self, topic: bytes, frame: bytes) -> None:
        self._posted[topic].append(frame)
        name, _, kind = topic.rpartition(b".")
        if kind == b"opening":
            self._note_opening(name, Opening.unpack(frame))
        else:
            words = f"an exchange of frames ({kind.decode()})"
            self._seat.add(FRAME, self.group, terms=(topic,), note=words, said=frame)

    def ready(self, topic: bytes) -> bool:
        return True

    def collect(self, topic: bytes, seconds: float, waiter: object = None) -> list[bytes]:
        frame = self._posted[topic].popleft()
        if topic.endswith(b".opening"):
            return [frame] * len(self.group.ranks)
        number = self._collected[topic]
        self._collected[topic] += 1
        self._seat.says[topic, number] = frame
        told = {**self._seat.told.get((topic, number), {}), self._seat.rank: frame}
        # Ranks that are not run do as the first one does that is.
        return [told.get(rank, told[min(told)]) for rank in self.group.ranks]

    def numbers_of(self, source: int, numbers: Sequence[int], count: int) -> Sequence[int]:
        """Write down a broadcast of numbers that, unlike other tensors' contents, decide what comes next."""
        topic, frame = self.label + b".numbers", json.dumps([*numbers]).encode()
        self._seat.add(
            "broadcast",
            self.group,
            nbytes=4 * count,
            dtype="int32",
            sizes=(count,),
            terms=(topic, source),
            note=f" from rank {self.group.ranks[source]}",
            said=frame,
        )
        self._posted[topic].append(frame)
        found: list[int] = json.loads(self.collect(topic, 0.0)[source])
        return found

    def _note_opening(self, name: bytes, opening: Opening) -> None:
        reducer = self._seat.reducers[name]
        plan, wiring = reducer.plan, reducer.wiring
        weighted = "no weight" if opening.weight is None else "a weight"
        variant = weighted if opening.kind is Kind.BACKWARD else ""  # who leaves a batch out has neither
        facts = (*plan.lines(), *wiring.terms, f"step {opening.step}", f"{opening.stepped} optimizer steps")
        self._seat.add(
            FRAME,
            self.group,
            terms=(name, opening.step, opening.digest, opening.terms, opening.stepped, _way(opening)),
            note=f"{_title(opening)} of {wiring.title} with {_buckets(plan)}",
            facts=(*facts, *filter(None, [variant])),
            variant=variant,
        )


def _way(opening: Opening) -> str:
    """Tell apart what cannot meet. Ranks may leave out a batch."""
    if opening.kind in (Kind.CHANGED, Kind.LEFT, Kind.JOINED):
        return opening.kind.name
    return ""


def _title(opening: Opening) -> str:
    names = {
        Kind.JOINED: "a step without a batch",
        Kind.CHANGED: "a change of the module",
        Kind.LEFT: "the end",
    }
    return names.get(opening.kind, f"backward {opening.step + 1}")


def _buckets(plan: Any) -> str:
    count = len(plan.buckets)
    total = sum(bucket.nbytes for bucket in plan.buckets)
    return f"{count} bucket{'s' * (count != 1)} of {name_bytes(total)} in all"


class FakeComm(Comm):
    """The collectives of a fake group, and messages that echo."""

    def __init__(self, group: Any, control: EchoControl) -> None:
        self._inner = GroupComm(group)
        self._control = control
        self._facts: tuple[str, ...] = ()
        self.rank = self._inner.rank
        self.size = self.divisor = self._inner.size
        self.seconds = self._inner.seconds

    def own_control(self) -> EchoControl:
        return self._control

    def claim(self, module: torch.nn.Module) -> None:
        self._facts = tuple(f"{name}: {trait}" for name, trait in traits_of(module))

    def mean_factor(self, device: torch.device) -> float:
        return 1 / self.divisor

    def total(self, flat: torch.Tensor) -> Pending:
        return self._inner.total(flat)

    def average(self, flat: torch.Tensor) -> Pending:
        return self.total(flat.mul_(1 / self.divisor))

    def broadcast(self, flat: torch.Tensor, source: int = 0) -> Pending:
        return self._inner.broadcast(flat, source)

    def numbers_of(
        self, source: int, numbers: Sequence[int], count: int, device: torch.device
    ) -> Callable[[], Sequence[int]]:
        found = self._control.numbers_of(source, numbers, count)
        return lambda: found

    def gather(self, flat: torch.Tensor) -> Pending:
        rows = flat.new_empty(self.size, flat.numel())
        dist.all_gather(list(rows.unbind()), flat.reshape(-1), group=self._inner.group)
        return Pending(rows)

    def exchange(self, flat: torch.Tensor) -> Pending:
        rows = flat.new_empty(self.size, flat.numel() // self.size)
        dist.all_to_all_single(rows.view(-1), flat.view(-1), group=self._inner.group)
        return Pending(rows)

    def split(self, size: int) -> Comm:
        inner = self._inner.split(size)
        assert isinstance(inner, GroupComm)
        seat = self._control._seat
        return seat.over(inner.group)

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        facts, self._facts = self._facts, ()
        words = f"an agreement on a model of {len(facts)} tensors" if facts else "an agreement"
        self._control._seat.add(FRAME, self._control.group, terms=(payload,), note=words, facts=facts)
        return [payload] * self.size


# ---- the world around it -------------------------------------------------------------------------


@contextmanager
def seated(rank: int, size: int, told: Told) -> Iterator[Seat]:
    """Be one rank of a world, alone; leave the process as it was."""
    seat = Seat(rank, size, told)
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code communicates as eager
        stack.enter_context(_kept(rank, size))
        stack.enter_context(_forgetting_meshes())
        stack.enter_context(_fake_group(rank, size))
        stack.enter_context(_stand_ins(seat))
        stack.enter_context(working_at(seat))
        stack.callback(seat.leave)
        stack.enter_context(no_values())
        stack.enter_context(Listener(seat.heard))
        stack.enter_context(NoValues())
        yield seat


@contextmanager
def _fake_group(rank: int, size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _forgetting_meshes() -> Iterator[None]:
    """Have DTensor forget what it knows of meshes: it takes another rank's for the same."""
    _forget_meshes()
    try:
        yield
    finally:
        _forget_meshes()


def _forget_meshes() -> None:
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute as redistribute
        from torch.distributed.tensor import debug

        for clear in (debug._clear_sharding_prop_cache, redistribute.clear_redistribute_planner_cache):
            clear()


@contextmanager
def _kept(rank: int, size: int) -> Iterator[None]:
    """Set the environment of a rank; put it back afterwards, and what random numbers come next."""
    machine = min(size, MACHINE_RANKS)
    variables = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank % machine,
        "LOCAL_WORLD_SIZE": machine,
        "GROUP_RANK": rank // machine,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
    }
    python, drawn, dtype = random.getstate(), torch.get_rng_state(), torch.get_default_dtype()
    hook = sys.excepthook  # which torch replaces when a group is made
    numpy: Any = sys.modules.get("numpy")
    numbers = numpy.random.get_state() if numpy is not None else None
    with mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}):
        try:
            yield
        finally:
            sys.excepthook = hook
            random.setstate(python)
            torch.set_rng_state(drawn)
            torch.set_default_dtype(dtype)
            if numpy is not None:
                numpy.random.set_state(numbers)


@contextmanager
def _stand_ins(seat: Seat) -> Iterator[None]:
    """Let pass what a script does around its group and its GPU, and hear of new groups."""
    module_watch.start()  # not to wrap what stands in
    stands_in: list[tuple[Any, str, Any]] = [
        *((module, name, _passing()) for module in (dist, c10d) for name in _JOINING),
        *((torch.cuda, name, _passing()) for name in ("set_device", "synchronize", "empty_cache")),
        (torch, "save", _passing()),
        (torch.cuda, "current_device", lambda: seat.rank % MACHINE_RANKS),
        (c10d, "_new_group_with_tag", _noting_groups(seat)),
        (torch.autograd, "_engine_run_backward", _backward_here(torch.autograd)),
        (torch.nn.parallel.DistributedDataParallel, "__init__", _refuse_wrapper),
        (torch.utils, "swap_tensors", exchange_contents),
        (DataLoader, "__iter__", _reading_here(DataLoader.__iter__)),
        (torch.autocast, "__init__", _autocast_here(torch.autocast.__init__)),
    ]
    with ExitStack() as stack:
        for owner, name, stand_in in stands_in:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


_JOINING = ("init_process_group", "destroy_process_group")


def _passing() -> Callable[..., None]:
    """Return what does nothing: the group is there already, the GPU and what could be saved never are."""
    return lambda *_args, **_kwargs: None


def _refuse_wrapper(*_args: Any, **_kwargs: Any) -> None:
    raise RuntimeError(
        f"{users_line()}: torch's DistributedDataParallel reads values, which check() has none of. Use "
        "paceline.DistributedDataParallel, which takes the same arguments, or paceline.replicate()"
    )


def _noting_groups(seat: Seat) -> Callable[..., Any]:
    make = c10d._new_group_with_tag

    def make_and_note(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        members = tuple(ranks) if ranks is not None else tuple(range(seat.size))
        everyone = members if kwargs.get("use_local_synchronization") else tuple(range(seat.size))
        group = Group(everyone, label="the default group" if len(everyone) == seat.size else "")
        seat.add(NEW_GROUP, group, terms=(members,), note=f" of {len(members)} ranks")
        return make(ranks, *args, **kwargs)

    return make_and_note


def _backward_here(autograd: Any) -> Callable[..., Any]:
    """Answer for values inside a backward, too: torch takes our mode off while ``tensor.backward()`` runs."""
    run = autograd._engine_run_backward

    def run_here(*args: Any, **kwargs: Any) -> Any:
        with NoValues():
            return run(*args, **kwargs)

    return run_here


def _reading_here(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Have a loader read in this process, where it would start others."""

    def read_here(loader: Any) -> Any:
        with mock.patch.multiple(loader, num_workers=0, timeout=0):
            return read(loader)

    return read_here


def _autocast_here(prepare: Callable[..., None]) -> Callable[..., None]:
    """Have autocast("cuda") cast, although all tensors are on the CPU."""

    def prepare_here(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        prepare(self, device_type, dtype, *args, **kwargs)

    return prepare_here
