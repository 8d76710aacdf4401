"""Generates the typed stubs of proto/ into baton/v1.

python -m scripts.stubs

`python -m scripts.lint stubs` tells whether the committed ones are current.
The compiler's version, in protoc-requirements.txt beside this file, decides the oldest protobuf and grpcio that the
stubs run with.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO_DIR = ROOT / "proto"
PACKAGE = Path("baton/v1")


def generate(out_dir: Path) -> None:
    """Writes modules and type stubs below `out_dir`. Raises RuntimeError when the compiler refuses the sources."""
    sources = sorted(str(path.relative_to(PROTO_DIR)) for path in PROTO_DIR.rglob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={PROTO_DIR}",
            f"--proto_path={resources.files('grpc_tools') / '_proto'}",
            f"--plugin=protoc-gen-mypy={_plugin('protoc-gen-mypy')}",
            f"--plugin=protoc-gen-mypy_grpc={_plugin('protoc-gen-mypy_grpc')}",
            f"--python_out={out_dir}",
            f"--grpc_python_out={out_dir}",
            f"--mypy_out=quiet:{out_dir}",
            f"--mypy_grpc_out=quiet:{out_dir}",
            *sources,
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc exited with {status}")


def differences(expected_dir: Path, committed_dir: Path) -> list[str]:
    """Returns the names of generated files that are missing, left over or different, sorted."""
    expected, committed = _generated(expected_dir), _generated(committed_dir)
    return sorted(name for name in expected.keys() | committed.keys() if expected.get(name) != committed.get(name))


def _generated(package_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in package_dir.glob("*_pb2*.py*")}


def _plugin(name: str) -> Path:
    return Path(sys.executable).parent / name


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        fresh, committed = Path(directory) / PACKAGE, ROOT / PACKAGE
        for name in differences(fresh, committed):
            if (fresh / name).exists():
                (committed / name).write_bytes((fresh / name).read_bytes())
            else:
                (committed / name).unlink()
            print(f"wrote: {PACKAGE / name}")


if __name__ == "__main__":
    main()
