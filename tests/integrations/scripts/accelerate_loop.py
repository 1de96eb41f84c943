"""Accelerate: accumulation, clipping, unwrapping, state on disk, a forced sync, a hook, uneven inputs."""

from typing import Any
from unittest import mock

import task
import torch
from accelerate import Accelerator, DataLoaderConfiguration, DDPCommunicationHookType
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn

EPOCHS, BATCH, ACCUMULATE, CLIP = 2, 4, 2, 0.5
UNEVEN = 28  # samples: four batches for rank 0, three for rank 1


def data(count: int = task.SAMPLES) -> torch.utils.data.DataLoader[tuple[Tensor, ...]]:
    """Return a plain loader; it is Accelerate that deals whole batches out to the ranks."""
    inputs, targets = task.samples()
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs[:count], targets[:count]), BATCH)


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any) -> None:
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(task.mse(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()


def prepare(accelerator: Accelerator, count: int = task.SAMPLES) -> tuple[nn.Module, Any, Any]:
    model = task.network()
    return accelerator.prepare(model, task.sgd(model), data(count))


def seen(accelerator: Accelerator, model: nn.Module) -> dict[str, Any]:
    return {"wrapper": task.describe(model), "weights": task.weights(accelerator.unwrap_model(model))}


def accumulate_save_and_load() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = task.network()
    wrapped, optimizer, loader = accelerator.prepare(model, task.sgd(model), data())
    train(accelerator, wrapped, optimizer, loader)
    accelerator.save_state(task.FOLDER / "state")
    train(accelerator, wrapped, optimizer, loader)
    trained = seen(accelerator, wrapped)
    accelerator.load_state(task.FOLDER / "state")
    train(accelerator, wrapped, optimizer, loader)
    batches = task.whole_batches(BATCH * ACCUMULATE * task.SIZE, EPOCHS)
    return {
        "trained": {**trained, "alone": task.solve_alone(task.network(0), batches, clip=CLIP)},
        "resumed": seen(accelerator, wrapped),
        "unwrapped": accelerator.unwrap_model(wrapped) is model,
        "backend": (accelerator.distributed_type.value, torch.distributed.get_backend()),
    }


def sync_late() -> dict[str, Any]:
    """Run both forwards inside no_sync(), and sync in the second backward, as Accelerate's guide does."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepare(accelerator)
    first, second = list(loader)[:2]
    with accelerator.no_sync(model):
        losses = [task.mse(model, batch) / 2 for batch in (first, second)]
    accelerator.backward(losses[0])
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[1])
    optimizer.step()
    alone = task.solve_alone(task.network(0), task.whole_batches(2 * BATCH * task.SIZE, 1)[:1])
    return {**seen(accelerator, model), "alone": alone}


def compress() -> dict[str, Any]:
    kwargs = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    model, optimizer, loader = prepare(accelerator)
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(task.mse(model, batch))
        optimizer.step()
    alone = task.solve_alone(task.network(0), task.whole_batches(BATCH * task.SIZE, 1))
    return {**seen(accelerator, model), "alone": alone}


def join_uneven_inputs() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    model, optimizer, loader = prepare(accelerator, UNEVEN)
    batches = 0
    # Accelerate joins on GPUs only, although nothing in it or in torch's Join needs one.
    with mock.patch.object(Accelerator, "multi_device", True), accelerator.join_uneven_inputs([model]):
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(task.mse(model, batch))
            optimizer.step()
            batches += 1
    return {**seen(accelerator, model), "alone": uneven_alone(), "batches": batches}


def uneven_alone() -> dict[str, Tensor]:
    """Divide by the number of ranks that began, as Join does unless told otherwise."""
    inputs, targets = task.samples()
    step = BATCH * task.SIZE
    batches = [
        (inputs[i : min(i + step, UNEVEN)], targets[i : min(i + step, UNEVEN)])
        for i in range(0, UNEVEN, step)
    ]
    return task.solve_alone(
        task.network(0), batches, lambda m, batch: task.mse(m, batch) * len(batch[0]) / step
    )


def main() -> None:
    task.tell(
        **accumulate_save_and_load(),
        late=sync_late(),
        compressed=compress(),
        uneven=join_uneven_inputs(),
    )


if __name__ == "__main__":
    main()
