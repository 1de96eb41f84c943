"""Run checks on several processes that share one device, for sharded.py and remote.py. No script by itself.

Every rank runs every check, and the ranks tell each other how it went over a store, never over what is being
checked. After a failure all of them end, and the checks that are left run on new ones: what is broken in one
check is not seen in the next. Whatever fails, or never ends, it is over when the time is: `Deadline`.
"""

import contextlib
import faulthandler
import logging
import os
import signal
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
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GROUP_SECONDS = 25.0  # a collective that takes longer has failed
CHECK_SECONDS = {"cuda": 15.0, "cpu": 60.0}
START_SECONDS = {"cuda": 30.0, "cpu": 120.0}
SCRIPT_SECONDS = {"cuda": 55.0, "cpu": 900.0}  # a CPU is where these scripts are tried out, on few cores
GRACE_SECONDS = 2.0  # what the other ranks get once one has failed
DUMP_SECONDS = 0.5  # what a rank that is stuck gets to say where


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


class Deadline:
    """When a script has to be over, whatever fails. What could not be run by then has failed."""

    def __init__(self, device: str, seconds: float | None = None) -> None:
        self.seconds = SCRIPT_SECONDS[torch.device(device).type] if seconds is None else seconds
        self._end = time.monotonic() + self.seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


Check = Callable[[Place], None]
Setting = Callable[[Place], AbstractContextManager[None]]


@contextlib.contextmanager
def one_group(place: Place, backend: str = "gloo") -> Iterator[None]:
    """Have a process group of all ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["TP_SOCKET_IFNAME"] = "lo"
    os.environ.pop("LOCAL_RANK", None)
    warnings.showwarning = _say_nothing  # torch lifts filters to tell of its scripted optimizers
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


def _say_nothing(*_: object, **__: object) -> None:
    """Show no warning."""


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
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the parent asks, before it kills
    limit = CHECK_SECONDS[place.device.type]
    store = dist.FileStore(str(place.folder / "verdicts"), place.size)
    ended = (place.folder / f"ended-{place.rank}").open("w", buffering=1)
    faulthandler.dump_traceback_later(START_SECONDS[place.device.type], exit=True)
    with setting(place):
        (place.folder / f"ready-{place.rank}").touch()
        for check in checks:
            faulthandler.dump_traceback_later(limit, exit=True)  # a rank that is stuck says where
            started = time.monotonic()
            verdict, why = _run_one(place, check)
            store.set(f"{check.__name__}/{place.rank}", verdict)
            keys = [f"{check.__name__}/{rank}" for rank in range(place.size)]
            # The others may wait for one that has failed, in the very check: not for long.
            with contextlib.suppress(RuntimeError) if verdict == b"failed" else contextlib.nullcontext():
                store.wait(keys, timedelta(seconds=GRACE_SECONDS if verdict == b"failed" else limit))
            faulthandler.cancel_dump_traceback_later()
            if verdict == b"failed" or any(store.get(key) == b"failed" for key in keys):
                os._exit(1)
            ended.write(f"{check.__name__}\n")
            seconds = time.monotonic() - started
            place.say(f"{verdict.decode():6} {_words(check)} ({why or title}, {seconds:.1f} s)")
        faulthandler.dump_traceback_later(limit, exit=True)
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


def run(
    checks: Sequence[Check],
    size: int,
    device: str,
    setting: Setting,
    title: str,
    deadline: Deadline | None = None,
    word: str = "FAILED",
) -> int:
    """Run checks on as many ranks; return how many have failed. ``word`` is what is said of those."""
    left, failed = list(checks), 0
    deadline = deadline or Deadline(device)
    while left:
        if deadline.left <= 0:
            print(f"{word} for want of time ({title}): {', '.join(map(_words, left))}", flush=True)
            return failed + len(left)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            places = [Place(rank, size, torch.device(device), Path(folder)) for rank in range(size)]
            over = _run_until_one_fails(left, places, setting, title, deadline)
        if over is None:
            print(f"{word} to start: {title}; not run: {', '.join(map(_words, left))}", flush=True)
            return failed + len(left)
        if over == len(left):
            break
        print(f"{word:6} {_words(left[over])} ({title})", flush=True)
        failed += 1
        left = left[over + 1 :]
    return failed


def _run_until_one_fails(
    checks: Sequence[Check], places: Sequence[Place], setting: Setting, title: str, deadline: Deadline
) -> int | None:
    """Start the ranks, wait for them, and return how many checks are over on all of them.

    None, if the ranks did not even get as far as the first one.
    """
    context = mp.get_context("spawn")
    ranks = [context.Process(target=_be_rank, args=(place, checks, setting, title)) for place in places]
    for process in ranks:
        process.start()
    stuck = _await(ranks, deadline)
    codes = [process.exitcode for process in ranks]
    if any(code != 0 for code in codes):
        print(f"       exit codes {codes}{f', still running: {stuck}' if stuck else ''}", flush=True)
    folder = places[0].folder
    if not all((folder / f"ready-{place.rank}").exists() for place in places):
        return None
    over = min(len((folder / f"ended-{place.rank}").read_text().split()) for place in places)
    if over == len(checks) and any(code != 0 for code in codes):
        print(f"FAILED at the end, after the last check ({title})", flush=True)
        return over - 1
    return over


def _await(ranks: Sequence[Any], deadline: Deadline) -> list[int]:
    """Wait for all ranks, or end them; return those that did not end by themselves."""
    end = time.monotonic() + deadline.left
    while any(process.is_alive() for process in ranks) and time.monotonic() < end:
        if any(process.exitcode for process in ranks):
            end = min(end, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.05)
    stuck = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in stuck:
        os.kill(ranks[rank].pid, signal.SIGUSR1)
        time.sleep(DUMP_SECONDS)
        ranks[rank].kill()
    for process in ranks:
        process.join(GRACE_SECONDS)  # one that hangs in a driver cannot be killed
    return stuck


def leave(failed: int) -> NoReturn:
    """End the script, without waiting for ranks that cannot be ended."""
    print(f"{failed} failed" if failed else "all passed", flush=True)
    os._exit(min(failed, 1))
