"""A tiny decoder that says what it is told to: each token is followed, greedily, by the one successor that the test names.

So that commands can be held to exact text. Attention and MLP are alive, and too faint to change which token is likeliest.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models.tiny import tiny_llama

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# After "a" round and round, characters of 1 to 4 bytes, each byte a token of its own and none of them twice.
ROUND = "aé→🎈д"
# After a line's end, such as that of the template's "assistant": an answer that ends itself.
ANSWER = "ok!"


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, and the two that frame a chat's turns."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: id for id, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([START, END])
    return tokenizer


def save_speaking_model(folder: Path) -> None:
    """Model, tokenizer and chat template as a Hugging Face folder."""
    tokenizer = byte_tokenizer()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=START, eos_token=END, chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    ).save_pretrained(folder)
    end = tokenizer.token_to_id(END)
    lap = tokenizer.encode(ROUND).ids
    answer = [*tokenizer.encode("\n" + ANSWER).ids, end]
    successors = dict(zip([*lap, *answer[:-1]], [*lap[1:], lap[0], *answer[1:]], strict=True))
    vocab = tokenizer.get_vocab_size()
    model = tiny_llama(head_dim=16, vocab=vocab, max_position_embeddings=4096, bos_token_id=tokenizer.token_to_id(START), eos_token_id=end)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        embedding = torch.randn(vocab, model.config.hidden_size, generator=generator)
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.zero_()
        for token, successor in successors.items():
            model.lm_head.weight[successor] += embedding[token]
        model.model.norm.weight.fill_(1)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.02
            layer.mlp.down_proj.weight *= 0.02
    model.save_pretrained(folder)
