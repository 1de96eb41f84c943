"""What the examples show in the terminal: one live line while they train, one table at the end."""

import os
import stat
import time


class Progress:
    """The line that says how it goes: redrawn in place, and left standing after each tenth of the way."""

    def __init__(self, first_step: int, steps: int, tokens_per_step: int) -> None:
        self.first_step, self.steps, self.tokens_per_step = first_step, steps, tokens_per_step
        self.losses: list[float] = []
        self.began = time.monotonic()
        self._next_stand = 0
        self._live = is_live()

    def update(self, done: int, loss: float) -> None:
        """Show the loss and the speed of all ranks after so many steps."""
        self.losses.append(loss)
        self.seconds = time.monotonic() - self.began
        self.tokens_per_second = (done - self.first_step) * self.tokens_per_step / self.seconds
        left = clock((self.steps - done) * self.tokens_per_step / self.tokens_per_second)
        line = (
            f"step {done}/{self.steps}  loss {loss:.3f}  {self.tokens_per_second:,.0f} tokens/s  {left} left"
        )
        stands = done >= self._next_stand or done == self.steps
        if stands:
            self._next_stand = done + self.steps // 10
        if stands or self._live:
            print(f"\r{line:<70}" if self._live else line, end="\n" if stands else "", flush=True)

    def summary(self) -> str:
        """Return the speed over all steps."""
        steps = self.steps - self.first_step
        return f"{self.tokens_per_second:,.0f} tokens/s, {clock(self.seconds)} for {steps} steps"


def is_live() -> bool:
    """Tell whether a line can be redrawn: on a terminal, or through `paceline run`, which does it there."""
    return os.isatty(1) or stat.S_ISFIFO(os.fstat(1).st_mode)


def clock(seconds: float) -> str:
    """Return minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def print_table(rows: dict[str, str]) -> None:
    """Print names and values in two columns."""
    for name, value in rows.items():
        print(f"{name:<{max(map(len, rows))}}  {value}")
