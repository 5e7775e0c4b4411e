"""A tiny causal language model and its tokenizer, built on the spot: no network, no files from elsewhere."""

import json
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ["what does the function sorted do?", "Return a new list in order.", "what is a list? A list is a list."]


def make_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>", chat_template=chat_template
    )


def make_model_folder(folder: Path, *, tied: bool = True) -> Path:
    """A random Llama of two layers with its tokenizer, as a Hugging Face folder."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        tie_word_embeddings=tied,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_pairs(file: Path, number: int) -> Path:
    """Prompts and completions of unequal lengths."""
    rows = ({"prompt": f"what is {i}?", "completion": "a list " * (1 + i % 5) + str(i)} for i in range(number))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def make_encoder(folder: Path, num_labels: int = 0) -> str:
    """A random Bert of two layers with its tokenizer; with labels a classifier, otherwise the encoder alone."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(**sizes, vocab_size=len(tokenizer), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config.num_labels = num_labels or 2
    model = BertForSequenceClassification(config) if num_labels else BertModel(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_rows(file: Path, number: int = 24) -> str:
    """Texts of three labels."""
    words = {"good": "a list in order", "bad": "what is what", "even": "sorted sorted"}
    rows = [{"text": f"{words[label]} {i}", "label": label} for i in range(number // 3) for label in words]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def put_into_cache(folder: Path, cache: Path, name: str) -> Path:
    """A model's folder as the snapshot of a hub id in a cache of the hub's; returns the snapshot."""
    commit = "0" * 40
    there = cache / f"models--{name.replace('/', '--')}"
    (there / "refs").mkdir(parents=True)
    (there / "refs" / "main").write_text(commit)
    shutil.copytree(folder, there / "snapshots" / commit)
    return there / "snapshots" / commit
