"""Casts of parameters: made with few operators, tied to the parameters by autograd, beside the computation.

    Batch     parameters of one device and dtype: one operator casts them, one node takes their gradients back
    Forward   the casts of one call of a module, each made once

A batch's gradients arrive together, when the last of them is there. So batches are small enough for
communication to start early, and few enough to cost little.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from paceline.sharded import local_parts
from paceline.torch_private import is_dtensor

Wanted = tuple[torch.Tensor, torch.dtype]  # a parameter, and what it is to be cast to
_Key = tuple[int, torch.dtype]


class Source(Protocol):
    """Who casts parameters for a reader."""

    def cast(self, parameter: torch.Tensor, dtype: torch.dtype, batch: int | None) -> torch.Tensor:
        """Return a cast of a parameter; ``batch`` says which others it was meant to be cast with."""


class Again:
    """Casts for what a backward computes again. Nothing is kept: it is not told when that is over."""

    def cast(self, parameter: torch.Tensor, dtype: torch.dtype, batch: int | None) -> torch.Tensor:
        """See Source."""
        alone = Batch([parameter], dtype)
        alone.fill()
        return alone.read(0)


class Traced:
    """Casts inside compiled code."""

    def cast(self, parameter: torch.Tensor, dtype: torch.dtype, batch: int | None) -> torch.Tensor:
        """See Source."""
        return parameter.to(dtype)


AGAIN, TRACED = Again(), Traced()


class Forward:
    """Casts for one call of a module, each made once.

    On a GPU all are started at the beginning, on a stream of their own, and who reads one waits for it there.
    On a CPU a batch is cast when the first of it is read.
    """

    def __init__(
        self,
        batches: Sequence[Callable[[], Iterable[Wanted]]],
        streams: dict[torch.device, torch.cuda.Stream],
    ) -> None:
        self._batches = batches
        self._there: dict[_Key, torch.Tensor] = {}
        self._held: list[Batch] = []  # with the parameters, whose ids are keys here
        self._started: dict[_Key, tuple[Batch, int]] = {}
        self._sides: list[tuple[torch.cuda.Stream, torch.cuda.Stream]] = []
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._start_on_gpus(streams)

    def cast(self, parameter: torch.Tensor, dtype: torch.dtype, batch: int | None) -> torch.Tensor:
        """See Source."""
        key = (id(parameter), dtype)
        cast = self._there.get(key)
        if cast is not None:
            return cast
        if key in self._started:
            started, position = self._started[key]
            return started.read(position)
        if _is_on_gpu(parameter):  # it was not there when the call began
            return AGAIN.cast(parameter, dtype, batch)
        others = () if batch is None else self._batches[batch]()
        for new in self._new_batches([(parameter, dtype), *others]):
            new.fill()
            self._held.append(new)
            self._there.update((key, new.read(position)) for position, key in enumerate(new.keys()))
        return self._there[key]

    def _new_batches(self, wanted: Iterable[Wanted]) -> list["Batch"]:
        """Make room for what has not been cast yet."""
        groups: dict[Any, dict[int, torch.Tensor]] = {}
        for parameter, dtype in wanted:
            key = (id(parameter), dtype)
            if key not in self._there and key not in self._started:
                mesh = getattr(parameter, "device_mesh", None)  # no operator takes DTensors and others
                kind = (parameter.device, parameter.dtype, dtype, mesh)
                groups.setdefault(kind, {})[id(parameter)] = parameter
        return [Batch(list(group.values()), dtype) for (_, _, dtype, _), group in groups.items()]

    def _start_on_gpus(self, streams: dict[torch.device, torch.cuda.Stream]) -> None:
        on: dict[torch.device, list[Batch]] = {}
        for wanted in self._batches:
            for batch in self._new_batches([want for want in wanted() if _is_on_gpu(want[0])]):
                on.setdefault(batch.device, []).append(batch)
                self._started.update((key, (batch, at)) for at, key in enumerate(batch.keys()))
        for device, batches in on.items():
            side = streams.get(device)
            if side is None:
                side = streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            main = torch.cuda.current_stream(device)
            # After the optimizer's step, and after everything that used the casts' memory before them.
            side.wait_stream(main)
            self._sides.append((side, main))
            with torch.cuda.stream(side):
                for batch in batches:
                    batch.fill_beside(main)

    def close(self) -> None:
        """Make it safe to let the casts go."""
        # Their memory is the main stream's, which must not use it for something else before it is written.
        for side, main in self._sides:
            main.wait_stream(side)


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


class Batch:
    """Parameters of one device and dtype, and their casts."""

    def __init__(self, parameters: list[torch.Tensor], dtype: torch.dtype) -> None:
        self.parameters = parameters
        self.dtype = dtype
        self.device = parameters[0].device
        # Each has its own memory: backward frees them one by one, and an edit of one is no edit of the rest.
        self._casts = [torch.empty_like(p, dtype=dtype, requires_grad=False) for p in parameters]
        self._tied = False
        self._main: torch.cuda.Stream | None = None
        self._filled: torch.cuda.Event | None = None
        self._ready_on: set[torch.cuda.Stream] = set()

    def keys(self) -> list[_Key]:
        """Return what each cast is known by."""
        return [(id(parameter), self.dtype) for parameter in self.parameters]

    def fill(self) -> None:
        """Cast, in the current stream."""
        with torch.no_grad():
            torch._foreach_copy_(local_parts(self._casts), local_parts(self.parameters))

    def fill_beside(self, main: torch.cuda.Stream) -> None:
        """Cast in the current stream, beside the one that the memory belongs to."""
        self.fill()
        self._main = main
        self._filled = torch.cuda.current_stream(self.device).record_event()

    def read(self, position: int) -> torch.Tensor:
        """Return a cast that the current stream can use."""
        if self._filled is not None:
            self._await(self._filled)
        if not self._tied:
            self._tie()
        return self._casts[position]

    def _await(self, filled: torch.cuda.Event) -> None:
        stream = torch.cuda.current_stream(self.device)
        if stream in self._ready_on:
            return
        stream.wait_event(filled)
        self._ready_on.add(stream)
        if stream != self._main:
            for cast in self._casts:
                cast.record_stream(stream)

    def _tie(self) -> None:
        # Here and not beside the computation: autograd runs a node on the stream that it was made on. And
        # with gradients enabled: the first reader may have them disabled, and the next one not.
        self._tied = True
        if any(parameter.requires_grad for parameter in self.parameters):
            with torch.enable_grad():
                _Tie.apply(self._casts, *self.parameters)  # type: ignore[no-untyped-call]


class _Tie(torch.autograd.Function):
    """Makes casts the children of their parameters. The casts are there already: nothing is computed."""

    @staticmethod
    def forward(ctx: Any, casts: list[torch.Tensor], *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Hand out the casts. Those of frozen parameters get no gradient."""
        ctx.set_materialize_grads(False)
        ctx.dtype = parameters[0].dtype
        frozen = [cast for cast, p in zip(casts, parameters, strict=True) if not p.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(casts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Cast the gradients that came; a parameter that was not used has none."""
        return None, *_cast_all(gradients, ctx.dtype)


def _cast_all(tensors: Sequence[torch.Tensor | None], dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Cast tensors with one operator, unless they are sparse or a graph is to be made of it."""
    dense = [t for t in tensors if t is not None and t.layout is torch.strided]
    # A DTensor's gradient may be partial, and only its own cast says so again.
    if torch.is_grad_enabled() or len(dense) < 2 or any(map(is_dtensor, dense)):
        return [None if t is None else t.to(dtype) for t in tensors]
    cast = [torch.empty_like(t, dtype=dtype) for t in dense]
    torch._foreach_copy_(cast, dense)
    done = iter(cast)
    return [None if t is None else next(done) if t.layout is torch.strided else t.to(dtype) for t in tensors]
