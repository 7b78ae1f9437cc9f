"""Tracebacks among the last lines of a rank, and what reads like a consequence of another rank's end."""

from __future__ import annotations

from neox.launch.failures import begins_failure, cpp_message, failure_text, is_secondary, without_rank_mark
from neox.launch.supervisor.outcome import Failure


def test_the_last_traceback_with_its_chain() -> None:
    old = ["Traceback (most recent call last):", '  File "a"', "OldError: logged and survived", "went on"]
    first = ["Traceback (most recent call last):", '  File "b"', "KeyError: 'x'", ""]
    chain = ["During handling of the above exception, another exception occurred:", ""]
    last = ["Traceback (most recent call last):", '  File "c"', "ValueError: y"]
    assert failure_text([*old, *first, *chain, *last]) == [*first, *chain, *last]
    assert failure_text([*old, *last]) == last
    assert failure_text([str(number) for number in range(50)]) == [str(number) for number in range(30, 50)]
    fatal = ["Fatal Python error: Segmentation fault", "", "Current thread"]
    assert failure_text([*last, *fatal]) == fatal
    refusal = ["error: the data are wrong", "and so are the keys"]
    assert failure_text([*last, "INFO: a step", *refusal]) == refusal
    assert failure_text(["error: retried", *map(str, range(50))]) == [str(number) for number in range(30, 50)]


def test_a_traceback_as_torch_distributed_prints_it() -> None:
    lines = ["Traceback (most recent call last):", '  File "a"', "KeyError: 'x'", ""]
    lines += ["The above exception was the direct cause of the following exception:", "", *lines[:2], "ValueError: y"]
    marked = [f"[rank11]: {line}" if line else line for line in lines]
    assert failure_text(["INFO: a step", *marked]) == marked
    assert begins_failure(marked[0])
    assert not begins_failure("[rank 3] error: a warning")
    assert without_rank_mark(marked[-1]) == "ValueError: y"


def test_consequences_of_another_death() -> None:
    line = "RuntimeError: [gloo/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:43"
    assert is_secondary([line, "the last line"])
    assert not is_secondary(["ValueError: Connection of the layers"])
    assert not is_secondary([])


WATCHDOG = """\
[rank1]:[E1125 10:00:00.000 ProcessGroupNCCL.cpp:2093] [PG ID 0 PG GUID 0(default_pg) Rank 1] {reason}
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] {reason}
Exception raised from checkForNCCLErrorsInternal at ProcessGroupNCCL.cpp:2363 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7f in libc10.so)
frame #1: c10d::ProcessGroupNCCL::WorkNCCL::checkAndSetException() + 0x7c (0x7f in libtorch_cuda.so)
frame #2: c10d::ProcessGroupNCCL::Watchdog::runLoop() + 0x1f3 (0x7f in libtorch_cuda.so)
frame #3: c10d::ProcessGroupNCCL::Watchdog::run() + 0xd5 (0x7f in libtorch_cuda.so)
frame #4: <unknown function> + 0xdbbf4 (0x7f in libstdc++.so.6)
frame #5: <unknown function> + 0x94ac3 (0x7f in libc.so.6)
frame #6: clone + 0x44 (0x7f in libc.so.6)

Fatal Python error: Aborted

Thread 0x00007f0000000700 (most recent call first):
  File "threading.py", line 331 in wait
  File "threading.py", line 629 in wait

Current thread 0x00007f0000000800 (most recent call first):
  <no Python frame>"""


def test_an_abort_by_nccls_watchdog_is_one_failure_with_its_reason() -> None:
    lost = "NCCL error: remote process exited or there was a network error, NCCL version 2.27.7"
    text = failure_text(WATCHDOG.format(reason=lost).splitlines())
    assert text[0].startswith("terminate called")
    assert "<no Python frame>" in text[-1]
    assert is_secondary(text)
    assert lost in str(cpp_message(text))
    hang = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE) ran for 1860002 ms"
    assert not is_secondary(failure_text(WATCHDOG.format(reason=hang).splitlines()))
    illegal = "CUDA error: an illegal memory access was encountered"
    text = failure_text(WATCHDOG.format(reason=illegal).splitlines())
    assert not is_secondary(text)
    assert illegal in Failure(1, -6, text="\n".join(text) + "\n").message
    without_abort = [line for line in text if "Fatal" not in line and "Thread" not in line]
    assert cpp_message(without_abort) == cpp_message(text)
    assert cpp_message(["Fatal Python error: Aborted", "Current thread"]) is None


def test_aborts_of_two_threads_are_one_failure() -> None:
    lines = ["terminate called after throwing an instance of 'c10::DistBackendError'", "terminate called recursively"]
    lines += ["  what():  NCCL error: remote process exited", "Fatal Python error: Aborted", "", "Current thread"]
    assert failure_text(["INFO: a step", *lines]) == lines
    assert is_secondary(lines)
