"""Planning of a run: the configuration of a command line, and its plan with all problems in one list."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from neox.config import NOTHING, Decided, LoadedConfig, NeoXConfig, apply_decisions, for_inference, load_config
from neox.decisions.checkpoint import DecidedStart, choose_checkpoint
from neox.decisions.start import decide_start
from neox.errors import ConfigError, LaunchError
from neox.launch.hosts.placement import ChosenBy, Placement, choose_hosts
from neox.launch.hosts.remote import path_state
from neox.launch.hosts.rendezvous import master_port_problem
from neox.plan import (
    Capabilities,
    Device,
    RunPlan,
    check_config,
    check_run,
    decides_run,
    resolve,
    saved_precision,
    with_trained_model,
)
from neox.plan.devices.unsupported import unsupported_by_device
from neox.plan.network.export_form import export_note
from neox.plan.report.data_lines import notes_on_data
from neox.plan.run_identity import FoundRun
from neox.plan.run_plan import UNKNOWN_AMOUNTS
from neox.plan.run_start import ChosenStart
from neox.preflight.chat_checks import (
    chat_template_notes,
    chat_template_problems,
    label_notes,
    packed_conversation_notes,
)
from neox.preflight.checkpoint_checks import checkpoint_problems, finetune_notes, layer_problems
from neox.preflight.checks import (
    backend_refusal,
    device_of_ranks,
    family_of_ranks,
    login_problems,
    memory_problems,
    missing_device,
    missing_packages,
    nvme_paths,
    nvme_problems,
    task_problems,
)
from neox.preflight.command_line import INFERENCE, overrides
from neox.preflight.data_amounts import ReadAmounts, read_amounts
from neox.preflight.data_checks import data_problems
from neox.preflight.remote_checkpoints import planned_load
from neox.preflight.remote_data import planned_data
from neox.preflight.resume_notes import batch_note, changes_since
from neox.preflight.score_checks import save_best_notes, save_best_problems
from neox.preflight.tokenizer_checks import (
    Vocabulary,
    other_tokenizer_problems,
    prompt_problems,
    read_vocabulary,
)
from neox.problems import Missing, Problem, in_file_order


@dataclass(frozen=True)
class Job:
    """What ranks are to run, and where.

    Attributes:
        script: Path of the script. What a script of the user's own needs is not known.
        placement: Hosts and slots.
        dry_run: Whether nothing will be started.
        environment: Variables of the ranks, in which logins are looked for; None not to look.
        damaged: Checkpoints that earlier starts have found damaged.
        start_left_to_ranks: Whether rank 0 decides about the checkpoint, because the launcher's decision did not hold.
    """

    script: Path
    placement: Placement
    dry_run: bool
    environment: Mapping[str, str] | None = None
    damaged: tuple[Path, ...] = ()
    start_left_to_ranks: bool = False

    @property
    def trains(self) -> bool:
        """Whether the script trains the model."""
        return _trains(self.script)

    @property
    def runs_model(self) -> bool:
        """Whether the script trains or runs the model."""
        return self.trains or self.script.stem in INFERENCE


@dataclass(frozen=True)
class PlannedJob:
    """The plan of a job.

    Attributes:
        plan: The plan.
        device: What a rank runs on.
        notes: Messages for people: those of the plan, and on what was found on disk.
        problems: What a launch refuses. What a dry run makes of each is in `DryRun.show`.
        too_large: Those of them that the plan itself shows: the job needs more memory than the device has.
        elsewhere: Text that the plan is for a device that this machine lacks; None if it has it or is not asked.
    """

    plan: RunPlan
    device: Device
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]
    too_large: tuple[Problem, ...] = ()
    elsewhere: str | None = None

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory for the job."""
        return not self.too_large

    @property
    def assumes_size(self) -> bool:
        """Whether nobody gave or measured the memory with which the job is compared, or what its hosts lack of it."""
        if self.device.assumed:
            return True
        hosts_lack = any("host_memory_gib" in problem.keys for problem in self.too_large)
        return hosts_lack and self.device.main_memory is not None and self.device.main_memory.assumed

    @property
    def refused(self) -> tuple[Problem, ...]:
        """What a launch from any machine refuses: problems that are neither missing here nor a matter of memory."""
        problems = []
        for problem in self.problems:
            if not isinstance(problem, Missing) and problem not in self.too_large:
                problems.append(problem)
        return tuple(problems)


