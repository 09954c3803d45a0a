// The gateway's API, as the chat page uses it.

import { settings } from "/static/store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"];

function headers() {
  const found = { "Content-Type": "application/json", "X-Swarm-Trace": "1" };
  if (settings.api_key) found.Authorization = `Bearer ${settings.api_key}`;
  return found;
}

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function failure(response) {
  let message = `the gateway answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not from the gateway itself
  }
  return new ApiError(message, response.status);
}

export async function models() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) throw await failure(response);
  return (await response.json()).data;
}

// A gateway opens a model when it is asked for it.
export async function model(id) {
  const response = await fetch(`/v1/models/${id.split("/").map(encodeURIComponent).join("/")}`, { headers: headers() });
  if (!response.ok) throw await failure(response);
  return response.json();
}

export async function swarm(model) {
  const response = await fetch(model ? `/api/swarm?model=${encodeURIComponent(model.id)}` : "/api/swarm");
  if (!response.ok) throw await failure(response);
  return response.json();
}

// The number of tokens in `messages`, and the most that the model takes.
export async function count(model, messages, system) {
  const told = system ? [{ role: "system", content: system }, ...messages] : messages;
  const body = model.chat ? { messages: told } : { prompt: told.map((message) => message.content).join("\n") };
  const response = await fetch("/tokenize", { method: "POST", headers: headers(), body: JSON.stringify({ model: model.id, ...body }) });
  if (!response.ok) throw await failure(response);
  return response.json();
}

// Yields the chunks of an answer.
// `goOn`: continue the last message, which is the model's own. `system`: the system prompt.
export async function* answer(model, messages, signal, { system, goOn }) {
  const asked = { model: model.id, stream: true, swarm_events: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) {
    if (settings[name] !== undefined && settings[name] !== "") asked[name] = Number(settings[name]);
  }
  const told = system ? [{ role: "system", content: system }, ...messages] : messages;
  let path = "/v1/chat/completions";
  if (model.chat) {
    asked.messages = told;
    if (goOn) Object.assign(asked, { continue_final_message: true, add_generation_prompt: false });
  } else { // a model without a chat template continues the text
    path = "/v1/completions";
    asked.prompt = told.map((message) => message.content).join("\n");
    asked.max_tokens ??= 256;
  }
  const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(asked), signal });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError("the connection to the gateway broke");
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a sign of life
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message);
      yield chunk;
    }
  }
}
