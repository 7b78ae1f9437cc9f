"""Launching: hosts, commands and supervision that turn a plan into processes.

Only what ranks and agents need is imported here, without torch and without the configuration. Import the other modules
by name.
"""

from neox.launch.agent.agent_files import (
    Cause,
    FailureReport,
    acknowledge_stop,
    busy_saving,
    host_name,
    report_failure,
    report_progress,
)
from neox.launch.spec import Host, LaunchSpec
from neox.launch.status.event_log import record_run_event

__all__ = [
    "Cause",
    "FailureReport",
    "Host",
    "LaunchSpec",
    "acknowledge_stop",
    "busy_saving",
    "host_name",
    "record_run_event",
    "report_failure",
    "report_progress",
]
