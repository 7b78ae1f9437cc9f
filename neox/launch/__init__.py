"""Launching: hosts, commands and supervision that turn a plan into processes.

From `deepy.py` to the first step, one row for each process:

    deepy.py                               neox.preflight.command      YAML -> NeoXConfig -> which command
      StartRun.start                       neox.preflight.start_run    hosts, RunPlan, checks; the loop of restarts
        launch(LaunchSpec)                 supervisor.launchers        which processes lead to the agents
          Supervisor.run                   supervisor.supervisor       follows the agents until the start is over
      |                               ^
      | pdsh/ssh, srun, mpirun or     | stdout: events, one JSON object per line (`events`)
      | a child process; argument:    |
      | the LaunchSpec in base64;     |
      | stdin: orders (`orders`)      |
      v                               |
    python -m neox.launch.agent.host_agent                             one for each host
      HostAgent -> StartOnHost         agent.host_agent                device variables, RANK; logs; one loop
      |                               ^
      | environment, arguments:       | stdout and stderr; exit status; files in a private directory: progress,
      | train.py --payload PLAN       | answer to a signal, failure report (`agent.agent_files`)
      v                               |
    python -m neox.launch.agent.bootstrap train.py --payload PLAN      one for each rank, in a session of its own
      train.py -> plan.decode_payload  derives the same RunPlan
               -> neox.train.pretrain  joins the process groups, builds the layers of its stage, trains

When something goes wrong:

    what happens                      who notices                          who decides, and what
    -------------------------------   ----------------------------------   ---------------------------------------------
    a rank ends with an error         its agent: `StartOnHost._take_end`   the agent kills its other ranks after 0.7 s;
                                                                           Supervisor ends all hosts after 1.5 s
    a rank gets SIGKILL               the same                             the same, but the agent waits 0.1 s
    ranks make no progress            the agent: `Silence`                 the agent, after stacks have been shown
    an agent dies                     kernel, `watchdog` (its ranks end);  Supervisor: the host is lost
                                      Supervisor: connection, heartbeats
    an agent is stuck                 Supervisor: heartbeats               Supervisor kills it over ssh
    the launcher or the network is    the agent: standard input,           the agent kills its ranks and exits
      gone                            unanswered packets (`lifeline`)
    a host will be preempted          the agent: `preemption`              Supervisor asks all ranks to save and end
    the chosen checkpoint is damaged  ranks: `agree_on_start`, before      `RestartPolicy`: start again from another one
      or no longer the newest           anything is changed
    Ctrl-C, SIGTERM                   Supervisor, or scheduler -> agent    ranks save; the agent kills late ones

    which failure came first          Supervisor -> `run_facts.conclude` -> RunEnd
    whether to start again            `neox.preflight.restart_policy`, on RunEnd
    which hosts take part then        `neox.preflight.restarts.HostJudgement`, `neox.preflight.fit_hosts`

Only what ranks and agents need is imported here, without torch and without the configuration. Import the other modules
by name.
"""

from neox.launch.agent.agent_files import (
    Cause,
    FailureReport,
    acknowledge_stop,
    busy_saving,
    has_launcher,
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
    "has_launcher",
    "host_name",
    "record_run_event",
    "report_failure",
    "report_progress",
]
