"""What a bug report needs to know of a machine and a run: ``paceline env``.

Only variables from a list are shown, so that no secret of the environment ends up in a report.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# How the ranks were started and find each other.
LAUNCH = """
    RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT
    TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE
    SLURM_JOB_ID SLURM_JOB_NUM_NODES SLURM_JOB_NODELIST SLURM_NODEID SLURM_NTASKS SLURM_NTASKS_PER_NODE
    SLURM_PROCID SLURM_LOCALID SLURM_CPUS_PER_TASK SLURM_GPUS_ON_NODE SLURM_GPUS_PER_TASK SLURM_STEP_ID
    OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK PMI_RANK PMI_SIZE
"""

# What changes how they talk, how many threads they have and which devices they see.
SETTINGS = """
    GLOO_SOCKET_IFNAME GLOO_DEVICE_TRANSPORT GLOO_SOCKET_FAMILY TP_SOCKET_IFNAME
    NCCL_SOCKET_IFNAME NCCL_SOCKET_FAMILY NCCL_SOCKET_NTHREADS NCCL_NSOCKS_PERTHREAD NCCL_DEBUG
    NCCL_DEBUG_SUBSYS NCCL_IB_DISABLE NCCL_IB_HCA NCCL_IB_TIMEOUT NCCL_IB_GID_INDEX NCCL_NET
    NCCL_NET_GDR_LEVEL NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_SHM_DISABLE NCCL_NVLS_ENABLE NCCL_ALGO NCCL_PROTO
    NCCL_BUFFSIZE NCCL_NTHREADS NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MAX_CTAS
    NCCL_CUMEM_ENABLE NCCL_TOPO_FILE NCCL_CROSS_NIC NCCL_BLOCKING_WAIT NCCL_ASYNC_ERROR_HANDLING
    TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_AVOID_RECORD_STREAMS
    TORCH_NCCL_ENABLE_MONITORING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_TRACE_BUFFER_SIZE
    TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_CUDA_EVENT_CACHE TORCH_NCCL_HIGH_PRIORITY
    TORCH_DISTRIBUTED_DEBUG TORCH_CPP_LOG_LEVEL TORCH_SHOW_CPP_STACKTRACES TORCH_LOGS
    PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF PYTORCH_NO_CUDA_MEMORY_CACHING
    CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_DEVICE_MAX_CONNECTIONS
    CUDA_MODULE_LOADING OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS OMP_PROC_BIND KMP_AFFINITY
    GOMP_CPU_AFFINITY CUBLAS_WORKSPACE_CONFIG NVIDIA_TF32_OVERRIDE
"""

PACKAGES = ("numpy", "lightning", "pytorch-lightning", "accelerate", "transformers")

SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
SMI_SECONDS = 20

Section = dict[str, Any]


def collect(version: str, variables: Mapping[str, str] = os.environ) -> dict[str, Section]:
    """Find out everything that is shown, beside paceline's ``version``. Imports torch; sets up no GPU."""
    return {
        "versions": {
            "paceline": version,
            "python": f"{platform.python_version()} ({platform.python_implementation()})",
            **_torch(),
            **_installed(PACKAGES),
        },
        "machine": _machine(),
        "gpus": _gpus(),
        "launch": _among(variables, LAUNCH),
        "settings": _among(variables, SETTINGS),
    }


def as_text(found: Mapping[str, Section]) -> str:
    """Write it down for people."""
    lines = []
    for title, section in found.items():
        lines.append(title)
        width = max((len(name) for name in section), default=0) + 2
        lines += [f"  {name:<{width}}{value}" for name, value in section.items()] or ["  none"]
    return "\n".join(lines)


def as_json(found: Mapping[str, Section]) -> str:
    """Write it down for programs."""
    return json.dumps(found, indent=2)


def _among(variables: Mapping[str, str], names: str) -> Section:
    return {name: variables[name] for name in names.split() if name in variables}


def _torch() -> Section:
    if importlib.util.find_spec("torch") is None:
        return {"torch": "not installed"}
    import torch
    import torch.distributed as dist

    found: Section = {"torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    if dist.is_available():
        known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
        found["backends"] = ", ".join(name for name, is_there in known.items() if is_there())
        found["nccl"] = _nccl() if dist.is_nccl_available() else None
    return {name: value for name, value in found.items() if value}


def _nccl() -> str:
    from torch.cuda import nccl

    return ".".join(str(part) for part in nccl.version())  # type: ignore[no-untyped-call]


def _installed(names: Sequence[str]) -> Section:
    found: Section = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _machine() -> Section:
    found: Section = {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": _cores(),
        "memory": _memory(),
    }
    return {name: value for name, value in found.items() if value}


def _cores() -> str:
    """Say how many cores this process may use, of how many there are."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{usable} of {os.cpu_count()}"


def _processor() -> str:
    return _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def _memory() -> str:
    kib = _field("/proc/meminfo", "MemTotal").removesuffix(" kB")
    return f"{int(kib) / 1024**2:.1f} GiB" if kib.isdigit() else ""


def _field(file: str, name: str) -> str:
    """Return a field of one of Linux's tables, nothing elsewhere."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return ""
    found = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name)
    return next(found, "")


def _gpus() -> Section:
    """Name the GPUs as the driver does: to ask torch for a name would set the GPU up."""
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    visible = torch.cuda.device_count()
    listed = _from_driver()
    if not visible and not listed:
        return {}
    return {"visible to torch": visible, **{f"gpu {i}": line for i, line in enumerate(listed)}}


def _from_driver() -> list[str]:
    """Return a line for each GPU of this machine: name, memory, driver. None if the tool is not there."""
    if shutil.which(SMI[0]) is None:
        return []
    try:
        shown = subprocess.run(SMI, capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"{SMI[0]} failed: {error}"]
    return shown.stdout.strip().splitlines()
