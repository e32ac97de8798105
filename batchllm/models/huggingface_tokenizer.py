"""The tokenizer of a Hugging Face folder: tokenizer.json, and what the configs beside it declare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers

from batchllm.errors import ModelError
from batchllm.models.declared_tokens import DeclaredTokens
from batchllm.models.huggingface_config import huggingface_config
from batchllm.models.json_files import read_optional_json


def huggingface_tokenizer(folder: Path) -> tuple[tokenizers.Tokenizer, DeclaredTokens]:
    """The pipeline and its declared tokens. Raises ModelError for a folder without a readable tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder}: no tokenizer.json; a model with only a SentencePiece or vocab file must be converted"
        )
    try:
        pipeline = tokenizers.Tokenizer.from_file(str(path))
    # The library raises plain Exception for whatever it cannot parse.
    except Exception as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    settings = read_optional_json(folder / "special_tokens_map.json") | read_optional_json(
        folder / "tokenizer_config.json"
    )
    config = huggingface_config(folder)
    bos_id = _declared_id(pipeline, settings.get("bos_token"))
    if bos_id is None:
        bos_id = config.bos_id
    eos_id = _declared_id(pipeline, settings.get("eos_token"))
    return pipeline, DeclaredTokens(
        bos_id=bos_id,
        add_bos=_adds_bos(pipeline, settings, bos_id),
        eos_id=eos_id if eos_id is not None else min(config.eos_ids, default=None),
        eos_ids=config.eos_ids | ({eos_id} if eos_id is not None else frozenset()),
        chat_template=_chat_template(folder, settings),
        vocab_size=config.vocab_size,
    )


def _declared_id(pipeline: tokenizers.Tokenizer, token: Any) -> int | None:
    """The id of `bos_token` or `eos_token`, which is a string, or an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return pipeline.token_to_id(content) if isinstance(content, str) else None


def _adds_bos(pipeline: tokenizers.Tokenizer, settings: dict[str, Any], bos_id: int | None) -> bool:
    """`add_bos_token` where it is set; else what the post-processor does to an empty text."""
    if bos_id is None:
        return False
    if isinstance(settings.get("add_bos_token"), bool):
        return bool(settings["add_bos_token"])
    return pipeline.encode("", add_special_tokens=True).ids[:1] == [bos_id]


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The first of chat_template.jinja, tokenizer_config.json (one text, or `default` of named ones), the old .json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
    template = settings.get("chat_template")
    if template is None:
        template = read_optional_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = [item for item in template if isinstance(item, dict) and item.get("name") == "default"]
        template = named[-1].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{folder}: chat_template is a {type(template).__name__}, a text is needed")
    return template
