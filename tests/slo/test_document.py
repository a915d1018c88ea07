"""The SLO document: what is read, and how a fault in it is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from prefixwatch.documents import DocumentError
from prefixwatch.slo.build import SHIPPED, load_objectives, shipped_names
from prefixwatch.slo.objective import Condition, RequestField
from prefixwatch.slo.openslo import ANNOTATIONS

TTFT = (SHIPPED / "ttft.yaml").read_text(encoding="utf-8")


def write(folder: Path, text: str, name: str = "own.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def columns(**values: list[float]) -> dict[RequestField, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    return {RequestField(name): np.array(row, dtype=np.float64) for name, row in values.items()}


def test_shipped_documents_read_as_written() -> None:
    ttft, tpot, goodput, availability = load_objectives(["ttft", "tpot", "goodput", "availability"])

    assert {"availability", "goodput", "tpot", "ttft"} < set(shipped_names())
    assert (ttft.name, ttft.target, ttft.conditions) == (
        "ttft",
        0.95,
        (Condition(RequestField.TTFT_SECONDS, "lte", 0.5),),
    )
    assert ttft.rule == "95 % of requests: TTFT ≤ 0.5 s"
    assert goodput.conditions == ttft.conditions + tpot.conditions + availability.conditions
    assert availability.rule == "99 % of requests: completed"


def test_goodput_takes_its_thresholds_from_the_documents_beside_it(tmp_path: Path) -> None:
    """A threshold stands in one document only."""
    goodput = write(tmp_path, (SHIPPED / "goodput.yaml").read_text(encoding="utf-8"), "goodput.yaml")
    write(tmp_path, TTFT.replace("value: 0.5", "value: 2"), "ttft.yaml")

    [objective] = load_objectives([goodput])

    assert objective.thresholds(RequestField.TTFT_SECONDS) == [2.0]
    assert objective.thresholds(RequestField.TPOT_SECONDS) == [0.05]


def test_an_objective_grades_its_request_classes_only(tmp_path: Path) -> None:
    field = "prefixwatch.dev/request-field: ttft_seconds"
    path = write(tmp_path, TTFT.replace(field, f"{field}\n    prefixwatch.dev/request-class: chat, batch-*"))

    [objective] = load_objectives([path])

    assert [objective.covers(name) for name in ("chat", "batch-night", "batch", "rag")] == [True, True, False, False]


def test_a_refused_request_is_bad_and_an_unstreamed_answer_is_left_out() -> None:
    """kubernetes-sigs/inference-perf#150 (LT27), and refusals that would flatter latency (SL20)."""
    [ttft] = load_objectives(["ttft"])

    verdicts = ttft.judge(columns(ttft_seconds=[0.5, 0.51, np.nan, np.nan], completed=[1, 1, 1, 0]))

    np.testing.assert_array_equal(verdicts, [1, 0, np.nan, 0])


def test_goodput_needs_every_condition_that_applies() -> None:
    [goodput] = load_objectives(["goodput"])

    verdicts = goodput.judge(
        columns(
            ttft_seconds=[0.1, 0.1, 0.9, 0.1],
            tpot_seconds=[0.02, np.nan, 0.02, 0.02],
            completed=[1, 1, 1, 0],
        )
    )

    np.testing.assert_array_equal(verdicts, [1, 1, 0, 0])


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "remedy"),
    [
        ("kind: SLO", "kind: SLOs", 2, "kind", "did you mean 'SLO'"),
        ("apiVersion: openslo/v1", "apiVersion: openslo/v2", 1, "apiVersion", "should be 'openslo/v1'"),
        ("target: 0.95", "target: 1.0", 26, "spec.objectives[0]", "leaves no error budget"),
        ("target: 0.95", "targget: 0.95", 29, "spec.objectives[0].targget", "did you mean 'target'"),
        ("      op: lte\n", "", 26, "spec.objectives[0]", "needs op and value"),
        ("  service: llm-serving\n", "", 8, "spec.service", "missing: add it"),
        ("duration: 30d", "duration: a month", 22, "spec.timeWindow[0].duration", "should match pattern"),
        (
            "request-field: ttft_seconds",
            "request-field: ttft",
            7,
            "metadata.annotations.prefixwatch.dev/request-field",
            "use one of ttft_seconds",
        ),
        ("dev/request-field:", "dev/request-filed:", 6, "metadata.annotations", "unknown annotation"),
        ("value: 0.5", "value: half", 28, "spec.objectives[0].value", "valid number"),
    ],
)
def test_a_fault_names_file_line_key_and_remedy(
    tmp_path: Path, *, old: str, new: str, line: int, key: str, remedy: str
) -> None:
    assert old in TTFT
    path = write(tmp_path, TTFT.replace(old, new))

    with pytest.raises(DocumentError) as caught:
        load_objectives([path])

    located = [text for text in str(caught.value).splitlines() if text.startswith(f"{path}:{line}: {key}: ")]
    assert located, str(caught.value)
    assert remedy in located[0]


@pytest.mark.parametrize("text", ["", "a: [1", "- 1", "just words", "\tx: 1", "key: *nowhere"])
def test_what_is_no_document_is_an_error_with_its_line(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)

    with pytest.raises(DocumentError, match=rf"{path}:1"):
        load_objectives([path])


def test_duplicate_names_are_refused(tmp_path: Path) -> None:
    first, second = write(tmp_path, TTFT, "a.yaml"), write(tmp_path, TTFT, "b.yaml")

    with pytest.raises(DocumentError, match=rf"{second}:4: metadata.name: 'ttft' is taken by {first}:4: rename"):
        load_objectives([first, second])


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(DocumentError, match="no such SLO document: give a file, or one of availability, goodput"):
        load_objectives(["latency"])


def test_goodput_of_an_unknown_slo_is_refused(tmp_path: Path) -> None:
    text = (SHIPPED / "goodput.yaml").read_text(encoding="utf-8").replace("ttft, tpot", "ttft, speed")

    with pytest.raises(DocumentError, match="no SLO named 'speed'"):
        load_objectives([write(tmp_path, text)])


def test_several_objectives_of_one_document_get_their_own_names(tmp_path: Path) -> None:
    more = "    - displayName: Stretch\n      op: lt\n      value: 0.2\n      targetPercent: 50\n"

    objectives = load_objectives([write(tmp_path, TTFT + more)])

    assert [(o.name, o.target) for o in objectives] == [("ttft/0", 0.95), ("ttft/1", 0.5)]
    assert objectives[1].rule == "50 % of requests: TTFT < 0.2 s"


def test_our_annotations_are_the_documented_ones() -> None:
    used = {
        key
        for path in SHIPPED.glob("*.yaml")
        for document in yaml.safe_load_all(path.read_text())
        for key in document["metadata"]["annotations"]
    }

    assert used <= ANNOTATIONS.keys()


@given(st.lists(st.tuples(st.floats(0, 10) | st.just(np.nan), st.booleans()), min_size=1))
def test_no_uncompleted_request_is_ever_good_for_goodput(rows: list[tuple[float, bool]]) -> None:
    [goodput] = load_objectives(["goodput"])
    completed = np.array([done for _, done in rows])
    figure = [value for value, _ in rows]

    verdicts = goodput.judge(columns(ttft_seconds=figure, tpot_seconds=figure, completed=completed.tolist()))

    assert (verdicts[~completed] == 0).all()
