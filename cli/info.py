"""``shardstore info``."""

from __future__ import annotations

import click

import shardstore
from shardstore.cli.output import show_json, show_table

_CLASSES_SHOWN = 20


@click.command(short_help="Show what is in a store and how plain tools open it.")
@click.argument("store", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def info(store: str, as_json: bool) -> None:
    """Show what is in STORE, how it is laid out, its classes, and how to open it with plain tools."""
    facts = shardstore.open(store).info()
    if as_json:
        show_json(facts)
        return
    plural = "s" if facts["shards"] > 1 else ""
    shards = (
        f"{facts['shards']} shard{plural} of up to {facts['shard_samples']:,} samples, {facts['bytes'] / 1e6:,.1f} MB"
    )
    rows = [
        ("store", facts["path"]),
        ("container", f"{facts['container']}, {shards}"),
        ("samples", f"{facts['samples']:,}"),
        ("options", ", ".join(f"{k}={v}" for k, v in facts["options"].items() if v is not None)),
        ("fingerprint", facts["fingerprint"]),
    ]
    show_table(rows)
    click.echo()
    fields = [(f["name"], f["kind"], f["dtype"], f["shape"], f["content"]) for f in facts["fields"]]
    show_table(fields, ("field", "kind", "dtype", "shape", "content"))
    counts = list(facts["class_counts"].items())
    if counts:
        click.echo()
        show_table([(name, f"{n:,}") for name, n in counts[:_CLASSES_SHOWN]], ("class", "samples"))
        if len(counts) > _CLASSES_SHOWN:
            click.echo(f"… and {len(counts) - _CLASSES_SHOWN} more classes (--json shows all)")
    click.echo(f"\nopen it with plain tools:\n  {facts['open_with']}")
