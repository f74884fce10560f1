"""How a command ends: 0 done, 2 bad input or configuration, 1 a failure while working.

A mistake of the caller is one line on stderr, or with `--json` one object on stdout, and never
a traceback.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import typer
from pydantic import ValidationError

from trtllm_specprefill.errors import InputError, SpecPrefillError

EXIT_CODES = (
    "Exit codes: 0 done; 2 bad input or configuration, which you can mend; 1 a failure while"
    " working. With --json an error is an object on stdout."
)
# What typer itself finds wrong with a command line; its common base has no public name.
_Misuse: Any = typer.BadParameter.__mro__[1]


def run_app(commands: typer.Typer) -> None:
    """Run a command line, and end the process with its exit code."""
    as_json = "--json" in sys.argv[1:]
    try:
        code = commands(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)  # that of --help and of an interrupt
    except _Misuse as error:
        refused = _refused(error)
        if refused is None and not as_json:
            error.show()
            sys.exit(2)
        sys.exit(_complain(refused or error, 2, as_json))
    except typer.Abort:
        sys.exit(_complain(SpecPrefillError("interrupted"), 1, as_json))
    except BrokenPipeError:  # whoever read the output has gone
        sys.stdout = None
        sys.exit(1)
    except SpecPrefillError as error:
        sys.exit(_complain(error, error.exit_code, as_json))
    except OSError as error:
        sys.exit(_complain(error, 1, as_json))
    except Exception as error:  # a fault of ours: the traceback on stderr is for us
        if as_json:
            _complain(error, 1, as_json)
        raise


def _complain(error: Exception, code: int, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": _object(error)}))
    else:
        print(f"specprefill: {_line(error)}", file=sys.stderr)
    return code


def _object(error: Any) -> dict[str, Any]:
    """Of an error that is about no field, or names no value, they are None."""
    field = value = allowed = None
    if isinstance(error, InputError):
        field, value, allowed = error.field, _json_value(error.value), error.allowed
    elif isinstance(error, _Misuse):
        field = getattr(error, "option_name", None) or _option(error)
    return {"field": field, "value": value, "allowed": allowed, "message": _line(error)}


def _option(error: Any) -> str | None:
    """The longest name of the option that typer complains of, if it is about one."""
    param = getattr(error, "param", None)
    return None if param is None else max(param.opts, key=len)


def _line(error: Exception) -> str:
    said = error.format_message() if isinstance(error, _Misuse) else str(error)
    return " ".join(said.split()) or type(error).__name__


def _json_value(value: object) -> Any:
    """`value` where JSON has it, else as text."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return str(value)


def _refused(error: Any) -> InputError | None:
    """What typer says of the value of one option, in our own words."""
    cause = error.__cause__
    if not isinstance(cause, ValidationError):
        return None
    first = cause.errors()[0]
    kind, limit = first["type"], first.get("ctx", {}).get("ge")
    whole = isinstance(limit, int) or kind.startswith("int_")
    words = "a whole number" if whole else "a number"
    if limit is not None:
        words += f" >= {limit}"
    elif not kind.startswith(("int_", "float_")):
        words = str(first["msg"])
    return InputError(str(_option(error)), first["input"], words)
