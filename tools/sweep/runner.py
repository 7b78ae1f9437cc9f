"""Runner of the runs of a sweep: one at a time on each place, until none is left or a signal asks to end.

    pending --start--> running --status 0 and all steps--> done
       ^                  |------ loss not finite -------> diverged
       |                  |------ its host is lost ------> pending again, at the front: it resumes elsewhere
       |                  |------ another failure -------> once more on another host, if there is one; then failed
       +---- the host answers again: it is used again

A place whose last runs have both failed gets no more runs while others work: one broken host must not use up the queue.
"""

from __future__ import annotations

import subprocess
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence

from neox.errors import LaunchError
from neox.launch.child_runs import ChildRuns, last_line
from neox.launch.hosts.hostfile import is_this_machine
from neox.launch.processes import exit_status
from neox.launch.run_lock import training_in
from neox.launch.status.run_status import duration
from neox.launch.supervisor.outcome import EndKind
from tools.sweep.places import Place
from tools.sweep.planned_run import PlannedRun
from tools.sweep.record import Launches
from tools.sweep.run_files import OUTPUT_FILE, State

_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_ANSWER = 20.0
_SECONDS_TO_NEXT_QUESTION = 60.0
"""Time after which a host that did not answer is asked again."""
_SECONDS_OF_WAITING = 3600.0
"""Time for which the runner waits if no host is left, as long as `deepy.py` waits for its hosts."""
_FAILURES_OF_BAD_PLACE = 2
_HOSTS_OF_A_FAILURE = 2
"""Hosts on which a run that fails is tried in one call."""


