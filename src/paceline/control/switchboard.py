"""Connects a rank with all others: it calls those before it, and is called by those behind it.

    door        a socket that listens, until everybody is in
    half open   a call, made or taken, whose two ends have not proved yet who they are

One loop looks after all of them and waits for none in particular, so that nobody who calls and says nothing,
or nonsense, keeps the ranks from each other.
"""

import secrets
import select
import socket
import time
from collections.abc import Sequence

from paceline.control.handshake import Handshake, Stranger, answer, call
from paceline.control.links import Link, keep_watch

Address = str | Sequence[str | int]  # a local socket's name, or a host's address and a port

CALLER_SECONDS = 5.0  # what somebody who calls gets to prove who it is
MOST_CALLERS = 64  # half open at once, or two for each rank; the oldest gives way to one more
MOST_TRIES = 3  # calls of one rank that somebody has looked at
PAUSE_SECONDS = 0.2  # between two of them, and until a door that fails is looked at again


class Unreached(Exception):
    """Not all ranks are connected: calls have failed, or ranks have not called."""

    def __init__(self, failed: Sequence[str], awaited: Sequence[str] = ()) -> None:
        super().__init__("; ".join([*failed, *awaited]))
        self.failed = list(failed)
        self.awaited = list(awaited)


def most_callers(size: int) -> int:
    """Return how many may be half open at once where so many ranks meet."""
    return max(MOST_CALLERS, 2 * size)


def open_local_door(size: int) -> socket.socket:
    """Listen in Linux's abstract name space: on no network, and with no file left behind."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.bind("\0paceline-" + secrets.token_hex(16))
    door.listen(2 * most_callers(size))
    return door


def open_door_at(address: str, size: int = 2) -> socket.socket:
    """Listen at one address of this host, at a port that the kernel chooses."""
    family, _, _, _, where = socket.getaddrinfo(
        address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )[0]
    door = socket.socket(family, socket.SOCK_STREAM)
    try:
        door.bind(where)
        door.listen(2 * most_callers(size))
    except BaseException:
        door.close()
        raise
    return door


def address_of(door: socket.socket) -> Address:
    """Return what others have to know of a door to call there."""
    name = door.getsockname()
    return name[1:].decode() if door.family == socket.AF_UNIX else list(name[:2])


def name_of(address: Address) -> str:
    """Write an address so that a person can read it."""
    return "a local socket" if isinstance(address, str) else f"{address[0]} port {address[1]}"


class HungUp(Exception):
    """The other end has closed the connection. Some do so to make room for other callers."""

    def __init__(self, *, has_looked: bool) -> None:
        super().__init__("it hung up")
        self.has_looked = has_looked  # at what we have sent to prove who we are


class HalfOpen:
    """A socket whose two ends are in the middle of their handshake."""

    def __init__(self, wire: socket.socket, handshake: Handshake, until: float) -> None:
        self.wire = wire
        self.until = until
        self._handshake = handshake
        self._got = b""
        self._out, self._needs = next(handshake)
        self._steps = 0

    @property
    def events(self) -> int:
        """What to wait for."""
        return select.POLLOUT if self._out else select.POLLIN

    def advance(self) -> int | None:
        """Send and read what can be; return the peer's rank once it is known. Does not wait."""
        try:
            while True:
                self._out = self._out[self.wire.send(self._out) :] if self._out else b""
                if self._out:
                    return None
                if len(self._got) < self._needs:
                    chunk = self.wire.recv(self._needs - len(self._got))
                    if not chunk:
                        raise HungUp(has_looked=self._steps > 0)
                    self._got += chunk
                elif (peer := self._go_on()) is not None:
                    return peer
        except BlockingIOError:
            return None
        except (ConnectionResetError, BrokenPipeError):  # with something of ours unread
            raise HungUp(has_looked=False) from None

    def _go_on(self) -> int | None:
        got, self._got = self._got, b""
        self._steps += 1
        try:
            self._out, self._needs = self._handshake.send(got)
        except StopIteration as end:
            return int(end.value)
        return None


