"""Lines and result of a run whose process 0 is frozen: another process writes them."""

import json

from maxbench.distributed.hang_detector import Hang, StalledProcess
from maxbench.metrics.step_stats import Devices
from maxbench.run.log_writer import Log
from maxbench.run.result import RunResult
from tests.conftest import resolve

REASON = "process 0 of 3 on n0 is frozen: it has not answered for 60 s, see 0.log"


def test_frozen_process_0_is_reported_once_and_keeps_the_reason(tmp_path):
    run, devices = resolve("llama31_8b", "tiny"), Devices("cpu", "cpu", 1, None)
    result = lambda: RunResult.of_run(run, devices, [], 3)
    logs = [Log(run, devices, i, tmp_path, result()) for i in range(3)]
    written = lambda: json.loads((tmp_path / "result.json").read_text())
    hang = Hang(REASON, [StalledProcess(0, "n0", "frozen", "last reported: ...", "0.log")])
    for other in logs[1:]:
        other.report_hang(hang, hang.lines())
        other.write_result_for_lost_peer(REASON)
    text = (tmp_path / f"log-{run.name}.out").read_text()
    assert text.count(f"hang: {REASON}\n") == 1
    assert text.count("hang:   no Python stack, it does not answer; see 0.log\n") == 1
    assert (written()["status"], written()["reason"]) == ("failed", REASON)
    assert [p["process"] for p in written()["stalled"]] == [0]
    logs[0].report_hang(hang, [])  # process 0 goes on, and gets the message of the others
    logs[0].write_result_for_lost_peer(REASON)
    assert (written()["status"], written()["reason"]) == ("failed", REASON)
    assert [p["host"] for p in written()["stalled"]] == ["n0"]
