"""The tokenizer of a model as files of a bundle."""

from pathlib import Path

from sinkring.models.source import LoadedModel
from sinkring.runtime.manifest import Tokenizer

TOKENIZER_NAME = "tokenizer.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"


def write_tokenizer(part: Path, loaded: LoadedModel) -> Tokenizer | None:
    """Write them into the folder `part`. None if the model's source has none."""
    if loaded.tokenizer_json is None:
        return None
    (part / TOKENIZER_NAME).write_text(loaded.tokenizer_json, encoding="utf-8")
    if loaded.chat_template is not None:
        (part / CHAT_TEMPLATE_NAME).write_text(loaded.chat_template, encoding="utf-8")
    return Tokenizer(
        tokenizer=TOKENIZER_NAME,
        chat_template=None if loaded.chat_template is None else CHAT_TEMPLATE_NAME,
        bos_id=loaded.bos_id,
        stop_ids=loaded.stop_ids,
    )
