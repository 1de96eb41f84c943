"""Buffers (BatchNorm's running figures and the like): every rank takes one rank's, when their policy says so.

A turn is one time that some of them are made equal:

    tell()   which of them changed here since they were last equal, and the shapes and dtypes of all
    send()   what changed on any rank goes out, in one message for each device
    take()   it is written

What BatchNorm writes in every forward can go out without being asked for (see paceline.foretold).

A change shows in the tensor's version. It does not show there if it was made through ``.data``, through NumPy
or by a kernel that tells nobody. On a CPU the bytes are looked at, too. On a GPU that would make the host
wait; there a module that keeps a running mean and a variance, as BatchNorm does, counts as changed while it
is in training mode.
"""

import ctypes
import hashlib
import weakref
import zlib
from collections.abc import Callable, Collection, Sequence
from functools import reduce
from operator import or_

import torch
from torch import nn

from paceline.buffer_policies import FORWARD, LEFT_TO_EACH_RANK, Due, Policies, Policy
from paceline.comm import Comm, Pending
from paceline.errors import RanksDisagree, name_ranks, name_some
from paceline.sharded import local_parts
from paceline.torch_private import flatten

Tensors = Sequence[torch.Tensor]
Exchange = Callable[[bytes], Sequence[bytes]]  # tells every rank, and returns what every rank told

CHUNK_NBYTES = 64 * 1024 * 1024
DIGEST_NBYTES = 8

Look = tuple[torch.Size, torch.dtype, bool]  # shape, dtype, and whether it is on the CPU
Form = tuple[torch.Size, torch.dtype, torch.device]


