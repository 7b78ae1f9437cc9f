"""Hosts of a start with spare hosts or elastic training: replacements, or fewer hosts with the same batch size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from neox.config import Decided, Decision, NeoXConfig
from neox.errors import ConfigError, LaunchError, UnreachableHostError
from neox.launch.hosts.doctor import HostReport, format_reports
from neox.launch.hosts.placement import Placement
from neox.launch.hosts.replacement import ChosenHosts, choose_fit_hosts, most_usable_hosts
from neox.launch.spec import Host
from neox.plan.batches.batch import MICRO, STEPS, TOTAL, BatchPlan, solve_batch
from neox.plan.batches.batch_schedule import RAMP_KEY, ramp_sizes
from neox.plan.ranks.topology import model_ranks_of
from neox.problems import CODE, Problem


@dataclass(frozen=True)
class FitHosts:
    """Hosts of a start, and what follows from them.

    Attributes:
        placement: Hosts and slots, and the spare hosts that can replace hosts later.
        decided: Settings for them: with fewer ranks than planned, the batch size of all ranks.
        reports: Report of each host that takes part.
        left_out: Names of the hosts that do not take part, with the reason and the consequence.
    """

    placement: Placement
    decided: Decided
    reports: list[HostReport]
    left_out: Mapping[str, str]


def fit_hosts(
    config: NeoXConfig,
    placement: Placement,
    reports: Sequence[HostReport],
    unfit: Mapping[str, str],
    suspects: Mapping[str, str],
) -> FitHosts:
    """Choose the hosts of a start.

    Args:
        config: The configuration.
        placement: Hosts and spare hosts of the hostfile.
        reports: Reports of all of them.
        unfit: Names of further unusable hosts, with the reasons.
        suspects: Names of hosts that are left out only if other hosts can replace them, with the reasons.

    Raises:
        UnreachableHostError: Too few hosts can take part, because some do not answer or are not ready yet.
        LaunchError: Too few hosts can take part for other reasons.
        ConfigError: The batch size is invalid.
    """
    reasons = {report.host.name: report.problems[0] for report in reports if report.problems}
    reasons.update(unfit)
    reasons_with_suspects = {**suspects, **reasons}
    chosen = choose_fit_hosts(placement.hosts, placement.spares, reasons_with_suspects)
    if chosen.missing:  # too few hosts without the suspects
        chosen = choose_fit_hosts(placement.hosts, placement.spares, reasons)
    else:
        reasons = reasons_with_suspects
    hosts = chosen.hosts
    decisions: list[Decision] = []
    if chosen.missing:
        hosts = _fewer_hosts(config, placement, chosen, reports, reasons)
        decisions += _keep_batch(config, placement, chosen)
    if hosts[0].name != placement.hosts[0].name and config.given("master_addr"):
        reason = f"master_addr is the address of {placement.hosts[0].name}, and {hosts[0].name} is the first host now"
        decisions.append(Decision("master_addr", None, reason, config.source("master_addr")))
    left_out = {}
    for host in placement.hosts:
        if host not in hosts:
            left_out[host.name] = _explanation(host, chosen, reasons)
    report_of = {report.host.name: report for report in reports}
    own_reports = [replace(report_of[host.name], host=host) for host in hosts]
    spares = tuple(spare for spare in placement.spares if _is_free(spare, hosts, reasons))
    return FitHosts(replace(placement, hosts=hosts, spares=spares), Decided(tuple(decisions)), own_reports, left_out)


def _is_free(spare: Host, hosts: Sequence[Host], reasons: Mapping[str, str]) -> bool:
    """Return whether a spare host could take part and is not used."""
    return spare.name not in reasons and spare.name not in [host.name for host in hosts]


def _explanation(host: Host, chosen: ChosenHosts, reasons: Mapping[str, str]) -> str:
    """Return the reason why a host does not take part, and the consequence."""
    reason = reasons.get(host.name, "the batch cannot be divided over this many ranks")
    spare = chosen.replaced.get(host.name)
    if spare is None:
        return f"{reason}; no spare host is left, so the run continues with fewer ranks"
    return f"{reason}; the spare host {spare} replaces it"


def _fewer_hosts(
    config: NeoXConfig,
    placement: Placement,
    chosen: ChosenHosts,
    reports: Sequence[HostReport],
    reasons: Mapping[str, str],
) -> tuple[Host, ...]:
    """Return the hosts of a smaller run.

    Raises:
        UnreachableHostError: The run may not shrink, or the batch size cannot be kept, and some hosts do not answer or
            are not ready yet.
        LaunchError: The same without such hosts.
    """
    names = ", ".join(host.name for host in chosen.missing)
    reported = {report.host.name for report in reports if report.problems}
    why = []  # what the table of reports does not say
    for host in chosen.missing:
        if host.name in reasons and host.name not in reported:
            why.append(f"{host.name}: {reasons[host.name]}")
    if not config.healing.elastic:
        advice = "add spare hosts to the hostfile (`host slots=N spare`), or allow fewer ranks with `elastic: true`"
        lines = ["nothing was started:", format_reports(reports), *why, f"{names}: no spare host left; {advice}"]
        raise too_few_hosts("\n".join(lines), reports)
    batch = _batch_of_all(config, placement)
    batch_size = batch.train_batch_size
    micro_batch_size = batch.train_micro_batch_size_per_gpu
    hosts = most_usable_hosts(
        chosen.hosts,
        model_ranks_of(config),
        micro_batch_size,
        (batch_size, *ramp_sizes(config)),
        copies_at_once=_copies_at_once(config),
    )
    if not hosts:
        samples = f"the batch of {batch_size} samples"
        if config.given(RAMP_KEY):
            samples += f" with {config.describe_setting(RAMP_KEY)}"
        message = (
            f"{names} cannot take part, and {samples}, in micro batches of {micro_batch_size}, cannot be divided over "
            "the ranks of any number of the other hosts: repair a host, or add a spare host"
        )
        raise too_few_hosts("\n".join(["nothing was started:", format_reports(reports), *why, message]), reports)
    return hosts


def too_few_hosts(message: str, reports: Sequence[HostReport]) -> LaunchError:
    """Return the error for a start that lacks hosts.

    It is an UnreachableHostError if a host does not answer, or if one that may be coming back has a problem.

    Args:
        message: The error message.
        reports: Reports of all hosts.
    """
    silent = [report.host.name for report in reports if report.unreachable]
    causes = [f"no answer from {', '.join(silent)}"] if silent else []
    unready = []
    for report in reports:
        if report.awaited and report.problems and not report.unreachable:
            unready.append(report.host.name)
            causes.append(f"{report.host.name} is not ready ({report.problems[0]})")
    if causes:
        return UnreachableHostError(message, (*silent, *unready), "; ".join(causes))
    return LaunchError(message)


def _keep_batch(config: NeoXConfig, placement: Placement, chosen: ChosenHosts) -> list[Decision]:
    """Return the batch size of all hosts in the hostfile, which a run on fewer hosts keeps."""
    batch = _batch_of_all(config, placement)
    reason = f"without {', '.join(host.name for host in chosen.missing)}, a step has the samples of all hosts"
    sizes = {
        TOTAL: batch.train_batch_size,
        MICRO: batch.train_micro_batch_size_per_gpu,
        STEPS: None,
        "global_num_gpus": None,
    }
    return [Decision(key, value, reason, CODE) for key, value in sizes.items()]


def _batch_of_all(config: NeoXConfig, placement: Placement) -> BatchPlan:
    """Return the batch on all hosts. Raises ConfigError if it is invalid."""
    problems: list[Problem] = []
    batch = solve_batch(config, placement.world_size // model_ranks_of(config), problems)
    if batch is None:
        raise ConfigError(problems)
    return batch


def _copies_at_once(config: NeoXConfig) -> int:
    """Return the number of copies of the network that share experts, or a secondary partition of the weights."""
    context_ranks = config.parallelism.context_parallel_size
    weights = config.deepspeed.zero_optimization.zero_hpz_partition_size or 1
    data_ranks = math.lcm(config.parallelism.expert_model_parallel_size, weights, context_ranks)
    return data_ranks // context_ranks
