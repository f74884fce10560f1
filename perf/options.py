"""Options that several of these commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Draft_ = Annotated[str, typer.Option(help="Model that scores.")]
Tokens_ = Annotated[list[int], typer.Option(min=100, help="Prompt lengths; repeatable.")]
Keeps_ = Annotated[list[str], typer.Option(help="Keep rates, or off; repeatable.")]
Positions_ = Annotated[
    str, typer.Option(help="A target this small reads contiguous positions better.")
]
Seed_ = Annotated[int, typer.Option(help="Of passages and facts.")]
Url_ = Annotated[
    str | None, typer.Option(help="host:port, gRPC, of a running server; else one is started.")
]
Config_ = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Settings of the server to start, as YAML.")
]
