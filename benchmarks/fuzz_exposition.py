"""Throws broken metrics pages at the exporter's reader and at whole targets, and holds them to what they promise.

`python -m benchmarks.fuzz_exposition --inputs 1000000 --seed 1`: pieces of the captured pages are mutated (bytes,
tokens, lines, splices of two systems, other line ends, truncation) and read three ways:

- by a fresh reader: every line that the mutation left whole is in the reading with the value that prometheus_client's
  parser gives that line, unless the same series stands before it on the page;
- by one reader that has read the pages before: it shows no value that no line of the text gives;
- by a target that lives for a while, to the last derived number: nothing is raised, whatever the bytes are.

Each input may take at most a second of CPU. A broken promise ends the run with its exception, and the input in a file.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from prefixwatch.exporters.catalogue.model import Catalogue, System, shipped_catalogue
from prefixwatch.exporters.config import ExporterConfig, TargetConfig
from prefixwatch.exporters.scraping.exposition import ExpositionReader, Reading, metric_names
from prefixwatch.exporters.scraping.scrape import Scrape
from prefixwatch.exporters.scraping.target import Target

CAPTURES = Path(__file__).parent.parent / "tests/exporters/captures"
SLOWEST_SECONDS = 1.0
TARGET_LIFE = 500
"""Inputs after which new targets and readers take over."""

REMEMBERED_EVERY = 50
"""Each so-manieth input is also read by a reader that has read others before."""

TOKENS = (
    b"NaN", b"+Inf", b"-Inf", b"1e999", b"-1", b"0", b"1_000", b"0x10", b"{", b"}", b'"', b'\\"', b"\\", b"\\n", b",",
    b"=", b"#", b" # {trace_id=\"a\"} 1", b"# EOF", b"# TYPE x counter", b"\r", b"\r\n", b"\n", b"\n\n", b"\x00",
    b"\xff", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b" 1700000000000", b"\t", b'le="+Inf"', b'le="nan"', b"_bucket",
    b"_total", b"{}", b"9" * 400, b"a" * 5000, b"<html>", b"[]",
)  # fmt: skip

Identity = tuple[str, frozenset[tuple[str, str]]]
Mutation = Callable[[random.Random, bytes], bytes]


@dataclass(frozen=True, slots=True)
class Page:
    """A captured page, as lines, and what each of its lines says by prometheus_client's parser."""

    name: str
    system: System
    lines: tuple[bytes, ...]
    says: dict[bytes, tuple[Identity, float]]


@dataclass(slots=True)
class Tally:
    """Figures of a run."""

    inputs: int = 0
    bytes: int = 0
    lines_held: int = 0
    """Whole lines whose value was compared."""
    malformed_lines: int = 0
    ingested: int = 0
    """Inputs that a target took as its numbers; the others it turned down with a reason."""
    slowest_seconds: float = 0.0
    seconds: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)


class Broken(Exception):
    """A promise was broken by this input."""


def load_pages() -> list[Page]:
    """All captured pages of known systems."""
    catalogue, pages = shipped_catalogue(), []
    for path in sorted(CAPTURES.iterdir()):
        raw = path.read_bytes()
        body = gzip.decompress(raw) if path.suffix == ".gz" else raw
        system = catalogue.detect(metric_names(body))
        if system is not None:
            lines = tuple(body.split(b"\n"))
            wanted = {name.encode() for name in system.wanted_names()}
            says = {line: said for line in lines if _opening(line) in wanted and (said := _said(line))}
            pages.append(Page(path.name, system, lines, says))
    return pages


def _opening(line: bytes) -> bytes:
    return line.split(b"{", 1)[0].split(b" ", 1)[0]


def _said(line: bytes) -> tuple[Identity, float] | None:
    for family in text_string_to_metric_families(line.decode()):
        for sample in family.samples:
            return (sample.name, frozenset(sample.labels.items())), sample.value
    return None


# Mutations


