"""Configuration: what is accepted, and what a wrong one is told."""

from __future__ import annotations

import pytest

from prefixwatch.documents import DocumentError
from prefixwatch.exporters.catalogue.model import parse_system, shipped_catalogue
from prefixwatch.exporters.config import config_from_flags, split_listen
from prefixwatch.exporters.errors import ExporterError


@pytest.mark.parametrize(
    ("given", "name", "url"),
    [
        ("a=http://h:8000", "a", "http://h:8000/metrics"),
        ("a=h:8000", "a", "http://h:8000/metrics"),
        ("http://h:8000/", "h:8000", "http://h:8000/metrics"),
        ("h:8000/prom", "h:8000", "http://h:8000/prom"),
        ("http://h:8000/m?a=b", "h:8000", "http://h:8000/m?a=b"),
    ],
)
def test_targets_from_flags(given: str, name: str, url: str) -> None:
    (target,) = config_from_flags([given]).targets
    assert (target.name, target.url) == (name, url)


def test_kv_events_go_to_the_named_target_or_in_order() -> None:
    config = config_from_flags(["a=h:1", "b=h:2"], ["b=tcp://h:5558"])
    assert [target.kv_events for target in config.targets] == [(), ("tcp://h:5558",)]
    config = config_from_flags(["a=h:1", "b=h:2"], ["tcp://h:5557", "tcp://h:5558"])
    assert [target.kv_events for target in config.targets] == [("tcp://h:5557",), ("tcp://h:5558",)]


def test_each_rank_has_its_own_kv_events() -> None:
    """sglang#29211, vllm#18925 (N20): a subscriber of the base port hears rank 0 alone."""
    config = config_from_flags(["a=h:1", "b=h:2"], ["a=tcp://h:5557", "a=tcp://h:5558"])
    assert [target.kv_events for target in config.targets] == [("tcp://h:5557", "tcp://h:5558"), ()]
    (target,) = config_from_flags(["a=h:1"], ["a=tcp://h:5557,tcp://h:5558"]).targets
    assert target.kv_events == ("tcp://h:5557", "tcp://h:5558")


@pytest.mark.parametrize(
    ("targets", "kv_events", "message"),
    [
        (["a=ftp://h"], [], "not an http"),
        (["a=http://h:99999"], [], r"not an http\(s\) URL: Port"),
        (["a=h:1", "a=h:2"], [], "given more than once: a"),
        ([], [], "targets"),
        (["a=h:1"], ["c=tcp://h:5557"], "no target is called 'c'"),
        (["a=h:1"], ["tcp://h:1", "tcp://h:2"], "only 1 targets"),
        (["a=h:1"], ["a=tcp://h:1", "a=tcp://h:1"], "given twice"),
        (["a=h:1"], ["a=tcp://h:1,tcp://h:1"], "twice"),
        (["a=h:1"], ["h:5557"], "not a ZMQ endpoint"),
        (["a=h:1"], ["tcp://h"], "not a ZMQ endpoint"),
    ],
)
def test_wrong_flags_are_named(targets: list[str], kv_events: list[str], message: str) -> None:
    with pytest.raises(ExporterError, match=message):
        config_from_flags(targets, kv_events)


@pytest.mark.parametrize("listen", ["9477", "host:", "host:x", "host:70000"])
def test_a_listen_address_has_a_port(listen: str) -> None:
    with pytest.raises(ExporterError, match="is not HOST:PORT"):
        config_from_flags(["h:1"], listen=listen)


def test_an_ipv6_listen_address() -> None:
    assert split_listen("[::1]:9477") == ("::1", 9477)


def test_an_unknown_system_lists_the_known_ones() -> None:
    with pytest.raises(ExporterError, match=r"unknown system 'x'; known: .*prefixwatch-router, .*vllm"):
        shipped_catalogue().get("x")


def test_a_wrong_catalogue_file_is_named_with_its_field() -> None:
    text = "system: x\ntitle: X\nrole: engine\ndetect: {any_of: [x]}\nsignals: {a: {kind: meter, unit: s, sources: []}}"
    with pytest.raises(DocumentError, match=r"x.yaml:5: signals\.a\.kind: .*'counter', 'gauge'"):
        parse_system(text, "x.yaml")
