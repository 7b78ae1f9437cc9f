"use strict";
let running = null;

async function go() {
  const given = settings();
  const shown = Object.entries(given).map(([name, value]) => `${name} ${value}`).join(", ");
  const prompt = $("prompt").value;
  running = new AbortController();
  $("go").disabled = true; $("stop").disabled = false; $("status").textContent = "";
  $("settings").textContent = shown;
  const before = document.createElement("b");
  before.textContent = prompt;
  $("out").replaceChildren(before, document.createTextNode(""));
  const started = performance.now();
  try {
    for await (const event of answer("/v1/completions", {prompt, ...given}, running.signal)) {
      for (const choice of event.choices) {
        $("out").lastChild.data += choice.text;
        if (choice.finish_reason) $("status").textContent = `ended: ${choice.finish_reason}`;
      }
      if (event.usage) $("settings").textContent = `${speed(event.usage, started)}; ${shown}`;
    }
  } catch (error) {
    $("status").textContent = error.name === "AbortError" ? "stopped" : error.message;
  }
  $("go").disabled = false; $("stop").disabled = true;
}

$("form").addEventListener("submit", event => { event.preventDefault(); go(); });
$("stop").addEventListener("click", () => running.abort());
