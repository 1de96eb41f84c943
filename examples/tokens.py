"""Lines of different lengths: each token counts the same, on whatever rank; and checks of what may go wrong.

    paceline run -n 2 examples/tokens.py

The base is a plain training loop; what paceline adds is marked.
"""

import inspect
import statistics
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

import paceline

STEPS = 60
LINES = 4  # in a batch of one rank


class Bigrams(nn.Module):
    """Guesses the next character from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(128, 32)
        self.head = nn.Linear(32, 128)

    def loss(self, text: torch.Tensor) -> torch.Tensor:
        """Return the mean over the characters of a text."""
        return F.cross_entropy(self.head(self.table(text[:-1])), text[1:])


def batches(rank: int, size: int) -> Iterator[torch.Tensor]:
    """Yield this rank's batches: a few lines of a module's source, some long and some short."""
    lines = [line for line in inspect.getsource(statistics).splitlines() if line.strip() and line.isascii()]
    for step in range(STEPS):
        start = (step * size + rank) * LINES % (len(lines) - LINES)
        yield torch.tensor(list("\n".join(lines[start : start + LINES]).encode()))


def main() -> None:
    """Train on as many tokens as this rank has in each batch."""
    with paceline.world() as world:
        torch.manual_seed(0)
        model = Bigrams()
        paceline.replicate(model, check_finite="skip")  # <- a NaN on one rank drops the step on all
        paceline.audit(model, every=20)  # <- the ranks' weights and Adam's state are compared
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step, text in enumerate(batches(world.rank, world.size)):
            optimizer.zero_grad()
            tokens = len(text) - 1
            if tokens < 20:
                paceline.skip(model)  # <- this rank's batch is left out, the others' are not
            else:
                with paceline.weight(model, tokens):  # <- what the mean over this batch stands for
                    loss = model.loss(text)
                    loss.backward()
            norm = paceline.replica(model).clip_grad_norm_(1.0)  # <- a pass over buckets, not parameters
            optimizer.step()
            if world.rank == 0 and step % 20 == 0:
                print(
                    f"step {step}: {tokens} tokens here, loss {loss.item():.3f}, norm {norm:.3f}", flush=True
                )
        total = sum(p.detach().double().sum() for p in model.parameters())
        print(f"loss {loss.item():.3f}, sum of the weights {total:.12f}")


if __name__ == "__main__":
    main()
