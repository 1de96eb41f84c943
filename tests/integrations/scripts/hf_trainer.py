"""The Hugging Face Trainer on a tiny GPT-2: accumulation, clipping, checkpointed layers, save and resume."""

from pathlib import Path
from typing import Any

import task
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

BATCH, ACCUMULATE, STEPS, LENGTH, VOCABULARY, CLIP, RATE = 2, 2, 4, 12, 32, 0.3, 1e-2
UNSCORED = -100  # labels that the loss leaves out


def model(seed: int = task.RANK) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config)


def texts() -> list[dict[str, Tensor]]:
    """Return made-up sequences of which different numbers of tokens are scored."""
    generator = torch.Generator().manual_seed(3)
    count = BATCH * ACCUMULATE * STEPS * task.SIZE
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    labels = tokens.clone()
    for index, row in enumerate(labels):
        row[LENGTH - index % 5 :] = UNSCORED
    return [{"input_ids": t, "labels": label} for t, label in zip(tokens, labels, strict=True)]


class Witness(TrainerCallback):
    """Remember what the Trainer made of the model, and count its steps."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.seen: tuple[str, bool] | None = None
        self.steps = 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.seen = task.describe(self.trainer.model_wrapped)
        self.steps += 1


def train(resume: Path | None = None, **options: Any) -> dict[str, Any]:
    arguments = TrainingArguments(
        output_dir=str(task.FOLDER / "out"),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        train_sampling_strategy="sequential",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        weight_decay=0.0,
        max_grad_norm=CLIP,
        save_steps=STEPS // 2,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(model(), arguments, train_dataset=texts(), eval_dataset=texts())
    witness = Witness(trainer)
    trainer.add_callback(witness)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return {
        "wrapper": witness.seen,
        "weights": task.weights(trainer.accelerator.unwrap_model(trainer.model_wrapped)),
        "steps": witness.steps,
        "loss": trainer.evaluate()["eval_loss"],
    }


def alone() -> dict[str, Tensor]:
    """Train on whole batches; the loss is the mean over all tokens that are scored, wherever they are."""
    alone = model(0)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=RATE, weight_decay=0.0)
    data, size = texts(), BATCH * ACCUMULATE * task.SIZE
    for step in range(STEPS):
        batch = data[step * size : (step + 1) * size]
        optimizer.zero_grad()
        alone(**{key: torch.stack([item[key] for item in batch]) for key in batch[0]}).loss.backward()
        nn.utils.clip_grad_norm_(alone.parameters(), CLIP)
        optimizer.step()
    return task.weights(alone)


def main() -> None:
    trained = train()
    half_way = task.FOLDER / "out" / f"checkpoint-{STEPS // 2}"
    resumed = train(half_way)
    checkpointed = train(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})
    task.tell(
        trained={**trained, "alone": alone()},
        resumed=resumed,
        checkpointed={**checkpointed, "alone": alone()},
    )


if __name__ == "__main__":
    main()
