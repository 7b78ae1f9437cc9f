"""Sweeps: one configuration trained with several values of its keys, on one host or on several, and compared.

lr.yml                        sweep_file.read_sweep   configuration files, values -> Sweep
  Sweep -> PlannedRun         planned_run.plan_runs   every run is planned before the first one starts
    PlannedRun                runner.SweepRunner      one `deepy.py train.py` on each place, until none is left
      DIRECTORY/NAME          the run's own log_dir, with `save` in checkpoints/: a run that was killed resumes
        RunResult             results.read_results    state and losses, from the files of each run
          table.csv sweep.png results.write_results
          sweep.json          record.write_record     what only the runner knows: hosts, times, reasons of failures
            SweepProgress     progress.read_progress  how far it is, and the time that is left: tools/status.py
"""
