"""Which process is frozen or stuck, from messages on a simulated clock."""

import pytest

from maxbench.distributed.hang_detector import HangDetector
from maxbench.distributed.progress import Progress

STEPS = ["steps", 12, 12, 11]  # of a process that waits for another in step 12


class Simulation:
    """The detector of one process, and the beats of the others."""

    def __init__(self, count: int = 3, process: int = 0, timeout_s: float = 60.0):
        self.now, self.process, self.count = 1000.0, process, count
        hosts = [f"n{i}" for i in range(count)]
        logs = [f"{i}.log" for i in range(count)]
        self.detector = HangDetector(process, hosts, logs, timeout_s, lambda: self.now)
        self.own = Progress(*STEPS)
        for _ in range(3):
            self.own.finish(11, 0.5)

    def run(self, seconds: float, reports: dict[int, list], answers: bool = True):
        """Lets time pass with beats of some processes; returns the hang or None."""
        for _ in range(round(seconds)):
            self.now += 1
            for process, report in reports.items():
                self.detector.receive(process, report)
            self.detector.tick(self.own)
            if self.detector.must_probe() and answers:
                for process, report in reports.items():
                    self.detector.receive(process, report, f"stack of {process}")
            if hang := self.detector.verdict(lambda: "own stack"):
                return hang
        return None


@pytest.mark.parametrize("phase", ["compile", "steps", "save"])
def test_silent_process_is_frozen_in_every_phase(phase):
    simulation = Simulation()
    report = [phase, *STEPS[1:]]
    simulation.own.phase = phase
    simulation.run(20, {1: report, 2: report})
    start = simulation.now
    hang = simulation.run(90, {1: report})
    assert simulation.now - start <= 75
    assert hang.reason == (
        "process 2 of 3 on n2 is frozen: it has not answered for 60 s, see 2.log"
    )
    assert [p.process for p in hang.processes] == [2]
    assert "no Python stack, it does not answer" in "\n".join(hang.lines())


def test_several_frozen_processes_are_named():
    hang = Simulation(4).run(90, {2: STEPS})
    assert (
        hang.reason == "processes 1 on n1, 3 on n3 of 4 are frozen: they have not answered for 60 s"
    )


@pytest.mark.parametrize("stuck", [0, 1])
@pytest.mark.parametrize("ahead", [STEPS, ["save", 11, 11, 11]])
def test_process_with_the_oldest_step_is_stuck(stuck, ahead):
    """While the others are in a collective of the next step, or of a save."""
    simulation, behind = Simulation(), ["steps", 11, 11, 11]
    reports = {1: ahead, 2: ahead} | ({stuck: behind} if stuck else {})
    simulation.own = Progress(*(ahead if stuck else behind), simulation.own.step_s)
    hang = simulation.run(90, reports)
    assert simulation.now - 1000 <= 65
    assert hang.reason.startswith(
        f"process {stuck} of 3 on n{stuck} is stuck, last step 11 dispatched, 11 finished, and the "
        "others wait: no step has ended for 60 s"
    )
    assert hang.must_end
    assert hang.processes[0].stack == ("stack of 1" if stuck else "own stack")


def test_hang_without_a_process_behind_blames_none():
    hang = Simulation(2).run(90, {1: STEPS})
    assert "all processes wait in step 12, and none is behind" in hang.reason
    assert [p.state for p in hang.processes] == ["waiting"] * 2


def test_steps_of_seven_seconds_have_seventy():
    simulation = Simulation(2)
    simulation.own.step_s.extend([7.0] * 50)
    assert simulation.run(70, {1: STEPS}) is None
    assert simulation.run(3, {1: STEPS})


def test_first_steps_and_saves_have_ten_times_the_timeout():
    first = Simulation(2)
    first.own = Progress("steps", 0, 0)
    assert first.run(599, {1: ["steps", 0, 0, -1]}) is None
    assert first.run(9, {1: ["steps", 0, 0, -1]}).must_end
    saving = Simulation(2)
    assert saving.run(599, {1: ["save", 11, 11, 11]}) is None
    assert not saving.run(9, {1: ["save", 11, 11, 11]}).must_end
    compiling = Simulation(2)
    compiling.own = Progress("compile")
    assert compiling.run(3600, {1: ["compile", -1, -1, -1]}) is None


def test_slow_answer_is_no_freeze():
    """A busy host answers late, but was heard shortly before the probe."""
    simulation, behind = Simulation(3), ["steps", 11, 11, 11]
    hang = simulation.run(75, {1: STEPS, 2: behind}, answers=False)
    assert hang is None
    for process, report in {1: STEPS, 2: behind}.items():
        simulation.detector.receive(process, report, "")
    assert simulation.detector.verdict(lambda: "").processes[0].process == 2


@pytest.mark.parametrize("process", [0, 1])
def test_process_that_was_itself_frozen_blames_no_other(process):
    simulation = Simulation(3, process)
    heard = {1: STEPS, 2: STEPS} if process == 0 else {0: STEPS}
    simulation.run(20, heard)
    simulation.now += 300
    assert simulation.detector.tick(simulation.own) == 300
    assert not simulation.detector.must_probe()
    assert simulation.run(50, heard) is None


def test_other_processes_name_process_0_at_different_instants():
    ends = []
    for process in (1, 2):
        simulation = Simulation(3, process)
        hang = simulation.run(90, {})
        assert hang.processes[0].process == 0
        ends.append(simulation.detector.silence_timeout_s)
    assert ends[0] < ends[1] < 80
