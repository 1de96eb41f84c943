"""Which control plane goes with a comm, and how its ranks find each other."""

import json
import secrets
import sys
import threading
import time
import weakref
from functools import partial
from typing import Any

from paceline.comm import Comm, GroupComm
from paceline.control.base import Control, SoloControl
from paceline.control.files import exchange_files
from paceline.control.group import GroupControl
from paceline.control.mailbox import MailboxControl, mailboxes_work_here
from paceline.control.sockets import SETUP_SECONDS, SocketControl, answer, call, listen, this_host
from paceline.reporter import Desk, reporter
from paceline.reports import Page, SharedReports

# One control per group and process, shared by all replicas on it: two replicas whose backwards run in
# different orders on two ranks then meet in the same inbox instead of waiting for each other on separate
# wires.
_controls: weakref.WeakKeyDictionary[Any, Control] = weakref.WeakKeyDictionary()
_wiring = threading.Lock()


def control_over(comm: Comm) -> Control:
    """Return the control plane that goes with a comm. The first call for a group is a collective."""
    if not isinstance(comm, GroupComm):
        own: Control | None = comm.own_control()
        return own or SoloControl()
    with _wiring:
        control = _controls.get(comm.group)
        if control is None:
            control = _controls[comm.group] = _wire(comm)
            control.label = comm.group.group_name.encode()
            if control.desk is not None:
                reporter.add(control.desk)
    comm.patience.desk = control.desk
    return control


def _wire(comm: GroupComm) -> Control:
    """Connect the ranks: by local sockets if they all share this machine, else over the group."""
    if comm.size == 1:
        return SoloControl()
    if sys.platform != "linux":  # abstract sockets are Linux's
        return GroupControl(comm)
    listener = listen(comm.size)
    card = {
        "host": this_host(),
        "address": listener.getsockname()[1:].decode(),
        "key": secrets.token_hex(16),
    }
    cards = [json.loads(card) for card in comm.gather_bytes(json.dumps(card).encode())]
    if len({card["host"] for card in cards}) > 1:
        listener.close()
        return GroupControl(comm)
    key = "".join(card["key"] for card in cards).encode()
    with listener:
        links = {peer: call(cards[peer]["address"], key, comm.rank) for peer in range(comm.rank)}
        deadline = time.monotonic() + SETUP_SECONDS
        while len(links) < comm.size - 1:
            links.update(answer(listener, key, deadline))
    control = (MailboxControl if mailboxes_work_here() else SocketControl)(comm.rank, links)
    pages = exchange_files(links, "paceline-reports", partial(Page, size=comm.size))
    control.desk = Desk(SharedReports(*pages))
    return control
