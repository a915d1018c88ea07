"""`prefixwatch scale-advice`: what an exporter answers as a table, as JSON and as pods' deletion costs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from prefixwatch.stack.errors import UsageError
from prefixwatch.stack.scaling.command import app, read_advice
from tests.stack.json_server import JsonAnswers, serving

WORKERS = [
    {"worker": "a", "pod": "vllm-0", "namespace": "llm", "load_requests": 1.0, "deletion_cost": 0, "cached_tokens": 480,
     "lost_hit_tokens": 0, "lost_gpu_seconds": 0.0, "basis": "traffic", "absorbed_by": []},
    {"worker": "b", "pod": "vllm-1", "load_requests": 2.0, "deletion_cost": 1, "cached_tokens": 4800,
     "lost_hit_tokens": 4096, "lost_gpu_seconds": 12.5, "basis": "traffic",
     "absorbed_by": [{"prefix": "support-bot", "held_tokens": 4096, "lost_tokens": 4096, "worker": "a"}]},
    {"worker": "c", "pod": "c", "load_requests": 0.0, "deletion_cost": 2,
     "absent": {"lost_hit_tokens": "no KV events"}},
]  # fmt: skip
ADVICE = {
    "schema": 1,
    "target_load_requests": 4.0,
    "groups": [{
        "peers": {"model": "llama"}, "workers": 3, "load_requests": 3.0, "desired_workers": 2,
        "advice": {"action": "remove", "workers": 1, "rule": "load_low", "remove": ["a"]}, "drain_order": WORKERS,
    }],
}  # fmt: skip


class Answers(JsonAnswers):
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.startswith("/garbage"):
            self.wfile.write(b"HELLO\r\n\r\n")
        elif self.path.startswith("/empty"):
            self.answer({"schema": 1})
        elif self.path.startswith("/api/v1/scaling"):
            self.answer(ADVICE)
        else:
            self.answer({}, 404)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(Answers) as address:
        yield address


def test_a_table_names_who_may_go_what_is_lost_and_who_takes_over(url: str) -> None:
    shown = CliRunner().invoke(app, ["--exporter", url, "--target-load", "4"], env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    assert "model llama: 3 workers, 3.0 requests; remove a (load_low)." in shown.output
    assert "support-bot → a" in shown.output
    assert "unknown" in shown.output
    assert Answers.asked[-1] == "/api/v1/scaling?target_load=4"


def test_json_is_what_the_exporter_answers(url: str) -> None:
    assert json.loads(CliRunner().invoke(app, ["--exporter", url, "--json"]).output) == ADVICE


def test_deletion_costs_are_written_for_pods_whose_cache_is_known(url: str) -> None:
    assert CliRunner().invoke(app, ["--exporter", url, "--kubectl"]).output.splitlines() == [
        "kubectl annotate pod vllm-0 -n llm controller.kubernetes.io/pod-deletion-cost=0 --overwrite",
        "kubectl annotate pod vllm-1 controller.kubernetes.io/pod-deletion-cost=1 --overwrite",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--exporter", "localhost"], "--exporter: 'localhost/api/v1/scaling' is not an http"),
        (["--exporter", "http://127.0.0.1:1"], "is it running"),
        (["--target-load", "0"], "--target-load must be above 0, got 0"),
        (["--json", "--kubectl"], "give either --kubectl or --json"),
    ],
)
def test_wrong_input_is_one_message(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        raise CliRunner().invoke(app, arguments).exception or AssertionError("no error")


def test_another_servers_answer_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="answers 404"):
        read_advice(f"{url}/elsewhere", None)


@pytest.mark.parametrize(("path", "message"), [("garbage", "HELLO; is it running"), ("empty", "not scaling advice")])
def test_another_servers_answer_is_one_message(url: str, path: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_advice(f"{url}/{path}", None)
