"""Try the published claims on the simulated fleet and say which hold.

    python -m benchmarks.claims [ID …] [--data DIR] [--quick] [--json | --markdown]

Virtual time: a busy machine only makes it slower. About two minutes on two cores; a claim at a time on each.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.claims.catalogue import CLAIMS
from benchmarks.claims.claim import Outcome, Setting, attempt
from benchmarks.claims.output import as_json, markdown, table

DATA = Path(__file__).parents[3] / "shared" / "data" / "mooncake"
PROCESSES = 2


def try_claim(claim_id: str, setting: Setting) -> Outcome:
    """Try one of the claims, by id."""
    return attempt(CLAIMS[claim_id], setting)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ids", nargs="*", metavar="ID", help=f"of {', '.join(CLAIMS)} (default: all)")
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR", help="folder of the Mooncake traces")
    parser.add_argument("--quick", action="store_true", help="smaller runs, as the tests make them")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--markdown", action="store_true", help="print the page benchmarks/claims/README.md")
    arguments = parser.parse_args()
    arguments.ids = [claim_id.upper() for claim_id in arguments.ids] or list(CLAIMS)
    for claim_id in arguments.ids:
        if claim_id not in CLAIMS:
            parser.error(f"unknown claim '{claim_id}'; known claims: {', '.join(CLAIMS)}")
    return arguments


def main() -> None:
    """The exit code says nothing of the verdicts: a claim that does not hold is a result."""
    arguments = _arguments()
    setting = Setting(arguments.data, quick=arguments.quick)
    with ProcessPoolExecutor(PROCESSES) as pool:
        outcomes = list(pool.map(partial(try_claim, setting=setting), arguments.ids))
    if arguments.json:
        print(json.dumps(as_json(outcomes), indent=2, ensure_ascii=False))
    elif arguments.markdown:
        print(markdown(outcomes), end="")
    else:
        Console().print(table(outcomes))


if __name__ == "__main__":
    main()
