# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have."""

import argparse
from pathlib import Path


def add_target(parser: argparse.ArgumentParser) -> None:
    """Enter ``--target``: None, or where a vLLM is, for `Target.find`."""
    parser.add_argument(
        "--target",
        type=Path,
        metavar="PATH",
        help="site-packages, a vllm package folder or a checkout (default: the vLLM "
        "that this Python would import)",
    )
