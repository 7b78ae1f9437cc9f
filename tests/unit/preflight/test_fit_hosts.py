"""Hosts of a start with spare hosts, and the batch of a smaller run."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from neox.config import NeoXConfig, apply_decisions
from neox.errors import ConfigError, LaunchError, UnreachableHostError
from neox.launch import Host
from neox.launch.hosts.doctor import HostReport
from neox.launch.hosts.placement import ChosenBy, Placement
from neox.plan.batches.batch import solve_batch
from neox.plan.batches.batch_schedule import ramp_problems
from neox.preflight.fit_hosts import FitHosts, fit_hosts
from neox.preflight.spare_hosts import can_change_hosts, with_spares

HOSTS = tuple(Host(name, (0, 1)) for name in "abc")
SPARE = Host("s", (0, 1), spare=True)


def placed(*spares: Host) -> Placement:
    return Placement(HOSTS, ChosenBy.HOSTFILE, 0, "hostfile of -H", spares)


def config(**keys: object) -> NeoXConfig:
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    return NeoXConfig.from_flat({**sizes, "master_addr": "a", **keys})


def fit(
    keys: NeoXConfig,
    placement: Placement,
    broken: Collection[str] = (),
    unfit: Collection[str] = (),
    suspects: Collection[str] = (),
    unreachable: Collection[str] = (),
    awaited: Collection[str] = (),
) -> FitHosts:
    reports = []
    for host in with_spares(placement).hosts:
        is_unreachable = host.name in unreachable
        problems = ["a problem"] if host.name in broken or is_unreachable else []
        is_awaited = host.name in awaited
        reports.append(HostReport(host, problems=problems, unreachable=is_unreachable, awaited=is_awaited))
    return fit_hosts(keys, placement, reports, dict.fromkeys(unfit, "unfit"), dict.fromkeys(suspects, "suspect"))


def names(found: FitHosts) -> str:
    return "".join(host.name for host in found.placement.hosts)


def test_a_spare_host_steps_in_with_its_report() -> None:
    found = fit(config(), placed(SPARE), broken="a")
    assert names(found) == "sbc"
    assert [report.host.name for report in found.reports] == ["s", "b", "c"]
    assert list(found.left_out) == ["a"]
    assert [(each.key, each.value) for each in found.decided.decisions] == [("master_addr", None)]
    assert fit(config(), placed(SPARE)).decided.decisions == ()


def test_a_smaller_run_keeps_the_batch_if_it_is_elastic() -> None:
    with pytest.raises(LaunchError, match="elastic"):
        fit(config(), placed(), broken="b")
    found = fit(config(elastic=True), placed(), broken="b")
    assert names(found) == "ac"
    decided = apply_decisions(config(elastic=True), found.decided.decisions)
    assert decided.deepspeed.train_batch_size == 24  # 6 ranks x 1 x 4
    assert decided.deepspeed.gradient_accumulation_steps is None
    assert names(fit(config(elastic=True), placed(), unfit="bc")) == "a"


@pytest.mark.parametrize(
    "keys",
    [
        {"moe_num_experts": 4, "expert_model_parallel_size": 4},
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}},
        {"context_parallel_size": 2, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}},
    ],
    ids=["experts", "second copy", "second copy over context ranks"],
)
def test_a_smaller_run_has_data_ranks_that_divide(keys: dict[str, object]) -> None:
    hosts = tuple(Host(name, (0, 1)) for name in "abcd")
    keys = {**keys, "elastic": True, "gradient_accumulation_steps": 3}
    found = fit(config(**keys), Placement(hosts, ChosenBy.HOSTFILE, 0, "hostfile of -H"), broken="b")
    assert names(found) == "ac"  # six ranks could share the batch, but not divide what four divide


def test_a_smaller_run_divides_the_sizes_of_a_ramp_up() -> None:
    hosts = tuple(Host(name, (0,)) for name in "abcd")
    placement = Placement(hosts, ChosenBy.HOSTFILE, 0, "hostfile of -H")
    keys = {"elastic": True, "gradient_accumulation_steps": 3}
    assert names(fit(config(**keys), placement, broken="d")) == "abc"
    found = fit(config(**keys, rampup_batch_size=[4, 4, 96]), placement, broken="d")
    assert names(found) == "ab"  # three ranks could share the batch of 12, but not one of 4
    decided = apply_decisions(config(**keys, rampup_batch_size=[4, 4, 96]), found.decided.decisions)
    batch = solve_batch(decided, 2, [])
    assert batch is not None
    assert list(ramp_problems(decided, batch)) == []


def test_a_batch_that_cannot_be_kept_ends_the_run() -> None:
    keys = config(elastic=True, pipe_parallel_size=6)
    with pytest.raises(LaunchError, match="batch") as refused:
        fit(keys, placed(), unfit="b")
    assert "b: unfit" in str(refused.value)


def test_hosts_that_may_come_back_are_named() -> None:
    stages = config(elastic=True, pipe_parallel_size=6)
    for keys in (config(), stages):
        with pytest.raises(UnreachableHostError) as caught:
            fit(keys, placed(), unreachable="b", broken="c")
        assert caught.value.hosts == ("b",)
        with pytest.raises(LaunchError) as refused:
            fit(keys, placed(), broken="bc")
        assert not isinstance(refused.value, UnreachableHostError)
    assert names(fit(config(), placed(SPARE), unreachable="b")) == "asc"


def test_a_host_that_is_back_without_its_devices_is_still_waited_for() -> None:
    with pytest.raises(UnreachableHostError) as caught:
        fit(config(), placed(), broken="b", awaited="bc", unreachable="a")
    assert caught.value.hosts == ("a", "b")
    assert caught.value.cause == "no answer from a; b is not ready (a problem)"
    assert names(fit(config(), placed(), awaited="bc")) == "abc"


def test_suspects_stay_if_nothing_can_replace_them() -> None:
    assert names(fit(config(), placed(), suspects="b")) == "abc"
    assert names(fit(config(), placed(SPARE), suspects="b")) == "asc"


def test_who_can_change_hosts() -> None:
    assert not can_change_hosts(config(), placed())
    assert can_change_hosts(config(), placed(SPARE))
    assert can_change_hosts(config(elastic=True), placed())
    with pytest.raises(ConfigError, match="spare"):
        can_change_hosts(config(launcher="slurm"), placed(SPARE))
