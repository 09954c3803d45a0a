// The chat page: conversations on the left, the one that is open in the middle, the message box below.

import * as api from "/static/api.js";
import { drawList, exportOne } from "/static/conversations.js";
import { endOfId, noticeOf, renderMessage } from "/static/message.js";
import { morph } from "/static/morph.js";
import { showChoice } from "/static/models.js";
import { settingsOf, showSettings } from "/static/settings.js";
import * as store from "/static/store.js";

const byId = (id) => document.getElementById(id);
const text = byId("text");
const scroll = byId("scroll");
const IDEAS = ["Tell me a story about a fox.", "Where does the rain come from?", "What is a good name for a boat?"];

let models = [];
let model = null;
let open = null; // the conversation that is shown
let editing = null; // the place of the message that is said anew, in a branch of its own
let answering = null; // {conversation, message, abort} while an answer comes

// ---------------------------------------------------------------- conversations

function show(conversation) {
  open = conversation;
  editing = null;
  const hash = conversation ? conversation.id : "";
  if (location.hash.slice(1) !== hash) location.hash = hash;
  byId("export").hidden = !conversation?.messages.length;
  showContext();
  drawAll();
  closeSide();
  scroll.scrollTop = scroll.scrollHeight;
}

function drawAll() {
  byId("messages").replaceChildren(...(open?.messages ?? []).map((message) => element(message)));
  byId("welcome").hidden = Boolean(open?.messages.length);
  list();
}

function list() {
  if (open && location.hash.slice(1) !== open.id) location.hash = open.id; // it may have become one of its own
  drawList(open, {
    onOpen: show,
    onDelete: (one) => {
      if (answering?.conversation === one) stop();
      store.remove(one.id);
      if (open === one) show(null);
      else list();
      if (open) keep(open); // if there was no room before, there may be now
      text.focus();
    },
  });
}

function keep(conversation) {
  byId("full").textContent = store.save(conversation)
    ? ""
    : "This browser has no room left for this conversation, which will be lost with this page: delete others.";
}

// What other tabs have done.
store.onChange((conversation, what) => {
  if (what === "settings") {
    showSettings();
    return;
  }
  if (what === "deleted" && answering?.conversation === conversation) stop();
  if (what === "deleted" && open === conversation) show(null);
  else if (open === conversation && answering?.conversation !== conversation) drawAll();
  else list();
});

// ---------------------------------------------------------------- messages

function element(message) {
  const busy = answering?.message === message;
  const isLast = open?.messages.at(-1) === message;
  const mayAct = !busy && !answering;
  const isOwn = isLast && mayAct && message.role === "assistant";
  const isBroken = message.content && model?.chat && (message.finish === "length" || message.notices?.some(({ cut }) => cut));
  return renderMessage(message, {
    busy,
    onRegenerate: isOwn ? regenerate : null,
    onContinue: isOwn && isBroken ? goOn : null,
    onEdit: message.role === "user" && mayAct ? () => edit(message) : null,
  });
}

function redraw(message) {
  if (!open?.messages.includes(message)) return; // another conversation is shown
  const index = open.messages.indexOf(message);
  const atEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
  const old = byId("messages").children[index];
  const now = element(message);
  if (old && old.className === now.className && answering?.message === message) grow(old, now);
  else if (old) old.replaceWith(now);
  else byId("messages").append(now);
  if (atEnd) scroll.scrollTop = scroll.scrollHeight;
}

// What is there stays, so that a selection does; what can be clicked or told is new.
function grow(old, now) {
  const [oldBody, body] = [old, now].map((one) => one.querySelector(".body"));
  morph(oldBody, body);
  const thoughts = old.querySelector(".thoughts");
  if (thoughts) morph(thoughts, now.querySelector(".thoughts"));
  else if (now.querySelector(".thoughts")) old.prepend(now.querySelector(".thoughts"));
  for (const rest of [...old.querySelectorAll(":scope > .notices, :scope > .foot")]) rest.remove();
  old.append(...now.querySelectorAll(":scope > .notices, :scope > .foot"));
}

// Another text in place of that message: what came after it stays, in the conversation that it was.
function edit(message) {
  editing = open.messages.indexOf(message);
  text.value = message.content;
  fit();
  text.focus();
}

function branch() {
  const conversation = store.create();
  conversation.title = open.title;
  conversation.system = open.system;
  conversation.messages = structuredClone(open.messages.slice(0, editing));
  return conversation;
}

async function send(said) {
  if (answering || !model) return;
  const conversation = editing !== null && open ? branch() : open ?? store.create();
  conversation.system ??= store.settings.system ?? "";
  conversation.title ||= said.trim().split("\n")[0].slice(0, 80);
  conversation.messages.push({ role: "user", content: said });
  show(conversation);
  await reply(conversation);
}

async function regenerate() {
  if (answering || open?.messages.at(-1)?.role !== "assistant") return;
  open.messages.pop();
  show(open);
  await reply(open);
}

// From where a broken answer ends.
async function goOn() {
  if (answering || open?.messages.at(-1)?.role !== "assistant") return;
  const message = open.messages.pop();
  Object.assign(message, { notices: [], finish: null });
  await reply(open, message);
}

