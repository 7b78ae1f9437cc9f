"use strict";
// What the pages share: each has a function `present(status)`, which is called again and again.
const EVERY = 2000;
const byId = (id) => document.getElementById(id);

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "unknown";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 24 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function show(id, text) {
  byId(id).textContent = text ?? "";
  const pair = byId(id).closest("dl > div");
  if (pair) pair.hidden = !byId(id).textContent; // no name without a value
}

function rows(id, lines) {
  byId(id).closest(".wide").hidden = !lines.length; // no table without rows
  byId(id).replaceChildren(...lines.map((cells) => {
    const row = document.createElement("tr");
    for (const cell of cells) row.insertCell().textContent = cell ?? "";
    return row;
  }));
  const table = byId(id).closest("table");
  for (let column = 0; column < table.rows[0].cells.length; column++) {
    const isEmpty = lines.every((cells) => !String(cells[column] ?? "")); // no column without values
    for (const row of table.rows) row.cells[column].hidden = isEmpty;
  }
}

async function update() {
  try {
    const answer = await fetch("/status.json");
    const status = await answer.json();
    if (answer.ok) present(status); else show("updated", status.error);
  } catch (error) {
    show("updated", `no answer from the server: ${error.message}`);
  }
  setTimeout(update, EVERY);
}
