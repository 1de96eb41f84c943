"""Models that are sharded over the tensor-parallel dimension of a mesh, and the same in one process."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH = 8


class MLP(nn.Module):
    """Column-wise, then row-wise; the rest is plain, and the same on all tensor-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(x).relu()))


class Attention(nn.Module):
    HEAD = WIDTH // 2

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, self.HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Sequence-parallel between the blocks' matrices: its norms see parts of a sequence."""

    VOCABULARY = 11

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, self.VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @staticmethod
    def plan(blocks: int = 2) -> dict[str, Any]:
        plan: dict[str, Any] = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        for number in range(blocks):
            block = {
                "norm1": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                "attention.q": ColwiseParallel(),
                "attention.k": ColwiseParallel(),
                "attention.v": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "norm2": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
            plan |= {f"blocks.{number}.{name}": style for name, style in block.items()}
        return plan


def mesh_of(dp: int = 2, tp: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def mlp(mesh: DeviceMesh, *, throughout: bool = False) -> tuple[MLP, MLP]:
    """Return a sharded model, and the same model whole. ``throughout``: no parameter is a plain one."""
    torch.manual_seed(1)
    whole = MLP()
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if throughout:
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(copy.deepcopy(whole), mesh, plan), whole


def transformer(mesh: DeviceMesh) -> tuple[Transformer, Transformer]:
    torch.manual_seed(1)
    whole = Transformer()
    return parallelize_module(copy.deepcopy(whole), mesh, Transformer.plan()), whole


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Put a sharded tensor together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def batch_of(step: int, rank: int | None = None, ranks: int = 2, *shape: int) -> torch.Tensor:
    """Return a batch, or one data-parallel rank's half of it; the same on all tensor-parallel ranks."""
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(4, *(shape or (WIDTH,)), generator=generator)
    return batch if rank is None else batch.chunk(ranks)[rank]


def assert_gradients_equal(model: nn.Module, whole: nn.Module, atol: float = 1e-6) -> None:
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert p.grad.shape == p.shape, name
            torch.testing.assert_close(
                full(p.grad), q.grad, atol=atol, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def assert_parts_equal(model: nn.Module, group: Any) -> None:
    """Raise if the ranks of a group do not hold the same bits."""
    for name, p in model.named_parameters():
        mine = local(p).detach().contiguous()
        mine = mine.cpu() if dist.get_backend(group) == "gloo" else mine
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, mine, group=group)
        assert all(torch.equal(each, mine) for each in everyone), name
