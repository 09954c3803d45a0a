// The head of the chat page: which model answers, and how its swarm is.

import * as api from "/static/api.js";
import { showChoice } from "/static/models.js";
import * as store from "/static/store.js";

const byId = (id) => document.getElementById(id);

let models = [];
let changed = () => {};
export let model = null; // the one that is asked; null before the gateway has named any

// `listener()` is told when another model is chosen.
export function onModel(listener) {
  changed = listener;
}

export async function health() {
  const pill = byId("health");
  try {
    const swarm = await api.swarm(model);
    byId("waits").textContent = swarm.waiting ? `Waiting for the swarm: ${swarm.waiting}.` : "";
    if (swarm.waiting) {
      pill.dataset.state = "bad";
      byId("health-text").textContent = "waiting";
      return;
    }
    if (!model) await begin();
    const usable = swarm.servers.filter((server) => server.state === "online").length;
    const missing = swarm.missing_blocks.length;
    pill.dataset.state = missing ? "bad" : "good";
    byId("health-text").textContent = missing
      ? `${missing} of ${swarm.num_blocks} blocks missing`
      : `${usable} server${usable === 1 ? "" : "s"}`;
  } catch {
    pill.dataset.state = "bad";
    byId("health-text").textContent = "no gateway";
  }
}

export async function begin() {
  try {
    models = (await api.models()).filter((one) => !one.embeddings && !one.hears); // those chat with nobody
    choose(store.settings.model);
  } catch (error) {
    byId("model").textContent = "no model";
    if (error.status === 503) return; // the gateway waits: `health` tries again
    if (error.status === 401) byId("settings").showModal();
  }
}

// Of several models the one that was used last, if it is still there.
function choose(id) {
  model = models.find((one) => one.id === id) ?? models[0];
  byId("model").textContent = model.id;
  document.title = `${model.id} · swarmllm`;
  byId("health").href = models.length > 1 ? `/swarm?model=${encodeURIComponent(model.id)}` : "/swarm";
  showChoice(models.map((one) => one.id), model.id);
  changed();
  health();
}

byId("models").addEventListener("change", () => {
  store.settings.model = byId("models").value;
  store.saveSettings();
  choose(store.settings.model);
});
byId("settings").addEventListener("close", () => {
  if (!model) begin();
});
setInterval(() => document.hidden || health(), 5000);
