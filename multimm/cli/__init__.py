"""The command line: one file per command, imported when it is asked for.

Exit codes: 0, 1 for a run that failed, 2 for bad input, 130 after Ctrl-C, 143 after SIGTERM,
129 after SIGHUP, 141 (and silence) where nobody reads on what it prints. Whatever goes wrong is one
line on stderr, and so is a warning. ``--debug`` adds the traceback, and what libraries and workers
write there.
"""

from __future__ import annotations

import logging
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from typing import Any

import click

from multimm.cli.options import DEBUG
from multimm.cli.stop import STOP
from multimm.cli.terminal import (
    OutputError,
    checked_stdout,
    occupy_closed,
    plain_stderr,
    say,
    stderr_held_back,
)
from multimm.errors import KernelError, MultimmError, cause, one_line, printable, without_secrets

#: Command -> the module in this package that holds a click command of the same name.
COMMANDS = ("matmul", "plan", "demo", "doctor", "tune", "bench", "report")
FAILED_RUN, BAD_INPUT = 1, 2


class Commands(click.Group):
    """Commands that are imported on first use, and the one place that turns errors into exits."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which a newcomer meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"multimm.cli.{cmd_name}"), cmd_name)
        return command

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Run a command line and exit with its code, unless ``standalone_mode=False``."""
        run: Any = super().main
        if not extra.pop("standalone_mode", True):
            return run(args, *rest, standalone_mode=False, **extra)
        given = list(sys.argv[1:] if args is None else args)
        # Who calls this from Python goes on afterwards, and keeps stderr.
        hold = args is None and "--debug" not in given
        if args is None:
            occupy_closed()
        with (
            STOP.heeded(),
            plain_stderr(),
            stderr_held_back() if hold else nullcontext(),
            warnings_in_one_line(),
        ):
            try:
                with checked_stdout():
                    code = run(given, *rest, standalone_mode=False, **extra)
            except SystemExit:
                raise
            except BaseException as error:  # KeyboardInterrupt comes as click.Abort
                text, code = explain(error)
                with suppress(OSError):  # a terminal that was closed takes no text
                    if "--debug" in given:
                        traceback.print_exc()
                    if text:
                        say(text, err=True)
            if isinstance(code, int) and code:
                sys.exit(code)
        sys.exit(0)


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Each warning once, without the source line that it comes from; also those that we log."""
    said: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        text = " ".join(str(message).split())
        if text not in said:
            said.add(text)
            with suppress(OSError):
                say(f"multimm: warning: {text}", err=True)

    class Log(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            show(record.getMessage())

    ours, log = logging.getLogger("multimm"), Log(logging.WARNING)
    with warnings.catch_warnings():
        warnings.showwarning = show
        ours.addHandler(log)
        try:
            yield
        finally:
            ours.removeHandler(log)


def explain(error: BaseException) -> tuple[str, int]:
    """One line for the user, or help, and the exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error.format_message(), error.exit_code
    text, code = _reason(error)
    return f"multimm: {printable(without_secrets(text))}" if text else "", code


def _reason(error: BaseException) -> tuple[str, int]:
    if STOP.signal is not None or isinstance(error, click.Abort):  # whatever else went wrong then
        number = STOP.signal or signal.SIGINT
        text = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
        return text, 128 + number
    if isinstance(error, OutputError) and error.gone:
        return "", 128 + signal.SIGPIPE
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "multimm"
        return f"error: {error.format_message()} (see {command} --help)", BAD_INPUT
    if isinstance(error, click.ClickException):
        return f"error: {error.format_message()}", error.exit_code
    if isinstance(error, MultimmError):
        code = FAILED_RUN if isinstance(error, KernelError) else BAD_INPUT
        return f"error: {one_line(error)}", code
    return f"error: {cause(error)} (--debug shows more)", FAILED_RUN


def _version() -> str:
    import multimm

    # Another project of the same import name may lie over ours: `doctor` says so.
    return str(getattr(multimm, "__version__", "unknown"))


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), prog_name="multimm")
@DEBUG
def main() -> None:
    """Multiply matrices that are too large, or too urgent, for one GPU."""
