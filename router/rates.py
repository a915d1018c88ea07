"""What a worker's hardware does, learnt from its answers: how fast it computes prompts and generates tokens.

    prefill    TTFT = a + tokens / rate over answers to prompts that nobody else was computing a prompt beside; the
               slope is Theil and Sen's, the median of the slopes between all pairs: a fifth of them may be wrong
    decode     seconds per token = b + c · (requests at the worker − 1), the same way; the rate is 1 / b, of one stream
               alone

Both look at the newest `SAMPLES` answers, and are unknown before `LEAST_SAMPLES`, and where the samples don't tell:
prompts that are about equally long have no slope. A rate is computed when it is asked for and a tenth of the samples
is new.

Source: Sen (1968), Estimates of the regression coefficient based on Kendall's tau.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SAMPLES = 128
LEAST_SAMPLES = 12
_SPREAD = 1.5
"""The longest of the middle 80 % of prompts over the shortest of them, below which their times have no slope."""
_LEAST_TOKENS = 8
"""Of an answer: shorter ones say little of the time per token."""
_NEW_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a worker can do; a figure that isn't known is None."""

    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    intra_node_bytes_per_second: float | None = None


class LearnedRates:
    """One worker's rates, from its answers since it joined."""

    __slots__ = ("_decode", "_prefill")

    def __init__(self) -> None:
        self._prefill = _Line()
        self._decode = _Line()

    def first_token(self, uncached_tokens: int, seconds: float) -> None:
        """A prompt was computed by this worker and without waiting for blocks, `seconds` after it was sent, while no
        other waited or was being computed there."""
        if uncached_tokens > 0 and seconds > 0:
            self._prefill.add(uncached_tokens, seconds)

    def answered(self, output_tokens: int, seconds: float, in_flight: float) -> None:
        """An answer ended, `seconds` after its first token, beside `in_flight` requests at the worker with itself."""
        if output_tokens >= _LEAST_TOKENS and seconds > 0:
            self._decode.add(max(in_flight - 1.0, 0.0), seconds / (output_tokens - 1))

    @property
    def samples(self) -> tuple[int, int]:
        """Of prompts and of answers, as far as they are kept."""
        return len(self._prefill), len(self._decode)

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens computed in a second."""
        slope = self._prefill.slope()
        return 1.0 / slope if slope else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens generated in a second for a request that is alone."""
        seconds = self._decode.at_zero()
        return 1.0 / seconds if seconds else None

    def over(self, stated: Hardware) -> Hardware:
        """What is stated, and in its place what has been learnt."""
        return Hardware(
            self.prefill_tokens_per_second or stated.prefill_tokens_per_second,
            self.decode_tokens_per_second or stated.decode_tokens_per_second,
            stated.intra_node_bytes_per_second,
        )


class _Line:
    """y over x by Theil and Sen, of the newest samples."""

    __slots__ = ("_fitted", "_new", "_samples")

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self._new = 0
        self._fitted: tuple[float | None, float | None] = (None, None)

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, x: float, y: float) -> None:
        self._samples.append((x, y))
        self._new += 1

    def slope(self) -> float | None:
        """None where x varies too little, or the slope isn't positive."""
        return self._fit()[0]

    def at_zero(self) -> float | None:
        """y at x = 0; where x doesn't vary, the median of y."""
        return self._fit()[1]

    def _fit(self) -> tuple[float | None, float | None]:
        count = len(self._samples)
        if count >= LEAST_SAMPLES and self._new >= max(1.0, _NEW_SHARE * count):
            self._fitted, self._new = _theil_sen(np.array(self._samples)), 0
        return self._fitted


def _theil_sen(samples: npt.NDArray[np.float64]) -> tuple[float | None, float | None]:
    x, y = samples.T
    middle = float(np.median(y))
    low, high = np.quantile(x, (0.1, 0.9))
    if not high > _SPREAD * max(low, 0.0):
        return None, middle
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] - x[first]
    far = np.abs(apart) > 0.1 * (high - low)  # noise over a short distance has no slope
    slope = float(np.median((y[second] - y[first])[far] / apart[far]))
    if slope <= 0.0:
        return None, middle
    start = float(np.median(y - slope * x))
    return slope, start if start > 0.0 else None
