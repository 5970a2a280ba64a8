"""What a conversion did, for people and programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardstore.converting.plan import human
from shardstore.errors import Problem, printable
from shardstore.store.schema import REJECTS, Schema


@dataclass(frozen=True)
class Summary:
    """What a conversion did (or, for a dry run, would do).

    Attributes:
        target: the store's path.
        schema: its description.
        nbytes: bytes of its files; for a dry run, of its values.
        reason: why pixels or encoded, where ``store="auto"`` decided, or how many pictures were resized.
        rejects: the bad files that were left out, with the reason.
        notes: what else was left out or is odd.
        seconds: it took.
        dry_run: nothing was written.
        reused: shards that an interrupted run of the same conversion had finished.
        reused_pictures: pictures that it had resized.
    """

    target: str
    schema: Schema
    nbytes: int
    reason: str
    rejects: list[Problem]
    notes: list[str]
    seconds: float
    dry_run: bool = False
    reused: int = 0
    reused_pictures: int = 0

    def __str__(self) -> str:
        """Three lines, and one for each note."""
        s, kind = self.schema, str(self.schema.options["store"])
        classes = f" in {len(s.classes)} classes" if s.classes else ""
        verb = "would hold" if self.dry_run else "holds"
        size = human(self.nbytes)
        speed = f"; {self.seconds:.1f} s, {s.samples / max(self.seconds, 1e-9):,.0f} images/s"
        where = f"{size} in {s.shards} shard{'s' if s.shards > 1 else ''}" + ("" if self.dry_run else speed)
        lines = [
            f"{printable(self.target)} {verb} {s.samples:,} images{classes}, {where}",
            f"stored as {kind}" + (f": {self.reason}" if self.reason else ""),
        ]
        if self.rejects:
            bad = f"{len(self.rejects)} bad file{'s' if len(self.rejects) > 1 else ''}"
            lines.append(f"left out: {bad}, listed in {REJECTS}; the first: {self.rejects[0]}")
        else:
            lines.append("left out: not known before the files are read" if self.dry_run else "left out: no bad files")
        shards = f"{self.reused:,} of {s.shards:,} shard{'s' if s.shards > 1 else ''}" if self.reused else ""
        pictures = f"{self.reused_pictures:,} resized pictures" if self.reused_pictures else ""
        if shards or pictures:
            both = " and ".join(filter(None, (shards, pictures)))
            lines.append(f"reused: {both}, which an interrupted run had finished")
        return "\n".join(lines + [f"note: {printable(note)}" for note in self.notes])

    def to_dict(self) -> dict[str, Any]:
        """The summary for JSON."""
        return {
            "target": self.target,
            "samples": self.schema.samples,
            "classes": len(self.schema.classes or ()),
            "shards": self.schema.shards,
            "shard_samples": self.schema.shard_samples,
            "bytes": self.nbytes,
            "container": self.schema.container,
            "options": dict(self.schema.options),
            "reason": self.reason,
            "fingerprint": self.schema.fingerprint,
            "rejects": [p.to_dict() for p in self.rejects],
            "notes": self.notes,
            "seconds": round(self.seconds, 3),
            "dry_run": self.dry_run,
            "reused": self.reused,
            "reused_pictures": self.reused_pictures,
        }
