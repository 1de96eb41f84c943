"""Frames as byte tensors over a group that moves CPU tensors: for ranks on several machines."""

import struct
from collections import deque
from datetime import timedelta
from typing import Any

import torch

from paceline.comm import GroupComm, cpu_group_like
from paceline.control.base import Control, Topic, pack, unpack
from paceline.errors import PeerLost, RanksDisagree

SMALL = 240  # bytes that travel in the first round


class GroupControl(Control):
    """Frames as byte tensors over a group that moves CPU tensors, for ranks on several machines."""

    def __init__(self, comm: GroupComm) -> None:
        super().__init__()
        self._group = cpu_group_like(comm.group)
        self._comm = GroupComm(self._group)
        self._posted: dict[Topic, deque[tuple[bytes, list[torch.Tensor], Any]]] = {}

    def post(self, topic: Topic, frame: bytes) -> None:
        frame = pack(topic, frame)
        head = struct.pack("!I", len(frame)) + frame[:SMALL].ljust(SMALL, b"\0")
        mine = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in range(self._comm.size)]
        work = self._group.allgather([rows], [mine])
        self._posted.setdefault(topic, deque()).append((frame, rows, work))

    def ready(self, topic: Topic) -> bool:
        return bool(self._posted[topic][0][2].is_completed())

    def collect(self, topic: Topic, seconds: float) -> list[bytes]:
        frame, rows, work = self._posted[topic].popleft()
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            raise PeerLost(
                f"the control group broke off: {error}. Look for the first rank that failed."
            ) from error
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
