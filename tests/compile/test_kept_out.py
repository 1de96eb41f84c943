"""Dynamo is kept out of the engine: it compiles what users have written, and nothing of ours."""

import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.compile.installing import TALKING
from paceline.testing import ranks

ROOT = Path(__file__).parents[2]

# Below the reducer, and not kept out: Dynamo may trace into them without harm.
HARMLESS = {
    "abandoned", "accumulation", "activity", "board", "buffer_hooks", "buffer_policies", "call_site",
    "clocks", "collective_log", "crossings", "errors", "fake_tensors", "fingerprint", "frames", "hooks",
    "hosts", "interrupts",
    "landing", "link_faults", "loaders", "local", "memory", "module_hooks", "nested", "own_hooks",
    "orphans", "places", "plan", "planner", "quiet", "remote", "reports", "retrace", "riders", "sparse",
    "stats", "stepping", "surroundings", "tally", "torch_collectives", "tree", "unread", "weights", "wiring",
}  # fmt: skip


def test_every_part_of_the_engine_is_kept_out_or_known_to_be_harmless() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = contract["layers"]
    below = layers[layers.index("(reducer)") + 1 :]
    names = {name.strip(" ()") for layer in below for name in layer.split("|")}

    assert names - set(TALKING) == HARMLESS


class Remembering(nn.Module):
    """Sets a part of itself in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.first
        return self.second(self.first(x).relu())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@ranks(2)
def test_a_forward_that_sets_a_part_of_a_module_is_not_compiled_again_and_again(rank: int) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph

    model = paceline.replicate(Remembering())
    loss = torch.compile(lambda x: model(x).square().mean(), backend=backend)
    torch._dynamo.reset()
    counts = []
    for _ in range(6):
        loss(torch.ones(2, 8)).backward()
        model.zero_grad()
        counts.append(len(graphs))

    assert counts == counts[:1] * 6