class BufferSync:
    """Keeps a module's buffers equal to one rank's; the caller says when."""

    def __init__(
        self,
        module: nn.Module,
        comm: Comm,
        policies: Policies | None = None,
        left_out: frozenset[str] = frozenset(),
        due: Due | None = None,
    ) -> None:
        self._comm = comm
        self._places = _places(module, policies or Policies(), left_out)
        self.due = due or Due(FORWARD)
        self._every = sorted(
            {place.policy for place in self._places if isinstance(place.policy, int)}, reverse=True
        )

    def is_empty(self) -> bool:
        """Whether there are no buffers to keep equal."""
        return all(place.is_void() for place in self._places)

    @property
    def policies(self) -> dict[str, Policy]:
        """The policy of every buffer that is kept equal at some time."""
        return {place.name: place.policy for place in self._places}

    def named(self) -> dict[str, torch.Tensor]:
        """Return the buffers that there are at this moment, by name; each once."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for place in self._places:
            if (buffer := place.buffer) is not None:
                found.setdefault(id(buffer), (place.name, buffer))
        return dict(found.values())

    # ---- when they are equal ---------------------------------------------------------------------

    def note_equal(self) -> None:
        """Take it as known that all ranks hold the same."""
        for place in self._places:
            place.note_equal(place.buffer)

    def forget(self) -> None:
        """Take nothing as known: somebody else has written the buffers."""
        for place in self._places:
            place.forget()

    # ---- making them equal -----------------------------------------------------------------------

    @property
    def kept(self) -> set[Policy]:
        """The policies under which buffers are made equal while the module is trained."""
        return {place.policy for place in self._places} - LEFT_TO_EACH_RANK

    def turn_after_backward(
        self,
        step: int,
        *,
        with_forward: bool = False,
        is_busy: bool = False,
        beside: "Turn | None" = None,
    ) -> "Turn | None":
        """Return the turn that is due at the end of a reduced backward, if there is one.

        ``with_forward`` also takes what is due around a forward, ``is_busy`` only what modules write in every
        forward. What has gone out with the turn ``beside`` it has not changed, unless it has since.
        """
        if not self._places:
            return None
        due: set[Policy] = {"after_backward", *(k for k in self._every if (step + 1) % k == 0)}
        if self.due.is_put_off:
            due |= self.due.policies
        places = self._due(due | FORWARD if with_forward else due)
        if is_busy:
            places = [place for place in places if place.is_busy()]
        return Turn(places, self._comm, beside) if places else None

    def sync(
        self,
        exchange: Exchange,
        source: int = 0,
        *,
        only: Collection[Policy] | None = None,
        in_passing: bool = False,
    ) -> None:
        """Make buffers equal now. Every rank calls this at the same point.

        ``only`` those with some policies. ``in_passing`` sends what is on a GPU without asking if it has
        changed, because to ask makes the host wait for the other hosts, and the GPU would run dry.
        """
        places = self._places if only is None else self._due(only)
        unasked = [place for place in places if in_passing and place.is_on_device()]
        asked = [place for place in places if not in_passing or not place.is_on_device()]
        if not all(place.is_void() for place in asked):
            self._ask_and_sync(asked, exchange, source)
        if unasked:
            turn = Turn(unasked, self._comm)
            turn.send_all(source)
            turn.take()

    def _ask_and_sync(self, places: Sequence["Place"], exchange: Exchange, source: int) -> None:
        turn = Turn(places, self._comm)
        turn.send(exchange(turn.tell()), source)
        if turn.is_disputed:
            raise turn.dispute(exchange)
        turn.take()

    def _due(self, policies: Collection[Policy]) -> list["Place"]:
        return [place for place in self._places if place.policy in policies]


class Turn:
    """One time that some buffers are made equal."""

    has_begun = False  # to send
    is_on_its_way = False  # everything that is to be sent

    def __init__(self, places: Sequence["Place"], comm: Comm, beside: "Turn | None" = None) -> None:
        self._beside = beside
        self._places = places
        self._buffers = [place.buffer for place in places]
        self._comm = comm
        self._sent: Sequence[tuple[Place, torch.Tensor | None]] = ()
        self._transfers: list[Transfer] = []
        self._versions: dict[int, tuple[int, int]] = {}  # what was sent of which place, and as of when
        self._told: Sequence[str] = ()  # what was foretold: the lines,
        self._forms: Sequence[Form | None] = ()  # the tensors,
        self._firsts: Sequence[int] = ()  # and, for each, the first place that holds the same one
        self.tensors: list[torch.Tensor] = []  # that are sent
        self.is_disputed = False  # the ranks' buffers have different shapes or dtypes: nothing is sent

    def foretell(self) -> bytes:
        """Return what stands for all of them, and for which are one tensor: all that a rank has to expect."""
        self._told = self._lines()
        self._forms = [None if b is None else (b.shape, b.dtype, b.device) for b in self._buffers]
        self._firsts = _firsts(self._buffers)
        return _digest((*self._told, *map(str, self._firsts)))

    def tell(self) -> bytes:
        """Return what this rank has to say; nothing, if nothing has changed here."""
        changed = _changed(self._places, self._buffers, self._beside)
        if not any(changed):
            return b""
        return _digest(self._lines()) + bytes(changed)

    def _lines(self) -> tuple[str, ...]:
        here = zip(self._places, self._buffers, strict=True)
        return tuple([place.line(buffer) for place, buffer in here])

    def send(self, told: Sequence[bytes], source: int) -> None:
        """Send what changed on any rank. ``told`` is what every rank had to say."""
        frames = set(told)  # most ranks say the same
        if frames == {b""}:
            return
        agreed = _digest(tuple([place.agreed for place in self._places]))
        self.is_disputed = len({frame[:DIGEST_NBYTES] or agreed for frame in frames}) > 1
        if not self.is_disputed:
            masks = (int.from_bytes(frame[DIGEST_NBYTES:]) for frame in frames)
            self._send(reduce(or_, masks).to_bytes(len(self._places)), source)

    def send_all(self, source: int) -> None:
        """Send everything, without asking."""
        self._send(b"\1" * len(self._places), source)

    def send_as_foretold(self, source: int) -> None:
        """Send all that is there by now, without asking: of the sizes that were foretold, whatever has become
        of it, because the others wait for so many bytes. They are asked about what does not fit.
        """
        known = zip(self._places, self._buffers, self._told, self._forms, strict=True)
        fitting = [_fitting(place, old, line, form) for place, old, line, form in known]
        self._sent = [
            (place, fitting[i])
            for i, place in enumerate(self._places)
            if fitting[i] is fitting[self._firsts[i]]  # else it was foretold as another place's, and is not
        ]
        alone = [tensor for i, tensor in enumerate(fitting) if self._firsts[i] == i]
        self._start([tensor for tensor in alone if tensor is not None], source)

    def has_sent(self, place: "Place", buffer: torch.Tensor | None) -> bool:
        """Tell whether what is there now is what has been sent, and has not been written since."""
        return self._versions.get(id(place)) == (id(buffer), _version(buffer))

    def _send(self, marks: bytes, source: int) -> None:
        """Send what is marked."""
        here = zip(self._places, self._buffers, strict=True)
        self._sent = [pair for pair, mark in zip(here, marks, strict=True) if mark]
        # A tensor may be there under several names.
        tensors = {id(buffer): buffer for _, buffer in self._sent if buffer is not None}
        self._start(list(tensors.values()), source)

    def _start(self, tensors: list[torch.Tensor], source: int) -> None:
        self.has_begun, self.tensors = True, tensors
        self._versions = {id(place): (id(buffer), _version(buffer)) for place, buffer in self._sent}
        for chunk in _to_send(self.tensors):
            self._transfers.append(Transfer(chunk, self._comm, source))
        self.is_on_its_way = True

    @property
    def messages(self) -> int:
        """How many messages the tensors travel in."""
        return len(self._transfers)

    def drop(self) -> None:
        """Wait for what was sent, and leave everything as it is."""
        for transfer in self._transfers:
            transfer.pending.wait()

    def take(self) -> None:
        """Write what was sent."""
        finish_broadcast(self._transfers)
        for place, buffer in self._sent:
            place.note_equal(buffer)

    def dispute(self, exchange: Exchange, where: str = "", end: str = "") -> RanksDisagree:
        """Find out which buffers differ, and say so in the same words on every rank."""
        frames = exchange("\n".join(self._lines()).encode())
        everyone = [dict(line.split("\t") for line in frame.decode().split("\n")) for frame in frames]
        names = dict.fromkeys(name for told in everyone for name in told)
        odd = [line for name in names if (line := _difference(name, everyone))]
        return RanksDisagree(
            f"{where}the ranks hold different buffers: {name_some(odd)}. Change a buffer's shape or dtype on "
            f'every rank at the same point, or leave it to each rank with the policy "never".{end}'
        )


def _fitting(
    place: "Place", before: torch.Tensor | None, line: str, form: Form | None
) -> torch.Tensor | None:
    """Return what is there by now if it is as foretold, else what was there; else something of that size."""
    for tensor in (place.buffer, before):
        if place.line(tensor) == line:
            return tensor
    assert form is not None  # what was missing fits itself
    shape, dtype, device = form
    return torch.zeros(shape, dtype=dtype, device=device)


def _firsts(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """For each tensor, find the first place of the same one."""
    first: dict[int, int] = {}
    return [i if tensor is None else first.setdefault(id(tensor), i) for i, tensor in enumerate(tensors)]


def _changed(
    places: Sequence["Place"], buffers: Sequence[torch.Tensor | None], beside: Turn | None
) -> list[bool]:
    """Find the buffers that changed here; those of one BatchNorm change together."""
    here = list(zip(places, buffers, strict=True))
    sent = [beside is not None and beside.has_sent(place, buffer) for place, buffer in here]
    changed = [
        not done and (place.is_busy() or place.has_changed(buffer))
        for (place, buffer), done in zip(here, sent, strict=True)
    ]
    moved = {place.owner_id for place, mark in zip(places, changed, strict=True) if mark}
    if not moved:
        return changed
    return [
        mark or (not done and place.keeps_figures and place.owner_id in moved)
        for place, mark, done in zip(places, changed, sent, strict=True)
    ]


def _digest(lines: tuple[str, ...]) -> bytes:
    """Return a few bytes that stand for the names, shapes and dtypes of buffers."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=DIGEST_NBYTES).digest()


