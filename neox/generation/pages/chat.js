"use strict";
// Questions and answers so far. A question whose answer failed is given back to be sent again.
let turns = [];
let running = null;

function show(role, text) {
  const message = document.createElement("div");
  message.className = role;
  message.textContent = text;
  $("log").append(message);
  return message;
}

async function send() {
  const question = $("question").value;
  if (running || !question.trim()) return;
  running = new AbortController();
  $("go").disabled = $("reset").disabled = true; $("stop").disabled = false;
  $("status").textContent = $("settings").textContent = $("question").value = "";
  const asked = show("user", question), said = show("assistant", "");
  const messages = [...turns, {role: "user", content: question}];
  const system = $("system").value;
  if (system.trim()) messages.unshift({role: "system", content: system});
  const started = performance.now();
  let failed = false;
  try {
    for await (const event of answer("/v1/chat/completions", {messages, ...settings()}, running.signal)) {
      for (const choice of event.choices) {
        said.textContent += choice.delta.content ?? "";
        if (choice.finish_reason === "length") $("status").textContent = "ended: length";
      }
      if (event.usage) $("settings").textContent = speed(event.usage, started);
    }
  } catch (error) {
    failed = error.name !== "AbortError";
    $("status").textContent = failed ? error.message : "stopped";
  }
  if (failed) {
    asked.remove(); said.remove();
    $("question").value = question;
  } else {
    turns.push({role: "user", content: question}, {role: "assistant", content: said.textContent});
  }
  running = null;
  $("go").disabled = $("reset").disabled = false; $("stop").disabled = true;
  $("question").focus();
}

$("form").addEventListener("submit", event => { event.preventDefault(); send(); });
$("question").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => running.abort());
$("reset").addEventListener("click", () => {
  turns = [];
  $("log").replaceChildren();
  $("status").textContent = $("settings").textContent = "";
});
described.then(model => {
  if (!model.chat) $("status").textContent = "This model has no chat template: --set chat_template=FILE gives it one.";
}).catch(() => {});
