# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-rocm-memory``: the series, what it needs, and what it did."""

import argparse
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_rocm_memory import report
from vllm_rocm_memory.doctor import run as doctor
from vllm_rocm_memory.options import add_target
from vllm_rocm_memory.series import SeriesError, operations
from vllm_rocm_memory.series.definition import Series, load
from vllm_rocm_memory.series.target import Target

# 1 is an answer (something is not applied), and 2 is a refusal, as argparse has it.
NOT_APPLIED, REFUSED = 1, 2

# What a command is given: its options, and the words that are none of them.
Command = Callable[[argparse.Namespace, Sequence[str]], int]
SeriesCommand = Callable[[argparse.Namespace, Target, Series], int]


def main(arguments: Sequence[str] | None = None) -> None:
    _make_printable()
    parser = make_parser()
    args, words = parser.parse_known_args(arguments)
    if words and args.command is not _doctor:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    try:
        code = args.command(args, words)
        sys.stdout.flush()
    except SeriesError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        code = REFUSED
    except BrokenPipeError:
        # `diff | head`
        _discard_output()
        code = 0
    except OSError as error:
        place = error.filename or _place(error)
        print(f"{parser.prog}: error: {place}: {error.strerror}", file=sys.stderr)
        code = REFUSED
    except KeyboardInterrupt as interrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        # As a shell says it, of Ctrl-C or of the signal that is named.
        code = 128 + next(iter(interrupt.args), signal.SIGINT)
    sys.exit(code)


def _make_printable() -> None:
    """Let everything be printed, whatever the locale, and where there is no output."""
    if sys.stdout is None:  # `>&-`
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """What is left to flush at exit has nowhere to go either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _place(error: OSError) -> str:
    """Where an error was that names no file."""
    frames = traceback.walk_tb(error.__traceback__)
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in frames]
    if any(name.startswith("vllm_rocm_memory.series") for name in modules):
        return "the target"
    _discard_output()
    return "standard output"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-rocm-memory",
        description="Lay the series over an installed vLLM or a checkout, in place, "
        "and see what it needs and does.",
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
    _add_doctor(commands)
    _add_report(commands)
    return parser


def _add_command(
    commands: Any, name: str, run: SeriesCommand, description: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=description,
        description=f"{description.capitalize()}.",
    )
    parser.set_defaults(command=_on_target(run))
    add_target(parser)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATCH",
        help="this patch only; may be given again",
    )
    return parser


def _on_target(run: SeriesCommand) -> Command:
    def command(args: argparse.Namespace, words: Sequence[str]) -> int:
        return run(args, Target.find(args.target), load())

    return command


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor", help="say what is missing on this machine, and what helps"
    )
    doctor.add_arguments(parser)
    parser.set_defaults(command=_doctor)


def _doctor(args: argparse.Namespace, words: Sequence[str]) -> int:
    return doctor.run(args, words, load())


def _add_report(commands: Any) -> None:
    parser = commands.add_parser(
        "report", help="say what a server's last sleep freed, and what it still holds"
    )
    report.add_arguments(parser)
    parser.set_defaults(command=_sleep_report)


def _sleep_report(args: argparse.Namespace, words: Sequence[str]) -> int:
    return report.run(args)


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
    from rich.table import Table

    from vllm_rocm_memory.doctor.render import Output

    console = Output()
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
