"""``python -m specrt.tools.gpu_check [KIT] [--output FILE.json]``: the command without click and rich."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from specrt.engines.errors import SpecrtError
from specrt.tools.gpu_check.check import gpu_check
from specrt.tools.gpu_check.kit import KIT_FILE
from specrt.tools.gpu_check.report import DEFAULT_OUTPUT, check_output, summary, write_report


def main() -> int:
    """The exit code of ``Report.exit_code``, or that of an error."""
    parser = argparse.ArgumentParser(prog="python -m specrt.tools.gpu_check", description="See docs/gpu.md.")
    parser.add_argument("kit", nargs="?", type=Path, default=Path(KIT_FILE))
    parser.add_argument("--output", "-o", type=Path, default=Path(DEFAULT_OUTPUT))
    options = parser.parse_args()
    try:
        check_output(options.output)
        report = gpu_check(options.kit)
        write_report(report, options.output)
    except SpecrtError as error:
        print(f"specrt: error: {error}", file=sys.stderr)
        return error.exit_code
    print(summary(report, options.output))
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
