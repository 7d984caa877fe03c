# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-rocm-memory``: lay the series over a vLLM, and take it off."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_rocm_memory.series import SeriesError, operations
from vllm_rocm_memory.series.definition import Series, load
from vllm_rocm_memory.series.target import Target

# 1 is an answer (something is not applied), 2 is a refusal, as argparse has it, and
# 130 is what a shell says of Ctrl-C.
NOT_APPLIED, REFUSED, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(arguments)
    try:
        target = Target.find(args.target)
        code = args.command(args, target, load())
        sys.stdout.flush()
    except SeriesError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        code = REFUSED
    except BrokenPipeError:
        # `diff | head`: what is left to flush at exit has nowhere to go either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        path = error.filename or "the target"
        print(f"{parser.prog}: error: {path}: {error.strerror}", file=sys.stderr)
        code = REFUSED
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-rocm-memory",
        description="Lay the series over an installed vLLM or a checkout, in place.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    status = _add_command(
        commands,
        "status",
        _status,
        "say of each patch whether it is applied; exit 0 if nothing is left to do, "
        "1 if something is, 2 if there is no telling",
    )
    apply = _add_command(
        commands, "apply", _apply, "apply patches, or renew them; all or nothing"
    )
    revert = _add_command(
        commands, "revert", _revert, "take patches away; without --only, every trace"
    )
    diff = _add_command(
        commands,
        "diff",
        _diff,
        "print what is applied, or else what would be, against the original",
    )
    export = _add_command(
        commands, "export", _export, "write one file a patch, for git am"
    )
    export.add_argument("folder", metavar="DIR", type=Path, help="where to write them")
    for command in (status, apply, revert):
        command.add_argument(
            "--json", action="store_true", help="print the answer as JSON"
        )
    for command in (apply, revert):
        command.add_argument(
            "--dry-run",
            action="store_true",
            help="only say what would change",
        )
    for command in (apply, diff, export):
        command.add_argument(
            "--allow-unknown-base",
            action="store_true",
            help="go on with a vLLM that is not a known base if every edit finds its "
            "place and every import of a replaced module still holds",
        )
    return parser


def _add_command(
    commands: Any, name: str, run: Any, description: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=description,
        description=f"{description.capitalize()}.",
    )
    parser.set_defaults(command=run)
    parser.add_argument(
        "--target",
        type=Path,
        metavar="PATH",
        help="site-packages, a vllm package folder or a checkout (default: the vLLM "
        "that this Python would import)",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATCH",
        help="this patch only; may be given again",
    )
    return parser


def _status(args: argparse.Namespace, target: Target, series: Series) -> int:
    rows = operations.status(target, series, args.only)
    settled = all(row.settled for row in rows)
    if args.json:
        patches = [
            {"name": r.name, "title": r.title, "state": r.state, "reason": r.reason}
            for r in rows
        ]
        _print_json(target, ok=settled, patches=patches)
    else:
        _print_table(target, rows)
    return 0 if settled else NOT_APPLIED


def _print_table(target: Target, rows: Sequence[operations.PatchStatus]) -> None:
    # Loading rich takes longer than finding the answer.
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(str(target.package), soft_wrap=True)
    table = Table()
    for heading in ("patch", "state", "reason"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(row.name, row.state, row.reason)
    console.print(table)


def _apply(args: argparse.Namespace, target: Target, series: Series) -> int:
    outcome = operations.apply(
        target,
        series,
        args.only,
        allow_unknown_base=args.allow_unknown_base,
        dry_run=args.dry_run,
    )
    return _report(args, target, outcome)


def _revert(args: argparse.Namespace, target: Target, series: Series) -> int:
    outcome = operations.revert(target, series, args.only, dry_run=args.dry_run)
    return _report(args, target, outcome)


def _report(
    args: argparse.Namespace, target: Target, outcome: operations.Outcome
) -> int:
    if args.json:
        _print_json(
            target,
            dry_run=args.dry_run,
            patches=outcome.patches,
            skipped=outcome.skipped,
            changed=outcome.changed,
            verified=outcome.not_verified is None,
            reason=outcome.not_verified,
            not_importable=dict(outcome.not_importable),
        )
        return 0
    verb = "would change" if args.dry_run else "changed"
    for path in outcome.changed:
        print(f"{verb} {path}")
    for name, reason in outcome.skipped.items():
        print(f"{name}: upstream already has it ({reason})")
    has = "would have" if args.dry_run else "has"
    print(f"{target.package} {has} {', '.join(outcome.patches) or 'no patch'}")
    if outcome.not_verified:
        reason = outcome.not_verified
        print(f"warning: not verified by import: {reason}", file=sys.stderr)
    for module, error in outcome.not_importable.items():
        sentence = operations.does_not_import(module, error)
        print(f"warning: not verified: {sentence}", file=sys.stderr)
    return 0


def _diff(args: argparse.Namespace, target: Target, series: Series) -> int:
    allow = args.allow_unknown_base
    text = operations.diff(target, series, args.only, allow_unknown_base=allow)
    # Bytes: a patch must not depend on the locale.
    sys.stdout.buffer.write(text.encode())
    return 0


def _export(args: argparse.Namespace, target: Target, series: Series) -> int:
    from vllm_rocm_memory.series.export import export

    allow = args.allow_unknown_base
    written = export(target, series, args.folder, args.only, allow_unknown_base=allow)
    for path in written:
        print(path)
    return 0


def _print_json(target: Target, **content: Any) -> None:
    print(json.dumps({"target": str(target.package), **content}, indent=2))


if __name__ == "__main__":
    main()