def read_config(arguments: argparse.Namespace) -> NeoXConfig:
    """Load the configuration with the command line's overrides.

    A script that only runs a model runs on any number of ranks, so what ties the configuration to the ranks of training
    is left out.

    Args:
        arguments: The command line.

    Raises:
        ConfigError: A key is unknown or has a wrong value; with every problem of keys, rules, grid and batch.
    """
    loaded = load_config(arguments.conf_file, conf_dir=arguments.conf_dir, overrides=overrides(arguments))
    if Path(arguments.script).stem in INFERENCE:
        loaded = replace(loaded, config=for_inference(with_trained_model(loaded.config)))
    if not loaded.problems:
        return loaded.config
    if arguments.script == "doctor":
        raise ConfigError(loaded.problems)
    raise ConfigError(_all_problems(loaded, arguments))


def _trains(script: str | Path) -> bool:
    return Path(script).stem == "train"


def _all_problems(loaded: LoadedConfig, arguments: argparse.Namespace) -> list[Problem]:
    """Return the problems of keys that cannot be read with those of all others, so that one run shows everything."""
    if not decides_run(loaded):
        return check_config(loaded)
    try:
        placement, _ = choose_hosts(loaded.config, arguments)
    except LaunchError as error:
        return [*loaded.problems, Problem((), str(error))]
    except ConfigError as error:
        return in_file_order([*loaded.problems, *loaded.certain(error.problems)])
    return check_run(loaded, placement.world_size, read_vocabulary(loaded.config).size)


def plan_job(
    config: NeoXConfig,
    job: Job,
    capabilities: Capabilities,
    *,
    hosts: Decided = NOTHING,
    data: Decided = NOTHING,
    is_sound: bool,
) -> PlannedJob:
    """Decide what a start decides, resolve the configuration, and check what the job needs.

    For a dry run nothing that addresses name is fetched.

    Args:
        config: The configuration.
        job: What ranks are to run, and where.
        capabilities: What the hosts multiply natively.
        hosts: Decisions about hosts (`fit_hosts`).
        data: Decisions about remote token files, which have been fetched. A dry run makes them itself.
        is_sound: Whether the configuration breaks no rule (`static_problems`). Otherwise nothing is decided.

    Raises:
        ConfigError: The configuration cannot be resolved; for a launch with what else is missing.
    """
    notes: list[str] = []
    problems: list[Problem] = []
    decided = NOTHING
    own: DecidedStart | None = None
    start: ChosenStart | None = None
    if is_sound and job.dry_run:
        load = planned_load(config, trains=job.trains)
        config = load.config
        data = planned_data(config)
        data = replace(data, problems=tuple(Missing.of(data.problems)))
        notes += load.notes
        problems += Missing.of(load.problems)
    if is_sound:
        if job.trains:
            own = choose_checkpoint(config, job.damaged)
            # Disks of the hosts may have what this machine does not see.
            unseen = own.start.checkpoint is None and not job.placement.is_local
            start = replace(own.start, left_to_ranks=unseen or job.start_left_to_ranks)
            if unseen and not job.dry_run:
                own = replace(own, problems=_not_missing(own.problems))
        if config.model.precision == "auto":
            saved = saved_precision(config) if own is None else own.precision
            capabilities = replace(capabilities, saved=saved)
            problems += _precision_problems(config, job, capabilities)
        decided = decide_start(config, job.placement.world_size, capabilities, hosts=hosts, data=data, own=own)
        config = apply_decisions(config, decided.decisions)
        problems += decided.problems
        if own is not None and own.loaded is not None and own.start.own_directory:
            notes += changes_since(own.loaded, config)

    vocabulary = read_vocabulary(config)
    problems += [
        *_vocabulary_problems(vocabulary, job),
        *_rank_problems(config, job.placement),
        *_needs_of_script(config, job, vocabulary),
    ]
    found = ReadAmounts(UNKNOWN_AMOUNTS)
    if job.trains:
        found = read_amounts(config)
        notes += found.notes
    family = family_of_ranks(config, job.placement, capabilities.family, dry_run=job.dry_run)
    if (refusal := backend_refusal(config.runner.distributed_backend, family)) is not None:
        problems.append(config.problem("distributed_backend", refusal))
    try:
        plan = resolve(
            config,
            job.placement.world_size,
            vocabulary.size,
            capabilities,
            decisions=decided.decisions,
            device_family=family,
            amounts=found.amounts,
            start=start,
        )
    except ConfigError as error:
        if job.dry_run:
            raise
        raise ConfigError([*error.problems, *problems]) from None
    device = device_of_ranks(plan, job.placement, training=job.trains, dry_run=job.dry_run)
    if job.trains and (job.dry_run or job.placement.is_local or capabilities.family is not None):
        problems += unsupported_by_device(plan, device.family)
    too_large: list[Problem] = []
    if job.runs_model:
        too_large = memory_problems(plan, device, training=job.trains)
        if all(isinstance(problem, Missing) for problem in problems):
            problems += layer_problems(
                plan,
                training=job.trains,
                damaged=job.damaged,
                knows_vocabulary=vocabulary.tokenizer is not None,
            )
    problems += [*too_large, *Missing.of(_disk_problems(plan, job))]
    if job.trains:
        notes += _notes_of_training(plan, None if own is None else own.loaded)
        problems += [*found.problems, *save_best_problems(plan)]
        try:
            notes += notes_on_data(plan)
        except ConfigError as error:
            problems += error.problems
    elsewhere = None
    if job.dry_run and job.runs_model:
        elsewhere = missing_device(plan, device, job.placement, training=job.trains)
    return PlannedJob(plan, device, (*decided.notes, *plan.notes, *notes), tuple(problems), tuple(too_large), elsewhere)