def _difference(name: str, everyone: Sequence[dict[str, str]]) -> str:
    """Say how one buffer differs between the ranks, or nothing."""
    holders: dict[str, list[int]] = {}
    for rank, told in enumerate(everyone):
        holders.setdefault(told.get(name, "missing"), []).append(rank)
    if len(holders) == 1:
        return ""
    return f"{name} is " + " but ".join(f"{look} on {name_ranks(ranks)}" for look, ranks in holders.items())


# ---- where buffers are ---------------------------------------------------------------------------


class Place:
    """Where a module keeps a buffer, and what was there when the ranks' were last equal."""

    def __init__(self, name: str, owner: nn.Module, key: str, policy: Policy) -> None:
        self.name = name
        self.policy = policy
        self.owner_id = id(owner)
        self.keeps_figures = _keeps_figures(owner)
        self.agreed = ""  # its line on every rank
        # The module, not the tensor: it may put another tensor under the same name.
        self._owner = weakref.ref(owner)
        self._key = key
        self._is_scripted = not isinstance(owner._buffers, dict)
        self._is_known = False
        self._last: tuple[weakref.ref[torch.Tensor] | None, int, int] = (None, 0, 0)
        self._checksum = 0  # of what was there, on a CPU
        self._look: Look | None = None
        self._line = _line(name, None)

    @property
    def buffer(self) -> torch.Tensor | None:
        """What is there now."""
        owner = self._owner()
        if owner is None:
            return None
        # Where a module keeps its buffers; to ask the module itself takes several times as long.
        found: torch.Tensor | None = None if self._is_scripted else owner._buffers.get(self._key)
        return getattr(owner, self._key, None) if found is None else found

    def is_void(self) -> bool:
        """Tell whether no rank had anything here when they were last equal, and nothing has come since."""
        return self.buffer is None and self._last[0] is None

    def is_on_device(self) -> bool:
        """Tell whether the host need not wait for what is done with it."""
        buffer = self.buffer
        return buffer is not None and not buffer.is_cpu

    def is_busy(self) -> bool:
        """Tell whether its module writes it in every forward."""
        if not self.keeps_figures:
            return False
        owner = self._owner()
        return owner is not None and owner.training

    def line(self, buffer: torch.Tensor | None) -> str:
        """Write down what has to be the same on every rank of what is there now."""
        look = None if buffer is None else (buffer.shape, buffer.dtype, buffer.is_cpu)
        if look != self._look:
            self._look, self._line = look, _line(self.name, look)
        return self._line

    def has_changed(self, buffer: torch.Tensor | None) -> bool:
        """Tell whether a change of what is there now is to be seen since the ranks' were last equal."""
        seen, version, address = self._last
        if not self._is_known:
            return True
        if buffer is None or seen is None:
            return (buffer is None) is not (seen is None)
        if seen() is not buffer or buffer.is_inference():  # which has no version
            return True
        if buffer._version != version or buffer.data_ptr() != address:
            return True
        return _checksum(buffer) != self._checksum

    def note_equal(self, buffer: torch.Tensor | None) -> None:
        """Remember what is there now as the same on every rank."""
        self._is_known, self.agreed = True, self.line(buffer)
        if buffer is None:
            self._last = (None, 0, 0)
        else:
            self._last = (weakref.ref(buffer), _version(buffer), buffer.data_ptr())
            self._checksum = _checksum(buffer)

    def forget(self) -> None:
        """Count as changed, whatever is there."""
        self._is_known = False


