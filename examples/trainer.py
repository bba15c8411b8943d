"""`transformers.Trainer` with a parallel model: training, evaluation, saving and resuming checkpoints.

    torchrun --nproc-per-node=2 examples/trainer.py --output /tmp/run           # six steps
    torchrun --nproc-per-node=2 examples/trainer.py --output /tmp/run --steps 9 # resumes from the last checkpoint
    python examples/trainer.py --output /tmp/alone                              # the same model on one process

The model is built from a configuration and trained on the characters of a few lines of text. All runs print the same
losses.
"""

from __future__ import annotations

import argparse
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from paraxis import init, parallelize_model
from paraxis.integrations.trainer import ParallelTrainer

TEXT = "the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs. " * 12
LENGTH = 32


def samples(text: str) -> list[dict[str, list[int]]]:
    """Pieces of the text, each character a token."""
    ids = list(text.encode())
    pieces = [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH, LENGTH)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def make_model() -> LlamaForCausalLM:
    """The same weights on every rank, from the same seed."""
    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def main() -> None:
    """Train on one process, or on the ranks that torchrun has started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="trainer-output", help="where checkpoints go; an existing one is resumed")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()

    model = make_model()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        model = parallelize_model(model, init(), show_progress=False)

    data = samples(TEXT)
    arguments = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=2,  # the global batch size: all ranks see the same batch
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        report_to=[],
        use_cpu=torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        disable_tqdm=True,
        seed=0,
    )
    trainer = ParallelTrainer(model, arguments, train_dataset=data[4:], eval_dataset=data[:4])
    last = get_last_checkpoint(options.output) if os.path.isdir(options.output) else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model(os.path.join(options.output, "final"))  # every rank: an ordinary checkpoint
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            shown = {key: entry[key] for key in ("step", "loss", "grad_norm", "eval_loss") if key in entry}
            if len(shown) > 1:
                print(shown)


if __name__ == "__main__":
    main()
