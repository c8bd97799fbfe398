"""A Trainer of transformers that accumulates gradients, with a loss of its own."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **options):
        outputs = model(**inputs)
        print(f"loss {outputs.loss.item():.7f}", flush=True)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=96,
    save_steps=8,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    logging_steps=1000,
)
OwnLoss(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Texts()).train()
