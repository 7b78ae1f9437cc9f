"""The head process's pulse: its end and its silence are noticed, a pause is not its end."""

from __future__ import annotations

import os
import threading
import time

from neox.launch.pulse import Pulse, follow_pulse


def test_silence_after_the_first_beat_and_the_end_of_the_input() -> None:
    read, write = os.pipe()
    lost = threading.Event()
    thread = follow_pulse(read, lost.set, seconds=0.2)
    assert not lost.wait(0.4)  # a local head process sends no beats
    with Pulse([write]):
        time.sleep(0.1)
    os.write(write, b"p")
    assert not lost.wait(0.4)  # suspended
    os.write(write, b".")
    assert lost.wait(1)
    thread.join()
    lost.clear()
    thread = follow_pulse(read, lost.set)
    os.close(write)
    assert lost.wait(1)
    thread.join()
    os.close(read)


def test_a_host_that_is_gone_does_not_end_the_pulse() -> None:
    read, write = os.pipe()
    os.close(read)
    with Pulse([write]):
        pass
    os.close(write)