def names_of(module: nn.Module) -> list[str]:
    """Return the names of a module's buffers, also of those that are None at this moment."""
    return [name for name, _, _ in _keys(module)]


def _places(module: nn.Module, policies: Policies, left_out: frozenset[str]) -> list[Place]:
    return [
        Place(name, owner, key, policy)
        for name, owner, key in _keys(module)
        if name not in left_out and (policy := policies.of_buffer(name)) != "never"
    ]


def _keys(module: nn.Module) -> list[tuple[str, nn.Module, str]]:
    return [
        (f"{prefix}.{key}".lstrip("."), owner, key)
        for prefix, owner in module.named_modules()
        for key, _ in owner._buffers.items()  # a scripted module's yields pairs, whatever one asks it for
    ]


def _keeps_figures(owner: nn.Module) -> bool:
    """Tell whether a module has what ``F.batch_norm`` is given: a mean and a variance of one size."""
    buffers = ((key, b) for key, b in owner._buffers.items() if b is not None)
    figures = {key: b.shape for key, b in buffers if b.dim() == 1 and b.is_floating_point()}
    means = {shape for key, shape in figures.items() if "mean" in key}
    return any(shape in means for key, shape in figures.items() if "var" in key)


def _checksum(buffer: torch.Tensor) -> int:
    """Sum up the bytes of a tensor on a CPU: some write them where no version tells of it.

    Done in every step, so not by a fingerprint, which takes several times as long here, and does not see two
    numbers that have changed places.
    """
    if not buffer.is_cpu or buffer.layout is not torch.strided or type(buffer) is not torch.Tensor:
        return 0
    plain = buffer if buffer.is_contiguous() else buffer.detach().contiguous()
    if not (address := plain.data_ptr()):
        return 0
    return zlib.crc32((ctypes.c_char * plain.nbytes).from_address(address))


