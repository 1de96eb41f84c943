"""Run checks on several processes that share one device, for sharded.py and remote.py. No script by itself.

Every rank runs every check, and the ranks tell each other how it went over a store, never over what is being
checked. After a failure all of them end, and the checks that are left run on new ones: what is broken in one
check is not seen in the next.
"""

import contextlib
import faulthandler
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GROUP_SECONDS = 25.0  # a collective that takes longer has failed
CHECK_SECONDS = 45.0
START_SECONDS = 90.0
GRACE_SECONDS = 5.0  # what the other ranks get once one has failed


@dataclass
class Place:
    """What a check knows about where it runs."""

    rank: int
    size: int
    device: torch.device
    folder: Path
    notes: dict[str, Any] = field(default_factory=dict)  # what the setting has found out

    def say(self, text: str) -> None:
        """Print something, on one rank."""
        if self.rank == 0:
            print(text, flush=True)


Check = Callable[[Place], None]
Setting = Callable[[Place], AbstractContextManager[None]]


@contextlib.contextmanager
def one_group(place: Place, backend: str = "gloo") -> Iterator[None]:
    """Have a process group of all ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = "lo"
    os.environ.pop("LOCAL_RANK", None)
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
        torch.zeros(1, device=place.device)
    store = dist.FileStore(str(place.folder / "group"), place.size)
    with_device = {"device_id": place.device} if backend == "nccl" else {}
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=GROUP_SECONDS),
        **with_device,
    )
    yield
    dist.destroy_process_group()


def gather(mine: Any, group: Any = None) -> list[Any]:
    """Return what every rank has."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


@contextlib.contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...], *words: str) -> Iterator[None]:
    """Run what has to raise, with a text that holds these words."""
    try:
        yield
    except kind as error:
        text = str(error)
        assert all(word in text for word in words), text
        return
    raise AssertionError(f"nothing was raised; expected {kind} with {words}")


# ---- a rank -----------------------------------------------------------------------------------------


def _be_rank(place: Place, checks: Sequence[Check], setting: Setting, title: str) -> None:
    """Run checks until one fails on any rank. Leaves the names of those that are over in a file."""
    faulthandler.enable()
    store = dist.FileStore(str(place.folder / "verdicts"), place.size)
    ended = (place.folder / f"ended-{place.rank}").open("w", buffering=1)
    with setting(place):
        (place.folder / f"ready-{place.rank}").touch()
        for check in checks:
            faulthandler.dump_traceback_later(CHECK_SECONDS, exit=True)  # a rank that is stuck says where
            started = time.monotonic()
            verdict, why = _run_one(place, check)
            store.set(f"{check.__name__}/{place.rank}", verdict)
            keys = [f"{check.__name__}/{rank}" for rank in range(place.size)]
            store.wait(keys, timedelta(seconds=CHECK_SECONDS))
            faulthandler.cancel_dump_traceback_later()
            if any(store.get(key) == b"failed" for key in keys):
                os._exit(1)
            ended.write(f"{check.__name__}\n")
            seconds = time.monotonic() - started
            place.say(f"{verdict.decode():6} {_words(check)} ({why or title}, {seconds:.1f} s)")
        faulthandler.dump_traceback_later(CHECK_SECONDS, exit=True)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    os._exit(0)


class NotHere(Exception):
    """A check cannot be made with what torch offers here."""


def _run_one(place: Place, check: Check) -> tuple[bytes, str]:
    try:
        check(place)
        if place.device.type == "cuda":
            torch.cuda.synchronize()
    except NotHere as why:
        return b"n/a", str(why)
    except BaseException:
        print(f"rank {place.rank}: {_words(check)} FAILED\n{traceback.format_exc()[-4000:]}", flush=True)
        return b"failed", ""
    return b"ok", ""


def _words(check: Check) -> str:
    return check.__name__.replace("_", " ")


# ---- who starts them --------------------------------------------------------------------------------


def run(checks: Sequence[Check], size: int, device: str, setting: Setting, title: str) -> int:
    """Run checks on as many ranks; return how many have failed."""
    left, failed = list(checks), 0
    while left:
        with tempfile.TemporaryDirectory() as folder:
            over = _run_until_one_fails(left, size, torch.device(device), Path(folder), setting, title)
        if over is None:
            print(f"FAILED to start: {title}; not run: {', '.join(map(_words, left))}", flush=True)
            return failed + len(left)
        if over == len(left):
            break
        print(f"FAILED {_words(left[over])} ({title})", flush=True)
        failed += 1
        left = left[over + 1 :]
    return failed


def _run_until_one_fails(
    checks: Sequence[Check], size: int, device: torch.device, folder: Path, setting: Setting, title: str
) -> int | None:
    """Start the ranks, wait for them, and return how many checks are over on all of them.

    None, if the ranks did not even get as far as the first one.
    """
    context = mp.get_context("spawn")
    places = [Place(rank, size, device, folder) for rank in range(size)]
    ranks = [context.Process(target=_be_rank, args=(place, checks, setting, title)) for place in places]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + START_SECONDS + CHECK_SECONDS * len(checks)
    while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
        if any(process.exitcode for process in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.05)
    stuck = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()
    codes = [process.exitcode for process in ranks]
    if any(codes):
        print(f"       exit codes {codes}{f', still running: {stuck}' if stuck else ''}", flush=True)
    if not all((folder / f"ready-{rank}").exists() for rank in range(size)):
        return None
    over = min(len((folder / f"ended-{rank}").read_text().split()) for rank in range(size))
    if over == len(checks) and any(codes):
        print(f"FAILED at the end, after the last check ({title})", flush=True)
        return over - 1
    return over