class _PlaceState:
    """A place while the runner works.

        spare --activate--> free --begin--> trains a run --end--> free
                             |  ^                           its run has failed (fail), or not (succeed)
                            lose find
                             v  |
                             lost

    Args:
        place: The place.

    Attributes:
        place: The place.
        is_active: Whether it may get runs. A spare host may once another one is lost.
        run: The run that is trained there; None if it is free.
        started: Time of its start, in seconds since the epoch.
        lost_since: Time at which its host was last found lost; None if it can be used.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.is_active = not place.spare
        self.run: PlannedRun | None = None
        self.started = 0.0
        self.lost_since: float | None = None
        self._process: subprocess.Popen[bytes] | None = None  # the launcher of the run
        self._failures = 0  # of runs one after another

    @property
    def is_bad(self) -> bool:
        """Whether the last runs on it have failed."""
        return self._failures >= _FAILURES_OF_BAD_PLACE

    @property
    def is_usable(self) -> bool:
        """Whether it may get runs, its host answers, and its last runs have not failed."""
        return self.is_active and self.lost_since is None and not self.is_bad

    @property
    def has_ended(self) -> bool:
        """Whether the launcher of its run has ended."""
        return self._process is not None and self._process.poll() is not None

    def activate(self) -> None:
        """Use a spare host."""
        self.is_active = True

    def begin(self, run: PlannedRun, started: float, process: subprocess.Popen[bytes]) -> None:
        """Take a run, which a launcher trains that was started at a time in seconds."""
        self.run = run
        self.started = started
        self._process = process

    def end(self) -> tuple[PlannedRun, int]:
        """Give back the run, whose launcher has ended, and the exit status. The place is free again."""
        assert self.run is not None
        assert self._process is not None
        run = self.run
        status = exit_status(self._process.returncode)
        self.run = None
        self._process = None
        return run, status

    def succeed(self) -> None:
        """Count a run that has not failed."""
        self._failures = 0

    def fail(self) -> None:
        """Count a run that has failed."""
        self._failures += 1

    def lose(self) -> None:
        """Take the place out of use: its host does not answer now."""
        self.lost_since = time.time()

    def find(self) -> None:
        """Use the place again: its host answers."""
        self.lost_since = None


class SweepRunner:
    """Trains runs on places.

    Args:
        runs: The runs to train, in their order.
        places: Where they are trained.
        redo: Names of those that are trained from the beginning.
        launches: What is known of earlier launches of the runs; what is learned of new ones is added.
        environment: Variables of the commands that ask hosts.
        say: Function that shows a line.
        after_start: Function that is called whenever a run has been started.
        after_run: Function that is called whenever a run has ended.
    """

    def __init__(
        self,
        runs: Sequence[PlannedRun],
        places: Sequence[Place],
        *,
        redo: Collection[str] = (),
        launches: Launches,
        environment: Mapping[str, str],
        say: Callable[[str], None],
        after_start: Callable[[], None],
        after_run: Callable[[], None],
    ) -> None:
        self._launches = launches
        self._environment = environment
        self._say = say
        self._after_start = after_start
        self._after_run = after_run
        self._pending = deque(runs)
        self._redo = {*redo}
        self._tried_on: dict[str, set[str]] = defaultdict(set)
        self._states = [_PlaceState(place) for place in places]
        self._waiting_since: float | None = None

    def train(self) -> int | None:
        """Train the runs until each has ended.

        Returns:
            Number of the signal that ended this early; None if there was none.

        Raises:
            LaunchError: A command cannot be started, or no host has answered for an hour.
        """
        with ChildRuns() as children:
            while True:
                for state in self._states:
                    if state.has_ended:
                        self._take_end(state, stopping=children.stopped_by is not None)
                if children.stopped_by is None:
                    for state in self._states:
                        self._start_on(state, children)
                is_running = any(state.run is not None for state in self._states)
                if not is_running and (children.stopped_by is not None or not self._pending):
                    return children.stopped_by
                self._check_waiting()
                time.sleep(_SECONDS_BETWEEN_LOOKS)

    # -- starts

    def _usable_hosts(self) -> set[str]:
        """Return the names of the hosts that may get runs: they answer, and their last runs have not failed."""
        usable = set()
        for state in self._states:
            if state.is_usable:
                usable.add(state.place.name)
        return usable

    def _start_on(self, state: _PlaceState, children: ChildRuns) -> None:
        """Start the next run on a place, if the place is free and its host answers."""
        if state.run is not None or not state.is_active or not self._pending:
            return
        if state.is_bad and self._usable_hosts():
            return
        run = self._next_run(state.place.name)
        if run is None or not self._answers(state):
            return
        name = run.name
        command = [*run.command, *state.place.flags]
        if name in self._redo:
            command.append("--overwrite")
            self._redo.remove(name)  # a start after a failure resumes
            self._launches.seconds.pop(name, None)
        run.directory.mkdir(parents=True, exist_ok=True)
        run.record_settings()
        started = time.time()
        try:
            with (run.directory / OUTPUT_FILE).open("ab") as file:
                process = children.start(command, file.fileno())
        except OSError as error:
            raise LaunchError(f"{name} cannot be started: {error}") from error
        state.begin(run, started, process)
        self._pending.remove(run)
        self._launches.hosts[name] = state.place.name
        self._tried_on[name].add(state.place.name)
        where = f" on {state.place.name}" if state.place.name else ""
        self._say(f"{name}: started{where}")
        self._launches.training.append(name)
        self._after_start()

    def _next_run(self, host: str) -> PlannedRun | None:
        """Return the next run for a host; None if each is for another host, or an earlier process still saves it."""
        for run in self._pending:
            tried = self._tried_on[run.name]
            if host in tried and self._usable_hosts() - tried:
                continue
            if training_in(run.directory) is None:
                return run
        return None

    def _answers(self, state: _PlaceState) -> bool:
        """Return whether the host of a place answers. One that was lost is asked again after a minute."""
        if state.lost_since is not None and time.time() - state.lost_since < _SECONDS_TO_NEXT_QUESTION:
            return False
        if not self._is_reachable(state.place):
            if state.lost_since is None:
                self._say(f"{state.place.name} does not answer; it is asked again every minute")
            self._lose(state)
            return False
        if state.lost_since is not None:
            self._say(f"{state.place.name} answers again")
        state.find()
        return True

    def _is_reachable(self, place: Place) -> bool:
        command = place.asking_command(self._environment)
        if command is None:
            return True
        try:
            done = subprocess.run(
                command,
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_SECONDS_TO_ANSWER,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0

    def _lose(self, lost: _PlaceState) -> None:
        """Take all places of a host out of use, and use a spare host instead."""
        was_lost = lost.lost_since is not None
        for state in self._states:
            if state.place.name == lost.place.name:
                state.lose()
        if was_lost:
            return
        spare: str | None = None
        for state in self._states:
            if not state.is_active and spare in (None, state.place.name):
                spare = state.place.name
                state.activate()
        if spare is not None:
            self._say(f"{spare}, a spare host, is used instead")

    def _check_waiting(self) -> None:
        """Raise LaunchError if no host has answered for an hour."""
        if any(state.is_active and state.lost_since is None for state in self._states):
            self._waiting_since = None
            return
        if self._waiting_since is None:
            self._waiting_since = time.time()
        if time.time() - self._waiting_since > _SECONDS_OF_WAITING:
            raise LaunchError("no host has answered for an hour; the same command goes on once they do")

    # -- ends

    def _take_end(self, state: _PlaceState, *, stopping: bool) -> None:
        """Handle the end of the run on a place: it is over, or will be tried again."""
        run, status = state.end()
        name = run.name
        self._launches.training.remove(name)
        found = run.state()
        seconds = time.time() - state.started
        self._launches.seconds[name] = self._launches.seconds.get(name, 0.0) + seconds
        if status == 0 and found is State.DONE:
            state.succeed()
            self._launches.causes.pop(name, None)
            self._say(f"{name}: done in {duration(seconds)}")
        elif found is State.DIVERGED and run.last_end(state.started) is not None:
            state.succeed()
            self._launches.causes[name] = self._cause(run, state, status)
            self._say(f"{name}: diverged ({self._launches.causes[name]})")
        elif stopping:
            self._say(f"{name}: ended; it resumes from its last checkpoint")
        elif self._is_host_lost(state, run):
            self._say(f"{state.place.name} is lost; {name} is trained again elsewhere, or once the host is back")
            self._lose(state)
            self._tried_on[name].clear()
            self._pending.appendleft(run)
        else:
            state.fail()
            self._launches.causes[name] = self._cause(run, state, status)
            if len(self._tried_on[name]) < _HOSTS_OF_A_FAILURE and self._usable_hosts() - self._tried_on[name]:
                self._say(
                    f"{name}: failed on {state.place.name} ({self._launches.causes[name]}); it is tried on another host"
                )
                self._pending.append(run)
            else:
                self._say(f"{name}: failed ({self._launches.causes[name]}); see {run.directory / OUTPUT_FILE}")
        self._after_run()

    def _is_host_lost(self, state: _PlaceState, run: PlannedRun) -> bool:
        """Return whether a run has ended because its host is gone."""
        place = state.place
        if place.host is None or is_this_machine(place.host.name):
            return False
        end = run.last_end(state.started)
        if end is not None and end.get("kind") == EndKind.HOST.value:
            return True
        return not self._is_reachable(place)

    def _cause(self, run: PlannedRun, state: _PlaceState, status: int) -> str:
        """Return why a run has failed, in a line."""
        if status == 0 and not run.metrics.exists():
            return f"{run.metrics} is not visible on this host; the directory of a sweep must be one that hosts share"
        end = run.last_end(state.started)
        if end is not None and end.get("cause"):
            return str(end["cause"])
        if status == 0:
            return "it ended before all its steps and its last evaluation; the same command goes on"
        text = (run.directory / OUTPUT_FILE).read_text(encoding="utf-8", errors="replace")
        return last_line(text, status)
