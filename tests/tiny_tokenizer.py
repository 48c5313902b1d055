"""A tokenizer of one character a token for the tiny models, with a chat template or without."""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "<s>Be good. {% for m in messages %}Ask: {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}. Say: {% endif %}"
)


def tiny_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Ids below 101: letters, digits and a little else; anything that is not known is `<unk>`."""
    characters = string.ascii_letters + string.digits + " .,:?\n"
    vocabulary = {"<pad>": 0, "<s>": 1, "<unk>": 2, **{c: i + 3 for i, c in enumerate(characters)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", unk_token="<unk>")
    made.chat_template = template
    return made