def _flip(rng: random.Random, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _insert(rng: random.Random, body: bytes) -> bytes:
    at = rng.randrange(len(body) + 1)
    return body[:at] + rng.choice(TOKENS) + body[at:]


def _overwrite(rng: random.Random, body: bytes) -> bytes:
    at, token = rng.randrange(len(body)), rng.choice(TOKENS)
    return body[:at] + token + body[at + rng.randint(0, 12) :]


def _cut(rng: random.Random, body: bytes) -> bytes:
    return body[: rng.randrange(len(body))]


def _drop(rng: random.Random, body: bytes) -> bytes:
    at = rng.randrange(len(body))
    return body[:at] + body[at + rng.randint(1, 60) :]


def _repeat(rng: random.Random, body: bytes) -> bytes:
    lines = body.split(b"\n")
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    return b"\n".join(lines)


def _shuffle(rng: random.Random, body: bytes) -> bytes:
    lines = body.split(b"\n")
    rng.shuffle(lines)
    return b"\n".join(lines)


def _carriage_returns(rng: random.Random, body: bytes) -> bytes:
    return body.replace(b"\n", b"\r\n", rng.randint(1, 40))


def _number(rng: random.Random, body: bytes) -> bytes:
    lines = body.split(b"\n")
    at = rng.randrange(len(lines))
    series, _, _ = lines[at].rpartition(b" ")
    lines[at] = series + b" " + rng.choice((*TOKENS[:8], str(rng.uniform(-10, 1e18)).encode()))
    return b"\n".join(lines)


MUTATIONS: Sequence[Mutation] = (
    _flip, _insert, _overwrite, _cut, _drop, _repeat, _shuffle, _carriage_returns, _number,
)  # fmt: skip


def inputs(rng: random.Random, pages: Sequence[Page]) -> Iterator[tuple[Page, bytes]]:
    """Pieces of pages without end, mutated one to three times; now and then of two pages at once."""
    while True:
        page = rng.choice(pages)
        lines = _piece(rng, page)
        if rng.random() < 0.1:
            lines += _piece(rng, rng.choice(pages))
        body = b"\n".join(lines)
        for _ in range(rng.randint(1, 3)):
            body = rng.choice(MUTATIONS)(rng, body) if body else b""
        yield page, body


def _piece(rng: random.Random, page: Page) -> list[bytes]:
    first = rng.randrange(len(page.lines))
    return list(page.lines[first : first + rng.randint(1, 40)])


# Promises


def held(page: Page, body: bytes, reading: Reading) -> int:
    """How many whole lines were compared. Raises Broken when one is missing or says something else."""
    shown = dict(zip((one.identity() for one in reading.layout.series), reading.values.tolist(), strict=True))
    first: dict[Identity, float] = {}
    known = [page.says[line] for line in body.split(b"\n") if line in page.says]
    for identity, value in known:
        first.setdefault(identity, value)
    for identity, value in first.items():
        if identity not in shown:
            raise Broken(f"a whole line is missing: {identity}")
        if not _same(shown[identity], value) and not reading.duplicate_lines:
            raise Broken(f"{identity} is {shown[identity]}, its line says {value}")
    return len(first)


def shows_only_what_is_there(body: bytes, reading: Reading, system: System) -> None:
    """Of a reader with a memory: each value is of a line of this very text. Raises Broken."""
    told: dict[Identity, list[float]] = {}
    for line in body.split(b"\n"):
        alone = ExpositionReader(system.wanted_names()).read(line)
        for one, value in zip(alone.layout.series, alone.values.tolist(), strict=True):
            told.setdefault(one.identity(), []).append(value)
    for one, value in zip(reading.layout.series, reading.values.tolist(), strict=True):
        if not any(_same(value, said) for said in told.get(one.identity(), ())):
            raise Broken(f"{one.identity()} is {value}, and no line says so")


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


class Fuzzer:
    """Readers and targets that live through many inputs. `last` is the newest input, for whoever has to look at it."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.last = b""
        self.tally = Tally()
        self._catalogue = shipped_catalogue()
        pages = load_pages()
        self._wanted = {page.system.system: page.system.wanted_names() for page in pages}
        self._inputs = inputs(rng, pages)
        self._renew()

    def run(self, count: int) -> Tally:
        """Try this many more inputs. Raise Broken, or what the exporter raised, for the first broken promise."""
        tally, begun = self.tally, time.perf_counter()
        for number in range(count):
            page, self.last = next(self._inputs)
            started = time.process_time()  # CPU: on a busy machine the clock runs on while this doesn't
            self._read(number, page, self.last)
            took = time.process_time() - started
            if took > SLOWEST_SECONDS:
                raise Broken(f"took {took:.1f} s")
            tally.slowest_seconds = max(tally.slowest_seconds, took)
            if number % TARGET_LIFE == TARGET_LIFE - 1:
                self._renew()
        tally.seconds += time.perf_counter() - begun
        return tally

    def _read(self, number: int, page: Page, body: bytes) -> None:
        tally, name = self.tally, page.system.system
        reading = ExpositionReader(self._wanted[name]).read(body)
        tally.lines_held += held(page, body, reading)
        if number % REMEMBERED_EVERY == 0:
            shows_only_what_is_there(body, self._readers[name].read(body), page.system)
        target = self._targets[name, number % 2 == 0]
        target.ingest(Scrape(0.001, body), float(number))
        target.flags(float(number))
        tally.inputs += 1
        tally.bytes += len(body)
        tally.malformed_lines += reading.malformed_lines
        tally.ingested += target.up
        if not target.up:
            tally.reasons[target.reason] = tally.reasons.get(target.reason, 0) + 1

    def _renew(self) -> None:
        self._readers = {name: ExpositionReader(names) for name, names in self._wanted.items()}
        self._targets = {
            (name, told): _new_target(name, self._catalogue, told=told)
            for name in self._wanted
            for told in (True, False)
        }


def _new_target(name: str, catalogue: Catalogue, *, told: bool) -> Target:
    """A target whose system is configured, or has to be recognised."""
    config = TargetConfig(name=name, url="http://localhost/metrics", system=name if told else None)
    return Target(config, ExporterConfig(targets=(config,)), catalogue)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-input.bin"), help="where a failing input is kept")
    options = parser.parse_args()
    fuzzer = Fuzzer(options.seed)
    with ExitStack() as on_failure:
        on_failure.callback(lambda: options.keep.write_bytes(fuzzer.last))
        tally = fuzzer.run(options.inputs)
        on_failure.pop_all()
    print(json.dumps(asdict(tally), indent=2))


if __name__ == "__main__":
    main()
