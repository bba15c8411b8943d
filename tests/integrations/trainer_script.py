"""A training script as a user writes it: plain ``Trainer``, or TRL's ``SFTTrainer``, on one process or with torchrun.

Prints a JSON line with the losses. Run by the tests of this folder.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from paraxis import ParallelExecutionCtx, parallelize_model


def load(folder: str) -> Any:
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return AutoModelForCausalLM.from_pretrained(folder)
    dist.init_process_group("gloo")
    ctx = ParallelExecutionCtx(tp_group=dist.group.WORLD, current_device=torch.device("cpu"))
    return parallelize_model(folder, ctx, show_progress=False)


def adapted(model: Any, options: argparse.Namespace) -> Any:
    if not options.lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))


def common(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "output_dir": options.output,
        "max_steps": options.steps,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
        "use_cpu": options.use_cpu,
    }


def plain_trainer(model: Any, options: argparse.Namespace) -> Trainer:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, 256, (24, 16), generator=generator).tolist()
    data = [{"input_ids": row, "labels": row} for row in rows]
    evaluation = {"eval_dataset": data[:4], "eval_strategy": "steps", "eval_steps": 2}
    arguments = TrainingArguments(**common(options), **{k: v for k, v in evaluation.items() if k != "eval_dataset"})
    return Trainer(model=model, args=arguments, train_dataset=data[4:], eval_dataset=evaluation["eval_dataset"])


def sft_trainer(model: Any, options: argparse.Namespace) -> Trainer:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": i for i in range(4, 256)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(4, 256, (24, 16), generator=generator).tolist()
    data = Dataset.from_dict({"text": [" ".join(f"w{i}" for i in row[: 6 + n % 10]) for n, row in enumerate(rows)]})
    arguments = SFTConfig(**common(options), max_length=32, bf16=False, gradient_checkpointing=False)
    return SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--sft", action="store_true")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--use-cpu", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = adapted(load(options.model), options)
    trainer = (sft_trainer if options.sft else plain_trainer)(model, options)
    last = get_last_checkpoint(options.output) if os.path.isdir(options.output) else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model(os.path.join(options.output, "final"))
    if trainer.is_world_process_zero():
        log = {
            f"{entry['step']} {key}": entry[key]
            for entry in trainer.state.log_history
            for key in ("loss", "grad_norm", "eval_loss", "learning_rate", "mean_token_accuracy")
            if key in entry
        }
        print("LOG " + json.dumps(log))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
