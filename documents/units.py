"""Numbers of a document by what they measure, each with the range in which it can be meant.

Beyond it lies what no machine has: a slip of the unit, nan or infinity. A key without a limit is left out, or null.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MOST_WORKERS = 10_000
MOST_BLOCKS = 2**30
"""Of 16 tokens of an 8B model: 2 PB."""
_RATE = Field(ge=0.001, le=1_000_000)
_BLOCKS = Field(le=MOST_BLOCKS)
_KV_BYTES = Field(ge=1, le=10**9)

GbitPerSecond = Annotated[float, _RATE]
"""From a modem's to that of a thousand of today's fastest links."""
GbitPerSecondOrNone = Annotated[float | None, _RATE]
LatencySeconds = Annotated[float, Field(ge=0, le=3600)]
LatencyMs = Annotated[float, Field(ge=0, le=3_600_000)]
KvBytesPerToken = Annotated[int, _KV_BYTES]
KvBytesPerTokenOrNone = Annotated[float | None, _KV_BYTES]
Compression = Annotated[float, Field(ge=1, le=10_000)]
Blocks = Annotated[int, _BLOCKS]
BlocksOrNone = Annotated[int | None, _BLOCKS]
TokensOrNone = Annotated[int | None, Field(ge=1, le=2**40)]
WaitSeconds = Annotated[float, Field(gt=0, le=31_536_000)]
"""Up to a year."""
WaitSecondsOrNone = Annotated[float | None, Field(gt=0, le=31_536_000)]
