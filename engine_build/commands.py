"""Commands of other programs: shown as a shell would take them, or run one after the other."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trtllm_specprefill.errors import SpecPrefillError


class BuildFailed(SpecPrefillError):
    """A program of the build ended with an error."""


@dataclass(frozen=True)
class Command:
    """One program. why: in a line. environment: what is set for it beside the caller's own."""

    why: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def shown(self) -> str:
        """The command as a shell takes it, an option a line."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines = [" ".join([*settings, *map(shlex.quote, self._head())])]
        for argument in self.arguments[len(self._head()) :]:
            if argument.startswith("--"):
                lines.append(argument)
            else:
                lines[-1] += " " + shlex.quote(argument)
        return " \\\n    ".join(lines)

    def _head(self) -> tuple[str, ...]:
        first = (i for i, a in enumerate(self.arguments) if a.startswith("--"))
        return self.arguments[: next(first, len(self.arguments))]


def run_all(commands: Sequence[Command], say: Callable[[str], None]) -> None:
    """Show and run each; raise `BuildFailed`, naming it, at the first that fails."""
    for command in commands:
        say(f"# {command.why}\n{command.shown()}")
        try:
            first, *rest = command.arguments
            program = sys.executable if first == "python" else first  # the Python that builds
            environment = {**os.environ, **command.environment}
            done = subprocess.run([program, *rest], env=environment, check=False)
        except OSError as error:
            raise BuildFailed(f"{command.arguments[0]}: {error.strerror}") from error
        if done.returncode:
            raise BuildFailed(f"{command.arguments[0]} ended with code {done.returncode}")
