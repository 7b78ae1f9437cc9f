"use strict";
// What both pages need: elements by their names, the settings of a request, and the parts of a streamed answer.
const $ = id => document.getElementById(id);

function settings() {
  const given = {};
  for (const name of ["max_tokens", "temperature", "top_p", "top_k", "seed"])
    if ($(name).value !== "") given[name] = Number($(name).value);
  return given;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    rest += value;
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      const data = rest.slice(0, end).replace(/^data: /, "");
      rest = rest.slice(end + 2);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function* answer(path, request, signal) {
  const reply = await fetch(path, {
    method: "POST", signal,
    headers: {"Content-Type": "application/json"},
    body: JSON.stringify({...request, stream: true, stream_options: {include_usage: true}})});
  if (!reply.ok) throw new Error((await reply.json()).error.message);
  for await (const event of events(reply.body)) {
    if (event.error) throw new Error(event.error.message);
    yield event;
  }
}

function speed(usage, started) {
  const tokens = usage.completion_tokens, seconds = (performance.now() - started) / 1000;
  return `${tokens} tokens in ${seconds.toFixed(1)} s, ${(tokens / seconds).toFixed(1)} tokens/s`;
}

const described = fetch("/v1/models").then(reply => reply.json()).then(list => {
  const model = list.data[0];
  $("model").textContent = `${model.id}, ${model.context} tokens of context`;
  $("chat_link").hidden = !model.chat;
  return model;
});
described.catch(() => {});
