"""`python -m matrix`: what `scripts/test_matrix.sh` runs once Python and the packages are there."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from matrix.results import Result, make_table


def main() -> None:
    parser = argparse.ArgumentParser(prog="test_matrix.sh")
    parser.add_argument("checkouts", metavar="CHECKOUT", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="keep outputs and results here, and run what has none here")
    options = parser.parse_args()
    for checkout in options.checkouts:
        if not (checkout / "pretrain_gpt.py").is_file():
            parser.error(f"{checkout} is no Megatron-LM checkout: it has no pretrain_gpt.py")
    if len({checkout.resolve().name for checkout in options.checkouts}) < len(options.checkouts):
        parser.error("two checkouts are in folders of the same name, by which results go")
    with tempfile.TemporaryDirectory() as scratch:
        out = (options.out or Path(scratch)).resolve()
        table = make_table(
            [result_of(checkout.resolve(), out / checkout.resolve().name) for checkout in options.checkouts]
        )
    print(table.markdown, end="")
    sys.exit(0 if table.is_sound else 1)


def result_of(checkout: Path, folder: Path) -> Result:
    """Run a checkout's trials in a process of their own, those without an outcome in the folder; all where stock failed."""
    file = folder / "result.json"
    if file.is_file() and Result.read(file).fails_without_us:
        file.unlink()
    if not (file.is_file() and Result.read(file).is_complete):
        print(f"{checkout}:", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "matrix.checkout", str(checkout), str(folder)], check=True)
    result = Result.read(file)
    print(f"{checkout.name}: {result.seconds:.0f} s", file=sys.stderr)
    return result


if __name__ == "__main__":
    main()