class Switchboard:
    """One rank's way to all others. Of the ``addresses``, those of the ranks before it are called."""

    def __init__(
        self, rank: int, doors: Sequence[socket.socket], addresses: Sequence[Address], key: bytes
    ) -> None:
        self._rank = rank
        self._doors = {door.fileno(): door for door in doors}
        self._addresses = addresses
        self._key = key
        self._awaited = set(range(rank + 1, len(addresses)))  # they call
        self._due = dict.fromkeys(range(rank), 0.0)  # when to call them
        self._tries = dict.fromkeys(range(rank), 0)
        self._troubles: dict[int, object] = {}  # of calls that nobody has looked at
        self._most_callers = most_callers(len(addresses))
        self._resting: dict[int, float] = {}  # doors that have failed, until when
        self._calls: dict[int, HalfOpen] = {}
        self._callers: list[HalfOpen] = []
        self._links: dict[int, Link] = {}

    def connect(self, seconds: float) -> dict[int, Link]:
        """Return a link to every other rank, or raise Unreached, with nothing left open but the doors."""
        deadline = time.monotonic() + seconds
        for door in self._doors.values():
            door.setblocking(False)
        try:
            while len(self._links) < len(self._addresses) - 1:
                if time.monotonic() > deadline:
                    raise self._unreached(f"no answer within {seconds:g} s")
                self._call_who_is_due(deadline)
                self._look(deadline)
        except BaseException:
            for link in self._links.values():
                link.close()
            raise
        finally:
            for half in [*self._calls.values(), *self._callers]:
                half.wire.close()
        return self._links

    def _unreached(self, why: str) -> Unreached:
        calls = [peer for peer in range(self._rank) if peer not in self._links]
        return Unreached(
            [self._about(peer, self._troubles.get(peer) or why) for peer in calls],
            [f"rank {peer} has not called rank {self._rank}" for peer in sorted(self._awaited)],
        )

    def _about(self, peer: int, why: object) -> str:
        return f"rank {self._rank} does not reach rank {peer} at {name_of(self._addresses[peer])} ({why})"

    def _call_who_is_due(self, deadline: float) -> None:
        now = time.monotonic()
        for peer in [peer for peer, at in self._due.items() if at <= now]:
            del self._due[peer]
            try:
                wire, where = _socket_to(self._addresses[peer])
            except OSError as error:  # IPv6 is switched off here, say
                raise Unreached([self._about(peer, error.strerror)]) from None
            # Over a network a call may be lost where too many come at once, and neither end hears of it.
            until = deadline if wire.family == socket.AF_UNIX else now + CALLER_SECONDS
            self._calls[peer] = HalfOpen(wire, call(self._key, self._rank, peer), until)
            try:
                wire.connect(where)
            except BlockingIOError:
                if wire.family == socket.AF_UNIX:  # its queue is full, and this was no call
                    self._call_again(peer, "too many callers")
            except OSError as error:
                self._fail(peer, error.strerror)

    def _look(self, deadline: float) -> None:
        """Wait until something happens, and see to it."""
        poller = select.poll()
        now = time.monotonic()
        self._resting = {number: end for number, end in self._resting.items() if end > now}
        for number in self._doors.keys() - self._resting.keys():
            poller.register(number, select.POLLIN)
        for half in [*self._calls.values(), *self._callers]:
            poller.register(half.wire.fileno(), half.events)
        halves = (half.until for half in [*self._calls.values(), *self._callers])
        until = min([deadline, *self._due.values(), *self._resting.values(), *halves])
        ready = {number for number, _ in poller.poll(max(0.0, until - time.monotonic()) * 1000 + 1)}
        for peer, half in list(self._calls.items()):
            if half.wire.fileno() in ready:
                self._go_on_with_call(peer, half)
            elif time.monotonic() > half.until:
                self._call_again(peer)
        for half in list(self._callers):
            if half.wire.fileno() in ready or time.monotonic() > half.until:
                self._go_on_with_caller(half)
        for number in ready & self._doors.keys():
            self._let_in(self._doors[number])

    def _go_on_with_call(self, peer: int, half: HalfOpen) -> None:
        try:
            if half.advance() is not None:
                self._links[peer] = _link_of(half.wire)
                del self._calls[peer]
        except HungUp as error:
            (self._fail if error.has_looked else self._call_again)(peer, error)
        except (OSError, Stranger) as error:
            self._fail(peer, getattr(error, "strerror", None) or error)

    def _fail(self, peer: int, why: object) -> None:
        """Note that a call has failed, or give up. Another one may come through."""
        self._tries[peer] += 1
        if self._tries[peer] >= MOST_TRIES:
            raise Unreached([self._about(peer, why)])
        self._call_again(peer, why)

    def _call_again(self, peer: int, why: object = None) -> None:
        """Call again a little later, because the door was only crowded."""
        self._troubles[peer] = why
        self._calls.pop(peer).wire.close()
        self._due[peer] = time.monotonic() + PAUSE_SECONDS

    def _go_on_with_caller(self, half: HalfOpen) -> None:
        try:
            peer = half.advance()
            if peer is None and time.monotonic() <= half.until:
                return
            if peer is not None:
                self._links[peer] = _link_of(half.wire)
                self._awaited.discard(peer)
        except (OSError, Stranger, HungUp):
            pass
        self._callers.remove(half)
        half.wire.close()  # if it is not a link by now

    def _let_in(self, door: socket.socket) -> None:
        """Take the calls that wait at a door, but go on with the others after so many."""
        for _ in range(self._most_callers):
            try:
                wire, _ = door.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # no file is left, say: it would be ready, and fail, again and again
                self._resting[door.fileno()] = time.monotonic() + PAUSE_SECONDS
                return
            wire.setblocking(False)
            if len(self._callers) >= self._most_callers:
                self._callers.pop(0).wire.close()
            until = time.monotonic() + CALLER_SECONDS
            self._callers.append(HalfOpen(wire, answer(self._key, self._rank, self._awaited), until))


def _socket_to(address: Address) -> tuple[socket.socket, str | tuple[str | int, ...]]:
    """Return a socket that can call an address, and the address as it wants it."""
    where: str | tuple[str | int, ...]
    if isinstance(address, str):
        family, where = socket.AF_UNIX, "\0" + address
    else:
        host, port = address
        family = socket.AF_INET6 if ":" in str(host) else socket.AF_INET
        where = (str(host), int(port))
    wire = socket.socket(family, socket.SOCK_STREAM)
    wire.setblocking(False)
    return wire, where


def _link_of(wire: socket.socket) -> Link:
    if wire.family != socket.AF_UNIX:
        keep_watch(wire)
    return Link(wire)
