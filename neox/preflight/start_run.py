"""Start of a run by `deepy.py`, and its restarts.

    choose hosts -> plan -> ask the hosts -> write the run directory -> agents start the ranks -> RunEnd
        ^                                                                                           |
        |   wait for the pause; resume from the newest checkpoint;                                  v
        +--------------------  leave out hosts that are not fit  <-- restart --  Restarts.decide -- stop --> exit status

Everything that can be known without the ranks is checked before they are started.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from neox.config import NOTHING, Decided
from neox.errors import ConfigError, DataError, LaunchError, UnreachableHostError, refusals
from neox.launch.hosts.doctor import HostChecks, HostReport, examine_hosts, format_reports
from neox.launch.hosts.machine import native_formats
from neox.launch.hosts.placement import Placement, choose_hosts, place_ranks
from neox.launch.launcher_choice import chosen_launcher
from neox.launch.run_lock import reserve
from neox.launch.spec import LaunchSpec
from neox.launch.status.run_status import overfitting_words
from neox.launch.supervisor.agent_processes import AgentProcesses
from neox.launch.supervisor.launchers import launch
from neox.launch.supervisor.outcome import EndKind, RunEnd
from neox.plan import Capabilities, RunPlan
from neox.preflight.checks import nvme_paths
from neox.preflight.command_line import find_script
from neox.preflight.data_checks import data_prefixes
from neox.preflight.fit_hosts import fit_hosts, too_few_hosts
from neox.preflight.host_checks import (
    capabilities_of,
    check_backend,
    check_compilers,
    check_memory,
    hosts_without_room,
)
from neox.preflight.job_command import JobCommand, print_to_stderr
from neox.preflight.next_steps import next_steps
from neox.preflight.planning import Job, PlannedJob, plan_job
from neox.preflight.remote_checkpoints import with_local_load
from neox.preflight.remote_data import fetch_data
from neox.preflight.restarts import Restarts
from neox.preflight.resume_notes import finished_note, unfinished_note
from neox.preflight.run_directory import claim_curves, make_tensorboard_directory, write_run_directory
from neox.preflight.spare_hosts import can_change_hosts, with_spares
from neox.storage import ids_file

_TOKENIZER_FILES = ("vocab_file", "merge_file")


@dataclass(frozen=True)
class PreparedStart:
    """A start whose plan and hosts are known.

    Attributes:
        job: Script of the ranks, and where they run.
        planned: Its plan.
        reports: Reports of the hosts, if they have been asked.
        left_out: Names of the hosts that do not take part, with what is done about each.
    """

    job: Job
    planned: PlannedJob
    reports: list[HostReport]
    left_out: Mapping[str, str] = field(default_factory=dict)


class StartRun(JobCommand):
    """The commands that ask hosts: one starts a run on them and follows it, the other (`doctor`) only checks them."""

    def start(self) -> int:
        """Check everything that can be known before ranks start, then start the run and follow it.

        A training that fails is started again up to `max_restarts` times.

        Returns:
            The exit status of the last start.
        """
        script = find_script(self.arguments.script)
        data = NOTHING
        if self.is_sound:
            self.config = with_local_load(self.config, trains=script.stem == "train")
            data = fetch_data(self.config)
        restarts = Restarts(self.config, script)
        with ExitStack() as locks, AgentProcesses() as agents:
            start = self._prepare(script, restarts, data)
            directory = reserve(self.run_directory(), self.save, script.name, locks)
            if start.job.trains:
                note = finished_note(start.planned.plan.config, directory)
                if note is not None:
                    print_to_stderr("note", [note])
                    self._print_next_steps(start.planned.plan)
                    return 0
                with refusals():
                    if start.job.placement.is_local:
                        make_tensorboard_directory(self.config)
                    note = claim_curves(directory, self.config)
                if note is not None:
                    print_to_stderr("note", [note])
            with restarts.recording_refusals(directory):
                end = self._launch(start, directory, restarts, agents)
            while True:
                decision = restarts.decide(end, directory)
                if not decision.restart:
                    break
                time.sleep(decision.pause)
                with restarts.recording_refusals(directory):
                    self.config = restarts.next_config()
                    try:
                        start = self._prepare(script, restarts, data)
                        end = self._launch(start, directory, restarts, agents)
                    except UnreachableHostError as error:  # it may be back after a pause
                        print(f"error: {error}", file=sys.stderr)
                        end = RunEnd(EndKind.NOT_STARTED, error.exit_code, error.cause, hosts=error.hosts)
            if start.job.trains:
                self._print_what_follows(start.planned.plan, end, directory)
            return end.status

    def doctor(self) -> int:
        """Check all hosts and print the table; return 1 if something is to be fixed."""
        placement = with_spares(place_ranks(self.runner, self.config.source("hostfile")))
        reports = self._examine_hosts(self.empty_spec(placement, Path()))
        print(format_reports(reports))
        if self.config.given("vocab_file"):
            files = ", ".join(map(self.config.describe_setting, self._tokenizer_keys()))
            print(f"tokenizer, whose files every host needs: {files}")
        return int(_have_problems(reports))

    # -- before a start: hosts and plan

    def _prepare(self, script: Path, restarts: Restarts, data: Decided) -> PreparedStart:
        """Plan a run, and check everything that can be known before its directory is used.

        Raises:
            ConfigError: The configuration is wrong.
            LaunchError: The run cannot be started on these hosts.
        """
        placement, warnings = choose_hosts(self.config, self.arguments)
        print_to_stderr("warning", warnings)
        restarts.can_move = can_change_hosts(self.config, placement)
        if restarts.can_move:
            return self._prepare_on_fit_hosts(placement, script, restarts, data)
        job = self._job(script, placement, restarts)
        over_ssh = chosen_launcher(placement.hosts, self.runner) == "pdsh" and not self.runner.no_ssh_check
        reports: list[HostReport] = []
        capabilities = Capabilities()
        if over_ssh and self.is_sound:
            reports = self._check_hosts(self.empty_spec(placement, job.script), restarts)
            capabilities = capabilities_of(reports)
        elif placement.is_local:
            capabilities = Capabilities.of_hosts([native_formats(environment=self.environment)])
        planned = plan_job(self.config, job, capabilities, data=data, is_sound=self.is_sound)
        self._refuse_problems(planned, placement)
        return PreparedStart(job, planned, reports)

    def _job(self, script: Path, placement: Placement, restarts: Restarts) -> Job:
        """Return what the next start is to run."""
        return Job(script, placement, False, self.environment, restarts.damaged, restarts.start_left_to_ranks)

    def _prepare_on_fit_hosts(
        self, placement: Placement, script: Path, restarts: Restarts, data: Decided
    ) -> PreparedStart:
        """Ask the hosts of a placement and its spare hosts, and plan a run on those that can take part.

        Raises:
            ConfigError: The configuration is wrong.
            LaunchError: Too few hosts can take part.
        """
        spec = self.empty_spec(with_spares(placement), script)
        if restarts.hosts.lost:
            with suppress(LaunchError):  # else they are asked once more, and waited for
                reports = self._examine_hosts(spec, restarts, lost=restarts.hosts.lost)
                return self._plan_on_fit_hosts(placement, script, restarts, data, reports)
        reports = self._examine_hosts(spec, restarts)
        return self._plan_on_fit_hosts(placement, script, restarts, data, reports)

    def _plan_on_fit_hosts(
        self, placement: Placement, script: Path, restarts: Restarts, data: Decided, reports: Sequence[HostReport]
    ) -> PreparedStart:
        """Plan a run on the hosts that can take part. Only the plan shows which hosts have too little memory."""
        unfit = dict(restarts.hosts.unfit)
        while True:
            fit = fit_hosts(self.config, placement, reports, unfit, restarts.hosts.suspects)
            job = self._job(script, fit.placement, restarts)
            planned = plan_job(
                self.config,
                job,
                capabilities_of(fit.reports),
                hosts=fit.decided,
                data=data,
                is_sound=self.is_sound,
            )
            self._refuse_problems(planned, fit.placement)
            without_room: Mapping[str, str] = {}
            if job.runs_model:
                without_room = hosts_without_room(planned.plan, fit.reports, training=job.trains)
            if not without_room:
                return PreparedStart(job, planned, fit.reports, fit.left_out)
            unfit |= without_room

    def _refuse_problems(self, planned: PlannedJob, placement: Placement) -> None:
        """Raise ConfigError or LaunchError if a planned job cannot be started on its hosts."""
        unable = self.launcher_problems(placement, self.environment["PATH"])
        if planned.problems:
            raise ConfigError([*planned.problems, *unable])
        if unable:
            raise LaunchError(unable[0])

    # -- a start

    def _launch(self, start: PreparedStart, directory: Path, restarts: Restarts, agents: AgentProcesses) -> RunEnd:
        """Check what the plan needs of its hosts, start the ranks, and follow them until the last has ended."""
        plan = start.planned.plan
        reports = start.reports
        spec = self.launch_spec(start.job, start.planned, directory)
        if start.job.runs_model:
            check_memory(plan, reports, training=start.job.trains)
            if reports or start.job.placement.is_local:
                check_backend(plan, reports, self.environment)
        if start.job.trains:
            check_compilers(plan, reports, self.environment)
        print_to_stderr("note", start.planned.notes)
        write_run_directory(directory, plan, start.planned.device, start.planned.notes, self.launch_commands(spec))
        restarts.record_start(spec, directory, start.left_out, plan.batch.train_batch_size, plan.start)
        return launch(spec, plan.config.runner, self.environment, self.forwarded, advice=restarts.advice, agents=agents)

    # -- checks of the hosts

    def _check_hosts(self, spec: LaunchSpec, restarts: Restarts) -> list[HostReport]:
        """Check every host and return the reports. Raises LaunchError for a host with a problem."""
        reports = self._examine_hosts(spec, restarts)
        if _have_problems(reports):
            raise too_few_hosts(f"nothing was started:\n{format_reports(reports)}", reports)
        return reports

    def _tokenizer_keys(self) -> Iterator[str]:
        """Yield the keys of the tokenizer's files that were given."""
        for key in _TOKENIZER_FILES:
            if self.config.given(key):
                yield key

    def _files_of_every_host(self) -> Iterator[str]:
        """Yield the absolute paths of the token files and the tokenizer's files, which every rank reads."""
        for prefix in data_prefixes(self.config):
            yield str(ids_file(prefix).absolute())
        if self.config.tokenizer.tokenizer_type == "TiktokenTokenizer":  # its vocab_file may be the name of an encoding
            return
        for key in self._tokenizer_keys():
            yield str(Path(self.config.value(key)).absolute())

    def _examine_hosts(
        self, spec: LaunchSpec, restarts: Restarts | None = None, *, lost: frozenset[str] = frozenset()
    ) -> list[HostReport]:
        """Check every host, with the paths of this configuration. Those that were lost are not waited for."""
        checks = HostChecks(
            save_paths=() if self.save is None else (str(self.save),),
            local_paths=nvme_paths(self.config),
            data_paths=tuple(self._files_of_every_host()),
            ssh_port=self.runner.ssh_port,
            seconds=self.runner.doctor_timeout,
            always_ssh=len(spec.hosts) > 1,
            links=restarts is None or restarts.hosts.doubts_links,
            lost=lost,
            awaited=frozenset() if restarts is None else restarts.hosts.awaited,
        )
        return examine_hosts(spec, checks, self.environment)

    # -- after the last start

    def _print_what_follows(self, plan: RunPlan, end: RunEnd, directory: Path) -> None:
        """Print that a run overfits, and how to continue it if it was asked to end, or the commands that use it."""
        with suppress(DataError):  # a script of the user's own, without metrics
            print_to_stderr("note", overfitting_words(directory))
        rest = unfinished_note(plan.config, directory)
        if rest is not None and (end.status == 0 or end.kind is EndKind.ASKED):
            print_to_stderr("note", [rest])
        elif end.status == 0:
            self._print_next_steps(plan)

    def _print_next_steps(self, plan: RunPlan) -> None:
        print(*next_steps(self.arguments, plan), sep="\n", file=sys.stderr)


def _have_problems(reports: Sequence[HostReport]) -> bool:
    return any(report.problems for report in reports)
