"""``python -m hidet_dist.rules``: every operator class of hidet, where its rule comes from, and a rule of each."""

from __future__ import annotations

from collections import Counter

from hidet_dist.rules.catalog import BY_HAND, DERIVED, NONE, REPLICATE_ONLY, catalog


def main() -> int:
    """Print the table and the counts; the exit status is 1 when a class is in no group."""
    entries = list(catalog())
    for group in (DERIVED, BY_HAND, REPLICATE_ONLY, NONE):
        own = [entry for entry in entries if entry.group == group]
        if own:
            print(f"\n{group} ({len(own)})")
        for entry in own:
            print(f"  {entry.name.removeprefix('hidet.graph.ops.')}")
            if entry.reason:
                print(f"      because {entry.reason}")
            if entry.rule:
                print(f"      of {entry.sample or 'nothing'}: {entry.rule}")
    counts = Counter(entry.group for entry in entries)
    print(f"\n{len(entries)} operator classes: " + ", ".join(f"{count} {group}" for group, count in counts.items()))
    return 1 if counts[NONE] else 0


if __name__ == "__main__":
    raise SystemExit(main())
