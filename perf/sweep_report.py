"""A sweep's results as one table, three plots and a page; nothing is measured here."""

from __future__ import annotations

import csv
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PERCENTILES = (50, 90, 99)
# Stages before the first token, in their order; what else a report names is drawn after them.
STAGES = (
    *("queue", "prepare", "draft_queue", "draft_prefill", "look_ahead", "draft", "select", "plan"),
    *("target_queue", "target_prefill"),
)
_BESIDE = "outside the server"  # between the client's stamps and the server's


def write(results: dict[str, Any], out: Path) -> list[Path]:
    """Write `cells.csv`, the plots and `report.md` beside the results; their paths."""
    table = cells(results)
    written = [out / "cells.csv"]
    with written[0].open("w", encoding="utf-8", newline="") as file:
        rows = [_flat(cell) for cell in table]
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    for name, draw in (
        ("ttft_by_length", _by_length),
        ("ttft_by_rate", _by_rate),
        ("stages", _by_stage),
    ):
        written.append(out / f"{name}.png")
        draw(table).savefig(written[-1], dpi=110)
    written.append(out / "report.md")
    written[-1].write_text(_page(results, table), "utf-8")
    return written


def cells(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each length, keep rate and concurrency, all its rounds together.

    ttft_s: p50, p90 and p99 of what the clients saw. token_gap_s: p50 of the mean time between
    two tokens of an answer. requests_per_s, tokens_per_s: answered, over the time that the
    loads took. stages: medians of seconds. speedup: TTFT p50 of the dense cell over this one's.
    """
    keys = sorted({_key(piece) for piece in results["pieces"]}, key=_order)
    table = []
    for key in keys:
        pieces = [piece for piece in results["pieces"] if _key(piece) == key]
        rows = [row for piece in pieces for row in piece["requests"]]
        seconds = sum(piece["seconds"] for piece in pieces)
        ttft = np.percentile([row["ttft_s"] for row in rows], PERCENTILES)
        gaps = [row["token_gap_s"] for row in rows if row["token_gap_s"] is not None]
        names = [n for n in _ordered({n for row in rows for n in row["stages"]}) if n != "decode"]
        stages = {
            name: statistics.median(row["stages"].get(name, 0.0) for row in rows) for name in names
        }
        beside = statistics.median(row["ttft_s"] - row["server_ttft_s"] for row in rows)
        table.append(
            {
                **dict(zip(("tokens", "keep", "concurrency"), key, strict=True)),
                "requests": len(rows),
                "prompt_tokens": statistics.mean(row["prompt_tokens"] for row in rows),
                "kept_tokens": statistics.mean(row["kept_tokens"] for row in rows),
                "reasons": dict(Counter(row["reason"] for row in rows)),
                "ttft_s": {f"p{p}": float(v) for p, v in zip(PERCENTILES, ttft, strict=True)},
                "token_gap_s": statistics.median(gaps) if gaps else None,
                "requests_per_s": len(rows) / seconds,
                "tokens_per_s": sum(row["output_tokens"] for row in rows) / seconds,
                "right": sum(row["right"] for row in rows) / len(rows),
                "stages": {**stages, _BESIDE: beside},
            }
        )
    for cell in table:
        dense = [c for c in table if c["keep"] == "off" and all(c[n] == cell[n] for n in _BASIS)]
        cell["speedup"] = dense[0]["ttft_s"]["p50"] / cell["ttft_s"]["p50"] if dense else None
    return table


_BASIS = ("tokens", "concurrency")


def _key(piece: dict[str, Any]) -> tuple[int, str, int]:
    return piece["tokens"], piece["keep"], piece["concurrency"]


def _order(key: tuple[int, str, int]) -> tuple[int, int, float]:
    """Dense first, then from the highest keep rate down."""
    tokens, keep, concurrency = key
    return tokens, concurrency, -2.0 if keep == "off" else -float(keep)


def _ordered(names: set[str]) -> list[str]:
    return sorted(names, key=lambda n: (STAGES.index(n) if n in STAGES else len(STAGES), n))


def _flat(cell: dict[str, Any]) -> dict[str, Any]:
    """A cell in one line: nested values under joined names."""
    row: dict[str, Any] = {}
    for name, value in cell.items():
        if isinstance(value, dict):
            row |= {f"{name}.{inner}": v for inner, v in value.items()}
        else:
            row[name] = value
    return row


def _arms(table: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(c["keep"] for c in sorted(table, key=lambda c: _order(_key(c))[2])))


def _said(keep: str) -> str:
    return "dense" if keep == "off" else f"keep {keep}"


def _panels(table: list[dict[str, Any]], by: str) -> tuple[Figure, list[tuple[int, Axes]]]:
    """A figure with one panel for each value of `by`, side by side."""
    values = sorted({cell[by] for cell in table})
    figure = Figure(figsize=(4.2 * len(values) + 0.6, 3.8), layout="constrained")
    axes = figure.subplots(1, len(values), squeeze=False)[0]
    return figure, list(zip(values, axes, strict=True))


def _by_length(table: list[dict[str, Any]]) -> Figure:
    """TTFT against prompt length, a line for each keep rate, p90 as a whisker."""
    figure, panels = _panels(table, "concurrency")
    for concurrency, axes in panels:
        for keep in _arms(table):
            mine = [c for c in table if c["keep"] == keep and c["concurrency"] == concurrency]
            p50 = [c["ttft_s"]["p50"] for c in mine]
            above = [c["ttft_s"]["p90"] - c["ttft_s"]["p50"] for c in mine]
            axes.errorbar(
                [c["prompt_tokens"] for c in mine],
                p50,
                yerr=[[0.0] * len(mine), above],
                marker="o",
                capsize=3,
                label=_said(keep),
            )
        axes.set(xlabel="prompt tokens", title=f"{concurrency} at a time", ylim=(0, None))
    panels[0][1].set_ylabel("TTFT, s (p50; whisker to p90)")
    panels[0][1].legend()
    return figure


def _by_rate(table: list[dict[str, Any]]) -> Figure:
    """TTFT against requests answered a second; along a line the concurrency grows."""
    figure, panels = _panels(table, "tokens")
    for tokens, axes in panels:
        for keep in _arms(table):
            mine = [c for c in table if c["keep"] == keep and c["tokens"] == tokens]
            rates, p50 = [c["requests_per_s"] for c in mine], [c["ttft_s"]["p50"] for c in mine]
            axes.plot(rates, p50, marker="o", label=_said(keep))
            for cell, x, y in zip(mine, rates, p50, strict=True):
                axes.annotate(str(cell["concurrency"]), (x, y), (4, 4), textcoords="offset points")
        axes.set(xlabel="requests answered per second", title=f"{tokens} tokens", ylim=(0, None))
    panels[0][1].set_ylabel("TTFT p50, s (number: concurrency)")
    panels[0][1].legend()
    return figure


def _by_stage(table: list[dict[str, Any]]) -> Figure:
    """Where the time to the first token goes, at the lowest concurrency."""
    lowest = min(cell["concurrency"] for cell in table)
    mine = [cell for cell in table if cell["concurrency"] == lowest]
    names = _ordered({name for cell in mine for name in cell["stages"]})
    figure = Figure(figsize=(8.4, 0.42 * len(mine) + 1.6), layout="constrained")
    axes = figure.subplots()
    labels = [f"{cell['tokens']}, {_said(cell['keep'])}" for cell in mine]
    left = np.zeros(len(mine))
    for name in names:
        widths = np.array([max(cell["stages"].get(name, 0.0), 0.0) for cell in mine])
        if widths.max() >= 0.005 * max(c["ttft_s"]["p50"] for c in mine):  # else not to be seen
            axes.barh(labels, widths, left=left, label=name)
        left += widths
    axes.invert_yaxis()
    axes.set(xlabel=f"median seconds before the first token, {lowest} at a time")
    axes.legend(fontsize="small")
    return figure


def _page(results: dict[str, Any], table: list[dict[str, Any]]) -> str:
    """The report: what was measured, on what, and the table."""
    configuration = results["configuration"]
    machine, served = configuration["machine"], configuration["served"]
    versions = ", ".join(f"{name} {v}" for name, v in configuration["versions"].items())
    lines = [
        "# Sweep",
        "",
        f"`{results['command']}`",
        "",
        f"- Draft {served['draft']['model']}, target {served['target']['model']}"
        f" ({served['target']['backend']}); positions {configuration['positions']};"
        f" answers of {configuration['max_tokens']} tokens.",
        f"- {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB,"
        f" accelerator {machine['accelerator'] or 'none'}.",
        f"- {versions}, torch {machine['torch']}, transformers {machine['transformers']}.",
        f"- Rounds of {configuration['requests']} requests to every cell, dense and pruned in turn."
        " TTFT is the client's, draft and all.",
        "",
        "| tokens | at a time | keep | kept tokens | requests | TTFT p50, s | p90 | p99 | dense /"
        " this | token gap, ms | requests/s | tokens/s | facts told |",
        "|" + "---:|" * 13,
    ]
    for c in table:
        ttft = " | ".join(f"{c['ttft_s'][f'p{p}']:.2f}" for p in PERCENTILES)
        gap = "–" if c["token_gap_s"] is None else f"{1000 * c['token_gap_s']:.0f}"
        speedup = "–" if c["speedup"] is None else f"{c['speedup']:.2f}"
        lines.append(
            f"| {c['prompt_tokens']:.0f} | {c['concurrency']} | {c['keep']} |"
            f" {c['kept_tokens']:.0f} | {c['requests']} | {ttft} | {speedup} | {gap} |"
            f" {c['requests_per_s']:.2f} | {c['tokens_per_s']:.1f} | {c['right']:.2f} |"
        )
    odd = [c for c in table if set(c["reasons"]) - {"disabled" if c["keep"] == "off" else "pruned"}]
    for c in odd:
        reasons = ", ".join(f"{count} {reason}" for reason, count in c["reasons"].items())
        lines.append(
            f"\n{c['tokens']} tokens, {_said(c['keep'])}, {c['concurrency']} at a time: {reasons}."
        )
    for name, words in (
        ("ttft_by_length", "TTFT against prompt length"),
        ("ttft_by_rate", "TTFT against request rate"),
        ("stages", "Where the time goes before the first token"),
    ):
        lines += ["", f"![{words}]({name}.png)"]
    return "\n".join(lines) + "\n"
