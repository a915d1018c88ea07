"""Puts objects into Mooncake's store and gets some of them back; run by the peers' Python.

Arguments: host:port of the master's RPC, of this client's transfers, and the port of its metrics page. A JSON line in
says `{"put": how many, "bytes": of each, "get": how many of them, "missing": how many others}`; a line out when that
is done. Ends with its input.
"""

from __future__ import annotations

import json
import sys

from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

SEGMENT_BYTES = 32 * 1024 * 1024
BUFFER_BYTES = 16 * 1024 * 1024


def main(master: str, own: str, metrics_port: int) -> None:
    store = MooncakeDistributedStore()
    failed = store.setup(
        own, "P2PHANDSHAKE", SEGMENT_BYTES, BUFFER_BYTES, "tcp", "", master,
        enable_client_http_server=True, client_http_port=metrics_port,
    )  # fmt: skip
    if failed:
        raise SystemExit(f"the store can't be set up: {failed}")
    print("{}", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        for number in range(asked["put"]):
            if store.put(f"key-{number}", bytes(asked["bytes"])):
                raise SystemExit(f"key-{number} can't be put")
        got = sum(len(store.get(f"key-{number}")) for number in range(asked["get"]))
        got += sum(len(store.get(f"other-{number}")) for number in range(asked["missing"]))
        print(json.dumps({"bytes": got}), flush=True)
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
