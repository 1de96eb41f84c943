"""Which control plane goes with a comm, and how its ranks find each other.

gather      each rank's machine, local door, and part of the key
            one machine                        -> connect by local sockets
            several, no more than MOST_RANKS   -> each opens a door at one address, and tells it
connect     (switchboard.py)
gather      whom each rank has not reached     -> if it is anybody, all of them use the group
"""

import hmac
import json
import logging
import os
import secrets
import socket
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

from paceline.comm import Comm, GroupComm
from paceline.control.base import Control, SoloControl
from paceline.control.desks import desk_in_memory, desk_in_store
from paceline.control.group import GroupControl
from paceline.control.links import Link
from paceline.control.mailbox import MailboxControl, mailboxes_work_here
from paceline.control.sockets import SocketControl
from paceline.control.switchboard import (
    Address,
    Switchboard,
    Unreached,
    address_of,
    open_door_at,
    open_local_door,
)
from paceline.control.tcp import TcpControl
from paceline.errors import PeerLost, name_some
from paceline.hosts import address_for_peers, this_host
from paceline.python_groups import name_of
from paceline.reporter import reporter
from paceline.torch_private import host_of, store_of

SETUP_SECONDS = 60.0  # on one machine, where a rank that does not come has failed
REACH_SECONDS = 10.0  # over a network, where it may be a firewall
# A frame goes out once for each other rank, by the thread that trains: some 5 us each, twice a step.
MOST_RANKS = 32

logger = logging.getLogger("paceline")

# One control per group and process, shared by all replicas on it: two replicas whose backwards run in
# different orders on two ranks then meet in the same inbox instead of waiting for each other on separate
# wires.
_controls: weakref.WeakKeyDictionary[Any, Control] = weakref.WeakKeyDictionary()
_turns: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
_handing_out = threading.Lock()


def control_over(comm: Comm) -> Control:
    """Return the control plane that goes with a comm. The first call for a group is a collective."""
    if not isinstance(comm, GroupComm):
        own: Control | None = comm.own_control()
        return own or SoloControl()
    with _handing_out:
        turn = _turns.setdefault(comm.group, threading.Lock())
    with turn:  # only of this group's: ranks may be threads of one process, and all of them have to come
        control = _controls.get(comm.group)
        if control is None:
            control = _controls[comm.group] = _wire(comm)
            control.label = _label(comm)
            if control.desk is not None:
                reporter.add(control.desk)
    comm.patience.desk = control.desk
    return control


def _label(comm: GroupComm) -> bytes:
    """Return the group's name; of one that has none, a name that its ranks give it."""
    name = name_of(comm.group)
    return (comm.gather_bytes(secrets.token_hex(4).encode())[0]) if name is None else name.encode()


def _wire(comm: GroupComm) -> Control:
    """Connect every rank to every other, or let them use the group."""
    if comm.size == 1:
        return SoloControl()
    if sys.platform != "linux":  # abstract sockets are Linux's
        return GroupControl(comm)
    with open_local_door(comm.size) as door:
        cards = _tell(comm, {"host": this_host(), "address": address_of(door), "key": secrets.token_hex(16)})
        key = "".join(card["key"] for card in cards).encode()
        if len({card["host"] for card in cards}) == 1:
            return _on_one_machine(comm, door, [card["address"] for card in cards], key)
        if comm.size <= MOST_RANKS:
            return _between_machines(comm, door, cards, key)
    return GroupControl(comm)


def _tell(comm: GroupComm, what: Any) -> list[Any]:
    """Tell every rank something, and hear what every rank tells, by rank."""
    return [json.loads(told) for told in comm.gather_bytes(json.dumps(what).encode())]


def _on_one_machine(
    comm: GroupComm, door: socket.socket, addresses: Sequence[Address], key: bytes
) -> SocketControl:
    try:
        links = Switchboard(comm.rank, [door], addresses, key).connect(_within(comm, SETUP_SECONDS))
    except Unreached as error:
        raise PeerLost(f"the ranks are not connected: {error}; look for the one that failed") from None
    try:
        control = (MailboxControl if mailboxes_work_here() else SocketControl)(comm.rank, links)
        control.desk = desk_in_memory(comm.size, links)
    except BaseException:
        for link in links.values():  # the others hear of it, now or when they wait for the first frame
            link.close()
        raise
    return control


def _between_machines(
    comm: GroupComm, local_door: socket.socket, cards: Sequence[Mapping[str, Any]], key: bytes
) -> Control:
    """Connect the ranks, by TCP where they are on different machines, or let all of them use the group."""
    links: dict[int, Link] = {}
    trouble = Unreached([])
    with ExitStack() as doors:
        place: Address | None = None
        try:
            door = doors.enter_context(open_door_at(_address_of_ours(comm), comm.size))
            place = address_of(door)
        except Exception as error:  # whatever it is, the others have to hear of it
            why = getattr(error, "strerror", None) or error
            trouble = Unreached([f"rank {comm.rank} cannot be called ({why})"])
        places = _tell(comm, place)
        if None not in places:
            here = cards[comm.rank]["host"]
            addresses = [
                card["address"] if card["host"] == here else place
                for card, place in zip(cards, places, strict=True)
            ]
            try:
                links = Switchboard(comm.rank, [local_door, door], addresses, key).connect(
                    _within(comm, REACH_SECONDS)
                )
            except Unreached as error:
                trouble = error
    troubles = _tell(comm, [trouble.failed, trouble.awaited])
    # Who has called knows more of the reason than who has not been called.
    words = [*chain(*(failed for failed, _ in troubles))] or [*chain(*(awaited for _, awaited in troubles))]
    if words:
        for link in links.values():
            link.close()
        if comm.rank == 0:
            logger.warning("paceline: %s", _warning(words))
        return GroupControl(comm)
    control = TcpControl(comm.rank, links)
    control.desk = desk_in_store(comm, hmac.digest(key, b"reports", "sha256").hex()[:16] + "/")
    return control


def _within(comm: GroupComm, seconds: float) -> float:
    """Return a time that leaves room for a gather before those who wait in it run out of theirs."""
    return min(seconds, comm.seconds / 3)


def _address_of_ours(comm: GroupComm) -> str:
    store = store_of(comm.group)
    address = address_for_peers(host_of(store) or os.environ.get("MASTER_ADDR"))
    if address is None:
        raise OSError("no address of its machine was found")
    return address


def _warning(words: Sequence[str]) -> str:
    return (
        f"the ranks cannot reach each other directly: {name_some(words)}. Their control frames go over the "
        "process group, which takes longer, and a rank that dies is noticed later. Set GLOO_SOCKET_IFNAME on "
        "every machine to the interface by which the others reach it, and let its ports through the firewall."
    )
