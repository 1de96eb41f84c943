import os, time, torch, paceline, pytest
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from paceline.testing import ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 2)

    def forward(self, x):
        return self.l(x)


@ranks(2)
def test_weight_zero_left_behind(rank):
    a = paceline.replicate(Net())
    b = paceline.replicate(Net())
    x = torch.ones(3, 4)
    b.extra = nn.Linear(2, 2 + rank)
    with pytest.raises(paceline.RanksDisagree), paceline.weight(a, 0):
        (a(x).sum() + b.extra(b.l(x)).sum()).backward()
    del b.extra
    a.zero_grad()
    a(x).sum().backward()
    assert torch.equal(a.l.weight.grad, torch.full((2, 4), 3.0)), a.l.weight.grad


def _show(seen):
    raise AssertionError(seen)


@ranks(2)
def test_fork(rank):
    import atexit

    m = paceline.replicate(Net())
    x = torch.randn(3, 4)
    m(x).sum().backward()
    if rank == 0:
        pid = os.fork()
        if pid == 0:
            atexit._run_exitfuncs()
            os._exit(0)
        os.waitpid(pid, 0)
    seen = []
    for _ in range(3):
        try:
            m(x).sum().backward()
        except Exception as e:
            seen.append(f"{type(e).__name__}: {str(e)[:160]}")
    _show(seen)


@ranks(2)
def test_zero(rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    a = paceline.replicate(nn.Linear(4, 4, bias=False))
    b = paceline.replicate(nn.Linear(4, 4, bias=False))
    opt = ZeroRedundancyOptimizer([*a.parameters(), *b.parameters()], torch.optim.SGD, lr=0.1)
    x = torch.randn(3, 4)
    seen = []
    for i in range(3):
        try:
            a(x).sum().backward()
            b(x).sum().backward()
            opt.step()
        except Exception as e:
            seen.append((i, f"{type(e).__name__}: {str(e)[:160]}"))
        opt.zero_grad()
    _show(seen)


@ranks(4)
def test_change_group_riders(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(0)
    m = paceline.replicate(Net(), group=pairs[rank // 2], timeout_seconds=8)
    opt = torch.optim.SGD(m.parameters(), lr=0.0)
    it = iter(DataLoader(torch.randn(80, 4), batch_size=4))
    for i in range(5 if rank < 2 else 1):
        m(next(it)).sum().backward()
        opt.step()
        opt.zero_grad()
    paceline.replica(m).change_group(dist.group.WORLD)
    seen = []
    for i in range(4):
        if rank == 0 and i == 1:
            next(it)
        try:
            m(next(it)).sum().backward()
            opt.step()
        except Exception as e:
            seen.append((i, type(e).__name__, str(e)[:130]))
        opt.zero_grad()
    time.sleep(1)
    _show(seen)
