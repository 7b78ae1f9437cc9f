"use strict";
// The status of a run.
const COLOURS = ["#2459a8", "#c2571a", "#2e7d4f", "#8e3b8a"];

// Round numbers between two, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low || 1) / count;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough);
  const found = [];
  for (let number = Math.ceil(low / step); number * step <= high; number++) found.push(number * step);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return found.map((value) => [value, value.toFixed(digits)]);
}

function element(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function draw(curves, interruptions, rollbacks) {
  const picture = byId("picture");
  const names = Object.keys(curves).filter((name) => curves[name].length);
  const points = names.flatMap((name) => curves[name]);
  const width = picture.clientWidth || 800; // its units are pixels, so that letters keep their size
  const columns = width < 600 ? 1 : 2;
  const height = 325 + 18 * Math.ceil(names.length / columns);
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  if (!points.length) {
    return picture.replaceChildren(element("text", { x: width / 2, y: 160, "text-anchor": "middle" }, "no steps yet"));
  }
  const xs = points.map((point) => point[0]);
  const ys = points.map((point) => point[1]);
  const [left, right, top, bottom] = [55, width - 20, 15, 290];
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const x = (value) => left + (value - x0) / (x1 - x0 || 1) * (right - left);
  const y = (value) => bottom - (value - y0) / (y1 - y0 || 1) * (bottom - top);
  const parts = [
    element("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
    element("line", { class: "axis", x1: left, x2: left, y1: top, y2: bottom }),
  ];
  for (const [value, label] of ticks(y0, y1, 6)) {
    parts.push(element("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) }));
    parts.push(element("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, label));
  }
  for (const [value, label] of ticks(x0, x1, width < 600 ? 4 : 8)) {
    parts.push(element("line", { class: "grid", x1: x(value), x2: x(value), y1: top, y2: bottom }));
    parts.push(element("text", { x: x(value), y: bottom + 16, "text-anchor": "middle" }, label));
  }
  for (const event of interruptions) {
    if (event.step === null || event.step < x0) continue;
    parts.push(element("line", { class: "interruption", x1: x(event.step), x2: x(event.step), y1: top, y2: bottom }));
  }
  for (const step of rollbacks) {
    if (step < x0) continue;
    parts.push(element("line", { class: "rollback", x1: x(step), x2: x(step), y1: top, y2: bottom }));
  }
  names.forEach((name, number) => {
    const colour = COLOURS[number % COLOURS.length];
    const path = curves[name].map((point) => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`).join(" ");
    parts.push(element("polyline", { class: "curve", points: path, stroke: colour }));
    const [lastX, lastY] = curves[name][curves[name].length - 1];
    parts.push(element("circle", { cx: x(lastX), cy: y(lastY), r: 2.5, fill: colour }));
    const place = { x: left + (number % columns) * (width / 2), y: bottom + 38 + 18 * Math.floor(number / columns) };
    parts.push(element("text", { ...place, fill: colour }, `— ${name}`));
  });
  picture.replaceChildren(...parts);
}

function present(status) {
  const time = (event) => new Date(event.time * 1000).toLocaleString();
  document.title = `${status.state}: ${status.directory}`;
  show("state", status.state);
  show("directory", status.directory);
  show("reason", status.reason);
  show("step", status.step === null ? "none yet" : `${status.step}${status.steps ? ` of ${status.steps}` : ""}`);
  show("loss", typeof status.loss === "number" ? status.loss.toPrecision(5) : status.loss);
  const speeds = [];
  if (status.seconds_per_step !== null) speeds.push(`${status.seconds_per_step.toPrecision(3)} s a step`);
  if (status.tokens_per_second !== null) speeds.push(`${Math.round(status.tokens_per_second)} tokens/s`);
  show("speed", speeds.join(", "));
  show("left", status.seconds_left == null ? "" : duration(status.seconds_left));
  show("silent", status.silent_seconds === null ? "none yet" : `${duration(status.silent_seconds)} ago`);
  draw(status.curves, status.interruptions, status.rollbacks);
  rows("hosts", status.hosts.map((host) => [
    host.name,
    host.silent_seconds === null ? "nothing yet" : `${duration(host.silent_seconds)} ago`,
    host.slower ? `${host.slower.toFixed(2)} times as slow as the others` : "",
    Object.entries(host.pids).map(([rank, pid]) => `${rank}: ${pid}`).join(", "),
  ]));
  show("starts", `${status.interruptions.length} in ${status.starts} ${status.starts === 1 ? "start" : "starts"}`);
  rows("interruptions", status.interruptions.map((event) =>
    [time(event), event.step, event.cause ?? event.kind, [event.decision, event.reason].filter(Boolean).join(": "),
      event.steps_again]));
  rows("events", status.other_events.map((event) =>
    [time(event), event.event, [event.host, event.cause, event.decision, event.reason].filter(Boolean).join("; ")]));
  show("updated", `updated ${new Date(status.time * 1000).toLocaleTimeString()}`);
}

update();
