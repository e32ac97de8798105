"""Makes the environment of each peer from its pinned requirements.

    python benchmarks/peers/install.py [NAME...] [--venvs FOLDER]

An environment is a folder outside of the repository, by default in the user's cache. One that is complete is left as it is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

DEFAULT_FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "batchllm-peers"
REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
_NAMES = ("vllm", "openvino", "llamacpp", "transformers")
# Required by packages that work without them, and broken beside the CPU build of torch.
_UNWANTED = {"vllm": ("torchvision", "torchaudio", "torchcodec"), "openvino": ("torchvision",)}
_FROM_SOURCE = {"llamacpp": "llama-cpp-python"}
_CMAKE = "-DGGML_NATIVE=ON -DGGML_AMX_TILE=ON -DGGML_AMX_INT8=ON -DGGML_AMX_BF16=ON -DLLAVA_BUILD=OFF"
_WHOLE = ".whole"


def install(name: str, folder: Path) -> None:
    """Makes the environment `folder`/`name`; what an interrupted attempt left is made again. Raises CalledProcessError."""
    place = folder / name
    if (place / _WHOLE).exists():
        return
    venv.create(place, with_pip=True, clear=True)
    pip = [str(place / "bin" / "python"), "-m", "pip", "--quiet"]
    command = [*pip, "install", "-r", str(REQUIREMENTS / f"{name}.txt")]
    environment = dict(os.environ)
    if name in _FROM_SOURCE:
        command += ["--no-binary", _FROM_SOURCE[name]]
        environment["CMAKE_ARGS"] = _CMAKE
    subprocess.run(command, check=True, env=environment)
    if name in _UNWANTED:
        subprocess.run([*pip, "uninstall", "--yes", *_UNWANTED[name]], check=True)
    (place / _WHOLE).touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=_NAMES, default=list(_NAMES), metavar="NAME")
    parser.add_argument("--venvs", type=Path, default=DEFAULT_FOLDER)
    options = parser.parse_args()
    for name in options.names:
        print(f"{name}: {options.venvs / name}", file=sys.stderr)
        install(name, options.venvs)


if __name__ == "__main__":
    main()
