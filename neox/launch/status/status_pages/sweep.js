"use strict";
// The progress of a sweep or a ladder.
const number = (value) => (typeof value === "number" ? value.toPrecision(5) : value);
const steps = (step, all) => (step ? `${step}${all ? ` of ${all}` : ""}` : "");
const speed = (run) => (run?.tokens_per_second ? `${Math.round(run.tokens_per_second)} tokens/s` : "");
const left = (run) => (run?.seconds_left == null ? "" : duration(run.seconds_left));

function present(status) {
  document.title = `${status.state}: ${status.directory}`;
  show("state", status.state);
  show("directory", status.directory);
  const counts = Object.entries(status.counts).filter(([, count]) => count);
  show("counts", counts.map(([state, count]) => `${count} ${state}`).join(", "));
  show("left", status.seconds_left === null ? "" : `about ${duration(status.seconds_left)} (${status.left_basis})`);
  show("following", status.following ? `${status.following} more runs, not included` : "");
  const best = status.best;
  show("best", best ? `${best.run}: ${best.of} ${number(best.value)} at step ${best.step}` : "");
  rows("runs", status.runs.map((run) => [
    run.name,
    run.live ? run.live.state : run.state,
    steps(run.step, run.steps),
    number(run.live ? run.live.loss : run.train_loss),
    run.validation_loss === null ? "" : `${number(run.validation_loss)} at step ${run.validation_step}`,
    speed(run.live),
    left(run.live),
    run.host,
    run.cause,
  ]));
  rows("others", Object.entries(status.other_runs).map(([name, run]) =>
    [name, run.state, steps(run.step, run.steps), number(run.loss), speed(run), left(run)]));
  show("updated", `updated ${new Date(status.time * 1000).toLocaleTimeString()}`);
}

update();
