"""Launching: hosts, commands and supervision that turn a plan into processes.

Only what ranks and agents need is imported here, without torch and without the configuration. Import the other modules
by name.
"""

from neox.launch.agent_files import acknowledge_stop, busy_saving, report_progress
from neox.launch.spec import Host, LaunchSpec

__all__ = ["Host", "LaunchSpec", "acknowledge_stop", "busy_saving", "report_progress"]