def _not_missing(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Return problems without those of what is only missing here."""
    return tuple(problem for problem in problems if not isinstance(problem, Missing))


def _notes_of_training(plan: RunPlan, loaded: FoundRun | None) -> list[str]:
    """Return notes on what becomes of a training: its start, the chat template it carries, its export.

    Args:
        plan: The plan.
        loaded: The run of the checkpoint that it resumes, if any.
    """
    notes = [*finetune_notes(plan.config), *chat_template_notes(plan.config), *label_notes(plan.config)]
    notes += packed_conversation_notes(plan.config)
    if (changed := batch_note(plan, loaded)) is not None:
        notes.append(changed)
    notes += save_best_notes(plan)
    note = export_note(plan.config, plan.architecture)
    if note is not None:
        notes.append(note)
    return notes


def _vocabulary_problems(vocabulary: Vocabulary, job: Job) -> list[Problem]:
    if not job.dry_run:
        return list(vocabulary.problems)
    assumed = f"a vocabulary of {vocabulary.size:,} ids is assumed"
    return [replace(problem, message=f"{problem.message}; {assumed}") for problem in vocabulary.problems]


def _rank_problems(config: NeoXConfig, placement: Placement) -> list[Problem]:
    """Return the problems of the number of ranks and of their rendezvous."""
    problems: list[Problem] = []
    asked = config.runner.global_num_gpus
    if asked not in (None, placement.world_size):
        ranks = f"{placement.world_size} ranks ({placement.why})"
        message = f"`global_num_gpus: {asked}`, but there are {ranks}; remove it"
        found = config.problem_about(message, "global_num_gpus")
        is_guess = placement.assumed or placement.chosen_by is ChosenBy.ASSUMPTION
        problems += Missing.of([found]) if is_guess else [found]
    if port_problem := master_port_problem(placement, config.runner):
        problems += Missing.of([config.problem_about(port_problem, "master_port")])  # it may be free at the start
    return problems


def _needs_of_script(config: NeoXConfig, job: Job, vocabulary: Vocabulary) -> list[Problem]:
    """Return what the script needs and does not find: data, checkpoint, tasks, packages and logins."""
    problems: list[Problem] = []
    if job.trains:
        problems += data_problems(config, vocabulary.tokenizer, dry_run=job.dry_run)
        problems += chat_template_problems(config, vocabulary.tokenizer)
        problems += prompt_problems(config, vocabulary.tokenizer)
    if job.runs_model:
        problems += checkpoint_problems(config, training=job.trains, damaged=job.damaged)
        problems += other_tokenizer_problems(config, vocabulary.tokenizer, training=job.trains)
        problems += task_problems(config, job.script.stem, vocabulary.tokenizer)
    if job.trains or job.script.stem == "evaluate":
        problems += Missing.of(missing_packages(config))
    if job.trains and job.environment is not None and job.placement.is_local:
        problems += Missing.of(login_problems(config, job.environment))
    return problems


def _precision_problems(config: NeoXConfig, job: Job, capabilities: Capabilities) -> list[Problem]:
    """Return the problem that nothing decides `precision: auto`."""
    if job.dry_run or capabilities.bf16 is not None or capabilities.saved is not None:
        return []
    return [config.problem("precision", "needs hosts that can be asked; set it to bf16 or fp32")]


def _disk_problems(plan: RunPlan, job: Job) -> list[Problem]:
    """Return what does not fit on disks for offloading."""
    if not job.trains or not job.placement.is_local:
        return []
    states = {path: path_state(Path(path)) for path in nvme_paths(plan.config)}
    return nvme_problems(plan, range(job.placement.world_size), "this machine", states)
