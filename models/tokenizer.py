"""The tokenizer of a model source, as plain data that a runtime without transformers can use."""

from dataclasses import dataclass
from pathlib import Path

from sinkring.models.errors import UnsupportedModel
from transformers import AutoTokenizer

# Any of these in a folder means that it has a tokenizer.
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")
# Tokens by which chat models end a turn; one counts if the chat template writes it.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|end_of_turn|>", "<|eom_id|>")


@dataclass(frozen=True)
class TokenizerData:
    """json: text of a `tokenizers` file; chat_template: Jinja; stop_ids: end of text and, with a chat template, end of turn; ascending."""

    json: str
    chat_template: str | None
    bos_id: int | None
    stop_ids: tuple[int, ...]


def read_tokenizer(path: Path) -> TokenizerData | None:
    """Tokenizer of a model folder or a .gguf file; None for a folder without one. Raises UnsupportedModel if it is Python code."""
    if path.is_dir():
        if not any((path / name).is_file() for name in _FILES):
            return None
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    else:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    if not tokenizer.is_fast:
        raise UnsupportedModel(
            f"{path}: its tokenizer ({type(tokenizer).__name__}) has no `tokenizers` form, which the runtime needs; "
            "add a tokenizer.json to the folder, or remove the tokenizer files to feed token ids"
        )
    backend = tokenizer.backend_tokenizer
    # A stream is never cut or padded, whatever the model was trained with.
    backend.no_truncation()
    backend.no_padding()
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    stops = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    if template:
        vocabulary = tokenizer.get_added_vocab()
        stops.update(vocabulary[token] for token in _END_OF_TURN if token in vocabulary and token in template)
    return TokenizerData(backend.to_str(), template, tokenizer.bos_token_id, tuple(sorted(stops)))
