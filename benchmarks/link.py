"""Two hosts on one machine with a wire of a chosen speed between them.

Two network namespaces, a pair of virtual interfaces, and a token bucket at each end. Needs root, `ip` and
`tc`; takes down what it has put up.
"""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

TIMEOUT = timedelta(seconds=120)
BURST = (
    "256kb"  # what may pass at full speed; larger than one packet of 64 KB that the kernel has not cut yet
)


@dataclass(frozen=True)
class Host:
    """One end of the wire."""

    namespace: str
    interface: str
    address: str


@cache
def why_not() -> str:
    """Say what is missing to make a link, if anything is."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (iproute2)"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    try:
        with two_hosts(None):
            return ""
    except RuntimeError as error:  # a container that does not let even root
        return str(error)


@contextmanager
def two_hosts(rate: str | None) -> Iterator[tuple[Host, Host]]:
    """Put up two hosts; ``rate`` is as tc writes it, such as 100mbit (None: as fast as the machine)."""
    mark = os.getpid()
    hosts = tuple(Host(f"pace{mark}{x}", f"p{mark}{x}", f"10.77.0.{n}/24") for n, x in ((1, "a"), (2, "b")))
    one, other = hosts
    try:
        for host in hosts:
            _run(f"ip netns add {host.namespace}")
        _run(
            f"ip link add {one.interface} netns {one.namespace} type veth "
            f"peer name {other.interface} netns {other.namespace}"
        )
        for host in hosts:
            _run(f"ip -n {host.namespace} addr add {host.address} dev {host.interface}")
            _run(f"ip -n {host.namespace} link set {host.interface} up")
            _run(f"ip -n {host.namespace} link set lo up")
            if rate is not None:
                slow = f"root tbf rate {rate} burst {BURST} latency 50ms"
                _run(f"ip netns exec {host.namespace} tc qdisc replace dev {host.interface} {slow}")
        yield one, other
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{command}` failed: {done.stderr.strip()}")


def on_two_hosts(rate: str | None, work: Callable[..., T], *args: Any) -> list[T]:
    """Call ``work(*args)`` on two ranks with the wire between them; return what each returned."""
    with tempfile.TemporaryDirectory(prefix="paceline-link-") as name, two_hosts(rate) as hosts:
        folder = Path(name)
        Path(folder, "work").write_bytes(pickle.dumps((work, args)))
        ranks = [_start(host, rank, folder) for rank, host in enumerate(hosts)]
        try:
            _wait(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return [pickle.loads(Path(folder, f"result.{rank}").read_bytes()) for rank in range(2)]


def _start(host: Host, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    command = ["ip", "netns", "exec", host.namespace, sys.executable, "-m", "benchmarks.link"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": host.interface}
    return subprocess.Popen([*command, str(rank), str(folder)], env=environment)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Wait for both; when one has failed, the other has nothing to wait for."""
    while any(process.poll() is None for process in ranks):
        failed = [rank for rank, process in enumerate(ranks) if process.poll()]
        if failed:
            break
        time.sleep(0.05)
    for rank, process in enumerate(ranks):
        if process.poll():
            raise RuntimeError(f"rank {rank} ended with {process.returncode}; its own lines are above")


def _be_rank(rank: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    work, args = pickle.loads(Path(folder, "work").read_bytes())
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    result = work(*args)
    Path(folder, f"result.{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _be_rank(int(sys.argv[1]), Path(sys.argv[2]))
