"""Hugging Face's Trainer with a tiny model made from a configuration; it evaluates and saves once."""

import os

from said import say
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        for name in ("loss", "eval_loss"):
            if name in logs:
                say(logs[name])


set_seed(0)
model = BertForSequenceClassification(
    BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=32)
)
data = [{"input_ids": [turn % 30 + 1, 2, 3], "labels": turn % 2} for turn in range(48)]
arguments = TrainingArguments(
    os.getcwd(), max_steps=8, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_steps=8, eval_steps=8,
    eval_strategy="steps", logging_steps=1, disable_tqdm=True,
)  # fmt: skip
Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8], callbacks=[Losses()]).train()
