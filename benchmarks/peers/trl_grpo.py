"""The peer: TRL's GRPOTrainer on the same model, data, reward and numbers. Runs in an environment of its own.

    python trl_grpo.py --model DIR --data FILE.jsonl --steps N --prompts 32 --samples 8 --threads 1 --seed 0

Prints one JSON line a step, {"step", "t_s", "reward"}; `t_s` counts from the start of `train()`, imports excluded.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from typing import Any


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-response-tokens", type=int, default=160)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    with open(arguments.data, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    data = Dataset.from_list([{"prompt": row["question"], "answer": str(row["answer"])} for row in rows])
    tag = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

    def exact(completion_ids: list[list[int]], answer: list[str], **_: object) -> list[float]:
        """1 for an ended response whose last <answer> equals the reference. TRL's own text has lost special tokens."""
        rewards: list[float] = []
        for ids, expected in zip(completion_ids, answer, strict=True):
            found = tag.findall(tokenizer.decode(ids, skip_special_tokens=False))
            ended = bool(ids) and ids[-1] == tokenizer.eos_token_id
            rewards.append(1.0 if ended and found and found[-1].strip() == expected else 0.0)
        return rewards

    started = time.monotonic()

    class Report(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            nonlocal started
            started = time.monotonic()

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            logs = kwargs.get("logs")
            if logs and "reward" in logs:
                line = {"step": state.global_step, "t_s": time.monotonic() - started, "reward": float(logs["reward"])}
                print(json.dumps(line), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=arguments.prompts * arguments.samples,
            gradient_accumulation_steps=1,
            num_generations=arguments.samples,
            num_iterations=1,
            max_completion_length=arguments.max_response_tokens,
            temperature=1.0,
            top_p=1.0,
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            loss_type="dapo",
            scale_rewards="group",
            learning_rate=arguments.learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=5,
            adam_beta1=0.9,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            max_steps=arguments.steps,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=arguments.seed,
        )
        trainer = GRPOTrainer(
            model=model, reward_funcs=exact, args=config, train_dataset=data, processing_class=tokenizer,
            callbacks=[Report()],
        )  # fmt: skip
        trainer.train()


if __name__ == "__main__":
    sys.exit(main())
