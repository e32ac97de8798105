"""Converts the exported model for OpenVINO, in OpenVINO's environment: the bf16 weights in float16, and int8.

    VENVS/openvino/bin/python benchmarks/peers/convert_openvino.py [--folder FOLDER]

Needs what `export_model.py` wrote; what is there already is left as it is. A bf16 weight is a float16 exactly unless it is below 6e-5, where up to 3e-8 is lost. int8 is the converter's own: asymmetric, a scale per channel.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

DEFAULT_FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "batchllm-peers" / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    options = parser.parse_args()
    program = Path(sys.executable).with_name("optimum-cli")
    for name, weights in (("bf16", "fp16"), ("int8", "int8")):
        target = options.folder / f"openvino-{name}"
        if target.exists():
            continue
        staged = target.with_suffix(".part")
        shutil.rmtree(staged, ignore_errors=True)
        command: list[str | Path] = [program, "export", "openvino", "--model", options.folder / "huggingface"]
        command += ["--task", "text-generation-with-past", "--weight-format", weights, staged]
        subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        staged.rename(target)


if __name__ == "__main__":
    main()
