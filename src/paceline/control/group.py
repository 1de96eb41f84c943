"""Frames as byte tensors over a group that moves CPU tensors, for ranks that are not wired to each other."""

import struct
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from paceline.abandoned import keep
from paceline.comm import GroupComm, cpu_group_like, wait_with
from paceline.control.base import Control, Topic, pack, unpack
from paceline.control.desks import desk_in_store
from paceline.errors import PeerLost, PeerTimeout, RanksDisagree
from paceline.reports import Report, Wait
from paceline.waiting import STALL_SECONDS, Patience, Waiter, Waiting

SMALL = 240  # bytes that travel in the first round


class GroupControl(Control):
    """Frames as byte tensors over a group that moves CPU tensors."""

    def __init__(self, comm: GroupComm) -> None:
        super().__init__()
        self._group = cpu_group_like(comm)
        self._comm = GroupComm(self._group)
        self._posted: dict[Topic, deque[tuple[bytes, list[torch.Tensor], Any]]] = {}
        self.desk = desk_in_store(self._comm)

    def post(self, topic: Topic, frame: bytes) -> None:
        frame = pack(topic, frame)
        head = struct.pack("!I", len(frame)) + frame[:SMALL].ljust(SMALL, b"\0")
        mine = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in range(self._comm.size)]
        work = self._group.allgather([rows], [mine])
        self._posted.setdefault(topic, deque()).append((frame, rows, work))

    def ready(self, topic: Topic) -> bool:
        return bool(self._posted[topic][0][2].is_completed())

    def collect(self, topic: Topic, seconds: float, waiter: Waiter | None = None) -> list[bytes]:
        frame, rows, work = self._posted[topic][0]
        try:
            wait_with(partial(self._begin_to_wait, topic, seconds, waiter), work)
        except PeerTimeout:
            keep(work, rows)
            raise
        except RuntimeError as error:
            kind = PeerTimeout if "timed out" in str(error).lower() else PeerLost
            raise kind(
                f"the control group broke off: {error}. Look for the first rank that failed."
            ) from error
        self._posted[topic].popleft()  # not before: who is interrupted while waiting can collect again
        heads = [bytes(row.tolist()) for row in rows]
        lengths = [struct.unpack_from("!I", head)[0] for head in heads]
        frames = [head[4 : 4 + length] for head, length in zip(heads, lengths, strict=True)]
        if max(lengths) > SMALL:
            frames = self._comm.gather_bytes(frame)
        told = [unpack(frame) for frame in frames]
        if any(about != topic for about, _ in told):
            where = ", ".join(f"rank {rank} is at {about.decode()}" for rank, (about, _) in enumerate(told))
            raise RanksDisagree(
                f"the ranks are at different points: {where} (number of the replica, and phase). Make "
                "every rank run the same backwards of the same models in the same order."
            )
        return [payload for _, payload in told]

    def _begin_to_wait(self, topic: Topic, seconds: float, waiter: Waiter | None) -> Waiting:
        stall_seconds = STALL_SECONDS if waiter is None else waiter.stall_seconds
        patience = Patience(self._comm.rank, self._comm.size, seconds, stall_seconds)
        patience.desk = self.desk
        name = topic.decode(errors="replace")
        place = f"for {name}" if waiter is None else waiter.waits_for(topic)
        return Waiting(patience, place, partial(self._not_at, name), wait=Wait(0, 0, name, place))

    def _not_at(self, topic: str, reports: Mapping[int, Report]) -> list[int]:
        """Return the ranks that do not report to wait for the same; a collective itself does not tell."""
        waits = {rank: report.wait for rank, report in reports.items()}
        others = (rank for rank in range(self._comm.size) if rank != self._comm.rank)
        return [rank for rank in others if (wait := waits.get(rank)) is None or wait.topic != topic]
