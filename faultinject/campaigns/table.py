"""The table of campaigns (campaigns.toml) as lines for a shell: NAME SECONDS COMMAND.

    python -m faultinject.campaigns.table [OUT]

OUT is the directory of the reports, for the commands that share a file in it.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpsd.base import output

TABLE = Path(__file__).resolve().parents[1] / "campaigns.toml"


@dataclass(frozen=True, slots=True)
class Campaign:
    """One step of scripts/reports: it is ended after `seconds`."""

    name: str
    seconds: int
    command: str


def campaigns(out: str = "OUT", path: Path = TABLE) -> Iterator[Campaign]:
    """Yield every campaign. Raises KeyError for a word that the table does not define."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    for row in table["campaign"]:
        yield Campaign(row["name"], row["seconds"], row["command"].format(**table["words"], out=out))


def main(argv: list[str]) -> int:
    out = argv[0] if argv else "OUT"
    lines = (f"{each.name} {each.seconds} {each.command}\n" for each in campaigns(out))
    return output.put("".join(lines), "faultinject.campaigns.table")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
