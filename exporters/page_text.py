"""Metric families as a page's text, in Prometheus' format or in OpenMetrics, byte by byte as prometheus_client has it.

Its encoders check each name of each sample and take four times as long. Names here are those of one table
(`exporters.families`), which need no escaping; samples have no timestamps and no `_created`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import Exemplar, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

_number: Callable[[float], str] = floatToGoString
_END = b"# EOF\n"
"""What an OpenMetrics page ends with."""


class PageText:
    """Grows by families, a part of a family's samples at a time if that suits: they are put together."""

    def __init__(self, accept: str = "") -> None:
        """OpenMetrics for who accepts it, else Prometheus text."""
        _, self.content_type = choose_encoder(accept)
        self._openmetrics = self.content_type.startswith("application/openmetrics-text")
        self._texts: dict[str, list[bytes]] = {}

    def add(self, families: Iterable[Metric]) -> None:
        for family in families:
            texts = self._texts.get(family.name)
            if texts is None:
                texts = self._texts[family.name] = [self._head(family).encode()]
            texts.append("".join([self._line(sample) for sample in family.samples]).encode())

    def pieces(self) -> Iterator[bytes]:
        """The page, bit by bit; what was given out isn't held any longer."""
        while self._texts:
            yield from self._texts.pop(next(iter(self._texts)))
        if self._openmetrics:
            yield _END

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
        return f"{sample.name}{_labels(sample.labels)} {_number(sample.value)}{exemplar}\n"


def _exemplar(exemplar: Exemplar) -> str:
    at = "" if exemplar.timestamp is None else f" {exemplar.timestamp}"
    return f" # {_labels(exemplar.labels) or '{}'} {_number(exemplar.value)}{at}"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join([f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items())]) + "}"


def _escaped(value: str) -> str:
    if "\\" in value or '"' in value or "\n" in value:
        return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return value
