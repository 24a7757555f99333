"""Tokenizers and chat files for the tests; the conversations are of Oscar Wilde's The Importance of Being Earnest (1895)."""

from __future__ import annotations

import json
from pathlib import Path

EARNEST = Path(__file__).with_name("data") / "earnest.jsonl"
SPECIAL = ["<pad>", "<unk>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>"]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Llama 2 has it: the system's words within the first user turn, no prompt of the assistant's own, content stripped.
FOLDED = (
    "{% set found = namespace(system='') %}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% set found.system = '<|system|>' + message['content'].strip() + '\n' %}"
    "{% elif message['role'] == 'user' %}<|user|>{{ found.system }}{{ message['content'].strip() }}"
    "{% set found.system = '' %}"
    "{% else %}<|assistant|>assistant: {{ message['content'].strip() }} <|end|>{% endif %}{% endfor %}"
)
TAGGED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<|assistant|>{% generation %}"
    "{{ message['content'] }}<|end|>{% endgeneration %}{% else %}<|user|>{{ message['content'] }}{% endif %}{% endfor %}"
)
# As templates of reasoning models do: what was thought is left out once another turn follows.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] if loop.last or message['role'] != 'assistant' else message['content'].split('. ')[-1] }}"
    "<|im_end|>\n{% endfor %}"
)
REWRITING = "{% for message in messages %}{{ '<|assistant|>' if loop.last else '<|user|>' }}{{ message['content'] }}{% endfor %}"


def write_chat(path: Path, *conversations: list[tuple[str, str]]) -> Path:
    lines = ({"messages": [{"role": role, "content": content} for role, content in each]} for each in conversations)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def write_tokenizer(folder: Path, template: str, bytewise: bool = False) -> Path:
    """A tokenizer trained on the play: each word, space and sign a token, or byte-level pairs of little training."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    text = EARNEST.read_text(encoding="utf-8")
    if bytewise:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
        tokenizer.train_from_iterator([text], trainer)
        from tokenizers import processors

        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    else:
        tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s|\w+|[^\w\s]"), "isolated")
        trainer = trainers.WordLevelTrainer(special_tokens=SPECIAL)
        words = [message["content"] for line in text.splitlines() for message in json.loads(line)["messages"]]
        tokenizer.train_from_iterator([*words, "system user assistant:\n"], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=None if bytewise else "<unk>", pad_token="<pad>", eos_token="<|end|>"
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder
