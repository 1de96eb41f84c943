"""A small character-level GPT and the text it learns: Python's own standard library. Plain torch."""

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INDENT = "    "  # one character for the model: a tab
VOCABULARY = 128  # ASCII; every other character becomes "?"
HEADS = 4


class Block(nn.Module):
    """Attention, then two linear layers, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)
        for last in (self.project, self.contract):
            nn.init.zeros_(last.weight)  # a block starts as the identity: trains faster

    def attend(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, HEADS, -1))  # (batch, context, 3, heads, width / heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (batch, heads, context, width / heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(-2))

    def forward(self, x: Tensor) -> Tensor:  # (batch, context, width) -> the same
        x = x + self.attend(self.norm1(x))
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))


class GPT(nn.Module):
    """Predict the next character at every position."""

    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        for table in (self.characters, self.positions):
            nn.init.normal_(table.weight, std=0.1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, characters: Tensor) -> Tensor:  # (batch, context) -> (batch, context, vocabulary)
        x = self.characters(characters) + self.positions.weight[: characters.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def loss(self, rows: Tensor) -> Tensor:  # (batch, context + 1) -> ()
        return F.cross_entropy(self(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    @torch.no_grad()
    def write(self, prompt: str, length: int) -> str:
        """Return the prompt and the characters that the model puts behind it."""
        device, context = self.head.weight.device, self.positions.num_embeddings
        generator = torch.Generator(device).manual_seed(0)
        characters = torch.tensor([list(prompt.replace(INDENT, "\t").encode("ascii"))], device=device)
        for _ in range(length):
            logits = self(characters[:, -context:])[:, -1] / 0.7
            chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            characters = torch.cat([characters, chosen], 1)
        text = bytes(characters[0].tolist()).decode("ascii").replace("\t", INDENT)
        return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def read_text() -> tuple[Tensor, Tensor]:
    """Return the sources of the standard library: the first 95 % to train on, and the rest, held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = (file.read_text("utf-8", "replace") for file in sorted(folder.glob("*.py")))
    text = "".join(sources).replace(INDENT, "\t")[:5_000_000].encode("ascii", "replace")
    if len(text) < 100_000:
        raise SystemExit(f"no text to train on: {folder} holds only {len(text)} characters of Python source")
    characters = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = len(text) * 95 // 100
    return characters[:cut], characters[cut:]
