"""Which files of a Hugging Face folder hold its weights."""

from __future__ import annotations

from pathlib import Path

from batchllm.errors import ModelError
from batchllm.models.json_files import read_json
from batchllm.models.source import PICKLED_SUFFIXES


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of `folder`: the one, or those that its index names. Raises ModelError for none."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if not index.exists() and not single.exists():
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED_SUFFIXES)
        if pickled:
            raise ModelError(
                f"{folder}: only pickled weights ({pickled[0]}), which can run code and are never opened; "
                "convert them to safetensors"
            )
        raise ModelError(f"{folder}: no model.safetensors and no model.safetensors.index.json")
    if single.exists():
        return [single]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is missing or empty")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index}: {name!r} is not the name of a safetensors file in this folder")
        if not (folder / name).is_file():
            raise ModelError(f"{folder}: {name} is missing, which {index.name} names")
    return [folder / name for name in sorted(set(weight_map.values()))]
