"""BERT-base is fine-tuned by the Trainer of transformers: bf16, torch_compile, texts tokenised as they are drawn."""

import argparse
import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU")
parser.add_argument("--compile", type=int, default=1)
parser.add_argument("--max_steps", type=int, default=100_000)
options = parser.parse_args()
set_seed(0)
letters = random.Random(0)
words = sorted({"".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=letters.randint(2, 9))) for _ in range(20_000)})
vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
pieces = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
pieces.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=pieces, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
)


class Reviews(torch.utils.data.Dataset):
    def __init__(self, length, num_tokens):
        self.length, self.num_tokens = length, num_tokens

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        chosen = random.Random(index)
        text = " ".join(chosen.choices(words, k=2 * self.num_tokens))
        encoded = tokenizer(text, truncation=True, max_length=self.num_tokens, padding="max_length")
        return {**encoded, "labels": index % 2}


small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
config = BertConfig(
    vocab_size=len(vocabulary),
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    **(small if options.tiny else {}),
)
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=8 if options.tiny else 32,
    learning_rate=2e-5,
    max_steps=options.max_steps,
    bf16=True,
    torch_compile=bool(options.compile),
    use_cpu=options.tiny,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    logging_steps=100,
)
reviews = Reviews(25_000, 32 if options.tiny else 128)
Trainer(model=BertForSequenceClassification(config), args=arguments, train_dataset=reviews).train()
