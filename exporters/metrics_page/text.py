"""Metric families as a page's text, in Prometheus' format or in OpenMetrics, byte by byte as prometheus_client has it.

Its encoders check each name of each sample and take many times as long. Names here are those of one table
(`exporters.metrics_page.families`), which need no escaping; samples have no timestamps and no `_created`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import Exemplar, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from prefixwatch.exporters.metrics_page.rows import Histograms, Rows

Identities = Mapping[str, Mapping[str, str]]
"""By target, what it is: values of labels of `IDENTITY`."""

_go_number: Callable[[float], str] = floatToGoString
_END = b"# EOF\n"
"""What an OpenMetrics page ends with."""

_MOST_REMEMBERED = 1_000
_PLAIN_BELOW = 1e6
"""Go writes larger numbers with an exponent."""


class PageText:
    """Grows by families, a part of a family's samples at a time if that suits: they are put together.

    Series of families about targets get the labels of their target's identity. A label without a value is left out.
    """

    def __init__(
        self, accept: str = "", identities: Identities | None = None, label_texts: LabelTexts | None = None
    ) -> None:
        """OpenMetrics if the client accepts it, otherwise Prometheus text.

        `label_texts` remembers what the labels of earlier pages looked like: they rarely change.
        """
        _, self.content_type = choose_encoder(accept)
        self._openmetrics = self.content_type.startswith("application/openmetrics-text")
        self._label_texts = label_texts or LabelTexts()
        self._label_texts.begin(identities or {})
        self._texts: dict[str, list[bytes]] = {}

    def add(self, families: Iterable[Metric]) -> None:
        for family in families:
            texts = self._texts.get(family.name)
            if texts is None:
                texts = self._texts[family.name] = [self._head(family).encode()]
            if isinstance(family, Rows):
                lines = self._rows(family)
            elif isinstance(family, Histograms):
                lines = self._histograms(family)
            else:
                lines = [self._line(sample) for sample in family.samples]
            texts.append("".join(lines).encode())

    def pieces(self) -> Iterator[bytes]:
        """The page, bit by bit; what was given out isn't held any longer."""
        while self._texts:
            yield from self._texts.pop(next(iter(self._texts)))
        if self._openmetrics:
            yield _END

    def _rows(self, family: Rows) -> list[str]:
        name, labels = family.sample_name, self._label_texts.of(family)
        return [f"{name}{labels(tuple(values))} {_number(value)}\n" for values, value in family.values]

    def _histograms(self, family: Histograms) -> list[str]:
        name, labels = family.name, self._label_texts.of(family)
        lines = []
        for given, buckets, total in family.values:
            values = tuple(given)
            before, after = labels.around_bound(values)
            for bound, count, *exemplar in buckets:
                shown = _exemplar(exemplar[0]) if exemplar and self._openmetrics else ""
                lines.append(f'{name}_bucket{before}le="{bound}"{after} {_number(count)}{shown}\n')
            if total is not None:
                text = labels(values)
                lines.append(f"{name}_count{text} {_number(buckets[-1][1])}\n")
                lines.append(f"{name}_sum{text} {_number(total)}\n")
        return lines

    def _head(self, family: Metric) -> str:
        name, text = family.name, family.documentation.replace("\\", r"\\").replace("\n", r"\n")
        if self._openmetrics:
            text = text.replace('"', r"\"")
        elif family.type == "counter":
            name += "_total"
        kind = "untyped" if family.type == "unknown" and not self._openmetrics else family.type
        return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"

    def _line(self, sample: Sample) -> str:
        exemplar = _exemplar(sample.exemplar) if sample.exemplar and self._openmetrics else ""
        return f"{sample.name}{_labels(sorted(sample.labels.items()))} {_number(sample.value)}{exemplar}\n"


class LabelTexts:
    """How labels are written, by family: worked out once for each series and used by the pages after."""

    def __init__(self) -> None:
        self._identities: Identities = {}
        self._by_family: dict[str, _LabelText] = {}

    def begin(self, identities: Identities) -> None:
        """Begin a page. Everything is worked out again when a target has become another one."""
        if identities != self._identities:
            self._by_family.clear()
        self._identities = identities
        for texts in self._by_family.values():
            texts.make_room()

    def of(self, family: Rows | Histograms) -> _LabelText:
        found = self._by_family.get(family.name)
        if found is None:
            found = self._by_family[family.name] = _LabelText(family, self._identities)
        found.used += len(family.values)
        return found


class _LabelText:
    """Writes the labels of one family's series."""

    __slots__ = ("_around", "_identities", "_names", "_order", "_target_at", "_texts", "used")

    def __init__(self, family: Rows | Histograms, identities: Identities) -> None:
        names = family.row.given
        self._names = names
        self._order = sorted(range(len(names)), key=names.__getitem__)
        self._target_at = names.index("target") if family.row.identified else None
        self._identities = identities
        self._texts: dict[tuple[str, ...], str] = {}
        self._around: dict[tuple[str, ...], tuple[str, str]] = {}
        self.used = 0
        """Series of this page so far."""

    def make_room(self) -> None:
        """Forget everything when most of it can't be of series that were on the last page."""
        if len(self._texts) + len(self._around) > _MOST_REMEMBERED + 4 * self.used:
            self._texts.clear()
            self._around.clear()
        self.used = 0

    def __call__(self, values: tuple[str, ...]) -> str:
        text = self._texts.get(values)
        if text is None:
            text = self._texts[values] = _labels(self._pairs(values))
        return text

    def around_bound(self, values: tuple[str, ...]) -> tuple[str, str]:
        """The text before and after a bucket's bound, `le`."""
        around = self._around.get(values)
        if around is None:
            pairs = self._pairs(values)
            before = _labels([pair for pair in pairs if pair[0] < "le"])
            after = _labels([pair for pair in pairs if pair[0] > "le"])
            around = (before[:-1] + "," if before else "{"), ("," + after[1:] if after else "}")
            self._around[values] = around
        return around

    def _pairs(self, values: Sequence[str]) -> list[tuple[str, str]]:
        names = self._names
        pairs = [(names[place], values[place]) for place in self._order]
        if self._target_at is not None and (identity := self._identities.get(values[self._target_at])):
            given = {name for name, value in pairs if value}
            pairs = sorted([*pairs, *((name, value) for name, value in identity.items() if name not in given)])
        return pairs


def _number(value: float) -> str:
    value = float(value)
    return repr(value) if 0.0 <= value < _PLAIN_BELOW else _go_number(value)


def _exemplar(exemplar: Exemplar) -> str:
    at = "" if exemplar.timestamp is None else f" {exemplar.timestamp}"
    return f" # {_labels(sorted(exemplar.labels.items())) or '{}'} {_number(exemplar.value)}{at}"


def _labels(pairs: Iterable[tuple[str, str]]) -> str:
    text = ",".join([f'{name}="{_escaped(value)}"' for name, value in pairs if value])
    return f"{{{text}}}" if text else ""


def _escaped(value: str) -> str:
    if "\\" in value or '"' in value or "\n" in value:
        return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return value
