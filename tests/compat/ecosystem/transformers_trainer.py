"""The Hugging Face Trainer with a tiny BERT that has learnt nothing yet; it goes on from its own last checkpoint."""

import os
import time

import torch
import toy
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Words(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.arange(index, index + 6) % 30
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": torch.tensor(index % 2)}


class Told(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        time.sleep(toy.STEP_S)

    def on_save(self, args, state, control, **_):
        if state.is_world_process_zero:
            print(f"epoch {round(state.epoch) - 1}", flush=True)


torch.manual_seed(1)
config = BertConfig(
    vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
arguments = TrainingArguments(
    "transformers-ckpt",
    use_cpu=True,
    num_train_epochs=toy.EPOCHS,
    per_device_train_batch_size=16,
    save_strategy="epoch",
    save_total_limit=2,
    report_to=[],
    logging_strategy="no",
    disable_tqdm=True,
)
assert arguments.world_size == int(os.environ["WORLD_SIZE"])
trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=Words(), callbacks=[Told()])
last = get_last_checkpoint("transformers-ckpt") if os.path.isdir("transformers-ckpt") else None
trainer.train(resume_from_checkpoint=last)
if trainer.is_world_process_zero():
    toy.result(trainer.accelerator.unwrap_model(trainer.model))