async function reply(conversation, broken) {
  const asked = [...conversation.messages, ...(broken ? [broken] : [])].map(({ role, content }) => ({ role, content }));
  const message = broken ?? { role: "assistant", content: "", notices: [], route: [], tokens: 0 };
  const options = { system: conversation.system ?? store.settings.system, goOn: Boolean(broken) };
  const abort = new AbortController();
  answering = { conversation, message, abort };
  store.writing.add(conversation);
  keep(conversation);
  conversation.messages.push(message);
  busy(true);
  let drawn = false;
  let began = 0;
  let saved = performance.now();
  const draw = () => {
    drawn = false;
    if (answering?.message === message) redraw(message);
  };
  drawAll(); // what can be clicked on other messages waits until this one is written
  scroll.scrollTop = scroll.scrollHeight;
  try {
    for await (const chunk of api.answer(model, asked, abort.signal, options)) {
      if (chunk.swarm) take(message, chunk.swarm);
      if (chunk.usage) {
        message.tokens = chunk.usage.completion_tokens;
        conversation.used = chunk.usage.total_tokens;
      }
      const choice = chunk.choices[0];
      const piece = choice?.delta ? choice.delta.content : choice?.text;
      const thought = choice?.delta?.reasoning_content;
      if (thought) message.reasoning = (message.reasoning ?? "") + thought;
      if (piece || thought) {
        if (piece) message.content += message.content ? piece : piece.trimStart();
        message.tokens += 1;
        began ||= performance.now();
        const seconds = (performance.now() - began) / 1000;
        if (message.tokens > 1 && seconds > 0.2) message.rate = (message.tokens - 1) / seconds;
      }
      if (choice?.finish_reason) message.finish = choice.finish_reason;
      if (!drawn) {
        drawn = true;
        if (document.hidden) setTimeout(draw, 250);
        else requestAnimationFrame(draw);
      }
      if (performance.now() - saved > 1000) {
        keep(conversation);
        saved = performance.now();
      }
    }
  } catch (error) {
    if (abort.signal.aborted) {
      message.notices.push({ kind: "", text: "Stopped.", cut: true });
    } else {
      const reason = error instanceof api.ApiError ? error.message : "the gateway can’t be reached";
      message.notices.push({ kind: "bad", cut: true, text: `No more came: ${reason}` });
      if (error.status === 401) byId("settings").showModal();
    }
  } finally {
    redraw(message);
    answering = null;
    busy(false);
    keep(conversation);
    store.writing.delete(conversation);
    if (open === conversation) drawAll();
    showContext();
    list();
    health();
  }
}

// The gateway tells of the route, of servers that fail and of those that take over.
function take(message, event) {
  if (event.event === "trace") {
    const trace = event.traces[0];
    if (trace.tokens_per_s) message.rate = trace.tokens_per_s;
    message.firstTokenMs = trace.first_token_ms;
    return;
  }
  const notice = noticeOf(event, message.route);
  if (event.route) {
    message.route = event.route;
    message.notices = message.notices.filter((one) => !one.queue); // it has its turn
  }
  if (event.replaced_by) message.fresh = event.replaced_by.map(endOfId);
  if (!notice) return;
  if (event.event === "queue") notice.queue = true;
  // A repair may need several tries, of which the last word is enough.
  while (message.notices.at(-1)?.searching) message.notices.pop();
  message.notices.push(notice);
}

function showContext() {
  const left = model?.max_model_len - open?.used;
  byId("context").textContent = left >= 0 ? `${left} of ${model.max_model_len} tokens left. ` : "";
}

function stop() {
  answering?.abort.abort();
}

function busy(now) {
  byId("stop").hidden = !now;
  byId("send").hidden = now;
}

// ---------------------------------------------------------------- around it

async function health() {
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

async function begin() {
  try {
    models = await api.models();
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
  health();
}

function openSide() {
  byId("side").classList.add("open");
  byId("veil").hidden = false;
  byId("open-side").setAttribute("aria-expanded", "true");
  byId("new").focus();
}

function closeSide() {
  byId("side").classList.remove("open");
  byId("veil").hidden = true;
  byId("open-side").setAttribute("aria-expanded", "false");
}

function fit() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight}px`;
}

byId("models").addEventListener("change", () => {
  store.settings.model = byId("models").value;
  store.saveSettings();
  choose(store.settings.model);
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const said = text.value.trim();
  if (!said || answering || !model) return;
  text.value = "";
  fit();
  send(said);
});
text.addEventListener("input", fit);
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || byId("settings").open) return;
  if (answering) stop();
  else closeSide();
});
byId("stop").addEventListener("click", () => {
  stop();
  text.focus();
});
byId("new").addEventListener("click", () => {
  show(null);
  text.focus();
});
byId("open-side").addEventListener("click", openSide);
byId("close-side").addEventListener("click", closeSide);
byId("veil").addEventListener("click", closeSide);
settingsOf(() => open, keep);
byId("export").addEventListener("click", () => open && exportOne(open));
addEventListener("hashchange", () => {
  const named = store.find(location.hash.slice(1)) ?? null;
  if (named !== open) show(named);
});
byId("settings").addEventListener("close", () => {
  if (!model) begin();
});
byId("ideas").replaceChildren(
  ...IDEAS.map((idea) => {
    const button = document.createElement("button");
    button.className = "button";
    button.textContent = idea;
    button.addEventListener("click", () => send(idea));
    return button;
  }),
);
addEventListener("pagehide", () => answering && store.save(answering.conversation));
setInterval(() => document.hidden || health(), 5000);

showSettings();
show(store.find(location.hash.slice(1)) ?? null);
begin();
health();
