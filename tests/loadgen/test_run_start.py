from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from prefixwatch.engines.tiny_model import make_tiny_model

SLOW = ("numba", "pyarrow", "plotly", "pandas", "scipy", "prometheus_client", "opentelemetry", "aiohttp")

RUN = """
import importlib.metadata, sys
from prefixwatch.loadgen import run
reads = 0
distributions = importlib.metadata.distributions
def counted(**wanted):
    global reads
    reads += 1
    return distributions(**wanted)
importlib.metadata.distributions = counted
code = run.main(["--config", sys.argv[1]])
print("package lists read:", reads, "code:", code, "slow:", [name for name in sys.argv[2:] if sys.modules.get(name)])
"""


def test_a_run_starts_without_what_only_its_end_needs() -> None:
    """Each of these takes a tenth of a second or more to import, before the first request can be sent."""
    script = (
        f"import sys, prefixwatch.loadgen.sending.headless; print([name for name in {SLOW!r} if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_a_run_reads_the_installed_packages_once_before_it_looks_for_its_target(tmp_path: Path) -> None:
    configuration = tmp_path / "run.json"
    model = make_tiny_model(tmp_path / "model", weights=False)
    configuration.write_text(
        json.dumps({"target": "http://127.0.0.1:9", "model": "m", "model_dir": str(model), "scenario": "smoke"})
    )
    command = [sys.executable, "-c", RUN, str(configuration), *SLOW]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "nothing answers at http://127.0.0.1:9" in answer.stderr
    assert answer.stdout.strip() == "package lists read: 1 code: 2 slow: []"


def test_the_request_log_is_written_without_pandas(tmp_path: Path) -> None:
    """pyarrow would import it, a third of the sender's memory, to see that a list of ours isn't one of its columns."""
    script = (
        "import sys; from pathlib import Path\n"
        "from prefixwatch.loadgen import run\n"
        "run.main(['--config', 'none.json'])\n"
        "from prefixwatch.loadgen.request_log.records import read_request_table, write_requests\n"
        "write_requests(Path(sys.argv[1]), [])\n"
        "print(read_request_table(Path(sys.argv[1])).num_rows, 'pandas' in sys.modules)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "requests.parquet")]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "0 False"
