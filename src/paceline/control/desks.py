"""Where the ranks of a comm report what they do."""

from functools import partial

from paceline.comm import GroupComm
from paceline.control.files import exchange_files
from paceline.control.links import Link
from paceline.reporter import Desk
from paceline.reports import Page, SharedReports, StoreReports
from paceline.torch_private import store_of


def desk_in_memory(size: int, links: dict[int, Link]) -> Desk:
    """Report on pages of memory that the ranks of one machine share."""
    return Desk(SharedReports(*exchange_files(links, "paceline-reports", partial(Page, size=size))))


def desk_in_store(comm: GroupComm, name: str = "") -> Desk | None:
    """Report in the store of a comm's group, if it has one. ``name`` tells these ranks from earlier ones."""
    store = store_of(comm.group)
    if store is None:
        return None
    try:
        store = store.clone()  # a connection of its own: others may wait on the first one for minutes
    except (AttributeError, RuntimeError):
        return None
    return Desk(StoreReports(store, comm.rank, comm.size, name))
