"""`--drop-in` puts paceline's class where scripts look for torch's, and runs them as python would."""

import pytest

from tests.launch.helpers import launch, script

TRAIN = """
import sys, torch
import torch.distributed as dist
import torch.nn.parallel.distributed
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(torch.nn.Linear(2, 1))
model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()

print(type(model).__module__, isinstance(model, torch.nn.parallel.DistributedDataParallel))
print(torch.nn.parallel.distributed.DistributedDataParallel is DDP, model.module.weight.grad.tolist())
print(__name__, __file__ == sys.argv[0], sys.argv[1:], sys.modules["__main__"].model is model)
dist.destroy_process_group()
"""


def test_a_script_that_uses_torchs_class_trains_with_ours(tmp_path):
    result = launch("-n", "2", "--drop-in", script(tmp_path, TRAIN), "--steps", "1")

    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        assert [line for line in result.stdout.splitlines() if line.startswith(f"[rank {rank}]")] == [
            f"[rank {rank}] paceline.ddp True",
            f"[rank {rank}] True [[0.5, 0.5]]",
            f"[rank {rank}] __main__ True ['--steps', '1'] True",
        ]


SPAWNING = """
import torch.multiprocessing as mp

def work(rank):
    print("child", rank)

if __name__ == "__main__":
    mp.spawn(work, nprocs=1)
"""


def test_a_script_that_starts_its_own_ranks_is_told_how_to_be_started(tmp_path):
    result = launch("-n", "1", "--drop-in", script(tmp_path, SPAWNING))

    assert result.returncode == 0, result.stderr
    assert "child 0" in result.stdout
    assert result.stderr.count("starts processes of its own (torch.multiprocessing)") == 1
    assert "start it with plain python, and have it import paceline.DistributedDataParallel" in result.stderr


COMPOSABLE = """
import sys, torch
import torch.distributed as dist
from torch.distributed._composable.replicate import replicate

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = replicate(torch.nn.Linear(2, 1), bucket_cap_mb=100)
row = torch.full((1, 2), float(dist.get_rank()))
model.set_requires_gradient_sync(False)
model(row).sum().backward()
local = model.weight.grad.tolist()
model.set_requires_gradient_sync(True)
step = torch.compile(model, backend="eager") if "compiled" in sys.argv else model
step(row).sum().backward()

wrapper = replicate.state(model)._ddp_weakref()
print(type(wrapper).__module__, local, model.weight.grad.tolist(), *model.state_dict())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_torchs_composable_replicate_trains_with_ours(tmp_path, way):
    result = launch("-n", "2", "--drop-in", script(tmp_path, COMPOSABLE), way)

    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        line = f"[rank {rank}] paceline.ddp [[{rank}.0, {rank}.0]] [[1.0, 1.0]] weight bias"
        assert line in result.stdout.splitlines()


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_a_traceback_shows_the_script_alone(tmp_path, as_module):
    (tmp_path / "beside.py").write_text("def fail():\n    raise ValueError('boom')\n")
    path = script(tmp_path, "import beside, sys\nprint(sys.argv[1:])\nbeside.fail()\n", "tool.py")
    target = ("-m", "tool") if as_module else (path,)

    result = launch("-n", "1", "--drop-in", *target, "-x", cwd=tmp_path)

    assert result.returncode == 1
    assert result.stdout == "[rank 0] ['-x']\n"
    traceback = [line for line in result.stderr.splitlines() if line.startswith("[rank 0]")]
    files = [line.split('"')[1].rpartition("/")[2] for line in traceback if ", line " in line]
    assert files == ["tool.py", "beside.py"]
    assert traceback[-1] == "[rank 0] ValueError: boom"