def _version(buffer: torch.Tensor | None) -> int:
    """Return how often a tensor was written in place, as far as that is counted."""
    return 0 if buffer is None or buffer.is_inference() else buffer._version


def _line(name: str, look: Look | None) -> str:
    if look is None:
        return f"{name}\tmissing"
    shape, dtype, is_cpu = look
    place = "" if is_cpu else " on a device"
    return f"{name}\t{tuple(shape)} {str(dtype).removeprefix('torch.')}{place}"


# ---- on their way --------------------------------------------------------------------------------


class Transfer:
    """Tensors of one device, packed as bytes and on their way from one rank."""

    def __init__(self, tensors: Tensors, comm: Comm, source: int) -> None:
        self._groups = list(_by_dtype(tensors).values())
        parts = [flatten(group).view(torch.uint8) for group in self._groups]
        self._sizes = [part.numel() for part in parts]
        packed = parts[0] if len(parts) == 1 else torch.cat(parts)
        self.pending: Pending = comm.broadcast(packed, source)
        self._keep = comm.rank == source

    def finish(self) -> None:
        """Wait, and write what came into the tensors."""
        packed = self.pending.wait()
        if self._keep:
            return
        for group, part in zip(self._groups, torch.split_with_sizes(packed, self._sizes), strict=True):
            flat = part.clone().view(group[0].dtype)
            values = [
                v.view(t.shape)
                for v, t in zip(torch.split_with_sizes(flat, [t.numel() for t in group]), group, strict=True)
            ]
            # Through .data: a forward whose backward is still to come may have saved these tensors, and
            # taking rank 0's values is no edit that this backward has to be warned about.
            torch._foreach_copy_([tensor.data for tensor in group], values)


def start_broadcast(tensors: Tensors, comm: Comm, source: int = 0) -> list[Transfer]:
    """Start sending one rank's tensors to all ranks, bit for bit, whatever their dtype."""
    return [Transfer(chunk, comm, source) for chunk in _to_send(tensors)]


def _to_send(tensors: Tensors) -> list[list[torch.Tensor]]:
    """Leave out what is on other ranks or empty, and group the rest into messages."""
    return _chunks([part for part in local_parts(tensors) if part.numel()])


def finish_broadcast(transfers: list[Transfer]) -> None:
    """Write what was sent."""
    with torch.no_grad():
        for transfer in transfers:
            transfer.finish()


def _chunks(tensors: Tensors) -> list[list[torch.Tensor]]:
    """Group tensors by device, in chunks of bounded size."""
    chunks: list[list[torch.Tensor]] = []
    room: dict[torch.device, tuple[list[torch.Tensor], int]] = {}
    for tensor in tensors:
        chunk, nbytes = room.get(tensor.device, ([], 0))
        if not chunk or nbytes + tensor.nbytes > CHUNK_NBYTES:
            chunk, nbytes = [], 0
            chunks.append(chunk)
        chunk.append(tensor)
        room[tensor.device] = (chunk, nbytes + tensor.nbytes)
    return chunks


def _by_dtype(tensors: Tensors) -> dict[torch.dtype, list[torch.Tensor]]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor.detach())
    return groups
