// The chat page: conversations on the left, the open one in the middle, the message box below.

import * as api from "/static/api.js";
import { asSaid, attached, onAttached, putAttached, showAttach, takeAttached, textOf } from "/static/attached.js";
import { drawList, exportOne } from "/static/conversations.js";
import { begin, health, model, onModel } from "/static/head.js";
import { receiver } from "/static/incoming.js";
import { isTooLong, measureSoon } from "/static/length.js";
import { renderMessage } from "/static/message.js";
import { morph } from "/static/morph.js";
import { isAtEnd, toEnd } from "/static/scrolling.js";
import { settingsOf, showSettings } from "/static/settings.js";
import * as store from "/static/store.js";
import { replaceFrom, showVersion } from "/static/versions.js";

const byId = (id) => document.getElementById(id);
const text = byId("text");
const IDEAS = ["Tell me a story about a fox.", "What is the capital of France?", "What sound does a frog make?"];

let open = null; // the open conversation
let editing = null; // index of the message that is edited
let answering = null; // {conversation, message, abort} while an answer comes
let early = false; // true: the text in the box was sent before the page knew the model, and goes as soon as it does

// ---------------------------------------------------------------- conversations

function show(conversation) {
  open = conversation;
  dontEdit();
  const hash = conversation ? conversation.id : "";
  if (location.hash.slice(1) !== hash) location.hash = hash;
  byId("export").hidden = !conversation?.messages.length;
  showContext();
  measureSoon(draft);
  drawAll();
  closeSide();
  toEnd();
}

function drawAll() {
  byId("messages").replaceChildren(...(open?.messages ?? []).map((message) => element(message)));
  byId("welcome").hidden = Boolean(open?.messages.length);
  list();
}

function list() {
  if (open && location.hash.slice(1) !== open.id) location.hash = open.id; // it may be a conversation of its own now
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

// Follow other tabs.
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
  const busy = Boolean(message.writing); // by this tab or another
  const isLast = open?.messages.at(-1) === message;
  const mayAct = !busy && !answering;
  const isOwn = isLast && mayAct && message.role === "assistant";
  const isBroken = message.content && model?.chat && (message.finish === "length" || message.notices?.some(({ cut }) => cut));
  return renderMessage(message, {
    busy,
    onRegenerate: isOwn && model ? regenerate : null, // no model is known yet
    onContinue: isOwn && isBroken ? goOn : null,
    onEdit: message.role === "user" && mayAct ? () => edit(message) : null,
    onVersion: mayAct ? (version, label) => turnTo(open.messages.indexOf(message), version, label) : null,
  });
}

function redraw(message) {
  if (!open?.messages.includes(message)) return; // another conversation is open
  const index = open.messages.indexOf(message);
  const atEnd = isAtEnd();
  const old = byId("messages").children[index];
  const now = element(message);
  if (old && old.className === now.className && answering?.message === message) grow(old, now);
  else if (old) old.replaceWith(now);
  else byId("messages").append(now);
  if (atEnd) toEnd();
}

// Keep existing elements, so that a selection survives; renew buttons and notes.
function grow(old, now) {
  const [oldBody, body] = [old, now].map((one) => one.querySelector(".body"));
  morph(oldBody, body);
  const thoughts = old.querySelector(".thoughts");
  if (thoughts) morph(thoughts, now.querySelector(".thoughts"));
  else if (now.querySelector(".thoughts")) old.prepend(now.querySelector(".thoughts"));
  for (const rest of [...old.querySelectorAll(":scope > .notices, :scope > .foot")]) rest.remove();
  old.append(...now.querySelectorAll(":scope > .notices, :scope > .foot"));
}

// Replace the text of a message; the messages from there on stay as another version.
function edit(message) {
  editing = open.messages.indexOf(message);
  text.value = message.content;
  putAttached(message);
  byId("edits").hidden = false;
  fit();
  text.focus();
}

function dontEdit() {
  editing = null;
  byId("edits").hidden = true;
}

// Show another version of a message, with all messages after it.
function turnTo(index, version, label) {
  withTitle(open, () => showVersion(open.messages, index, version));
  keep(open);
  drawAll();
  showContext();
  const buttons = [...byId("messages").children[index].querySelectorAll(".versions button:enabled")];
  (buttons.find((one) => one.ariaLabel === label) ?? buttons[0])?.focus();
}

const titleOf = (message) => (message?.content.trim() || message?.files?.[0].name || "").split("\n")[0].slice(0, 80);

// Without a chosen title, the first message is the title, also after `change`.
function withTitle(conversation, change) {
  const isChosen = conversation.title && conversation.title !== titleOf(conversation.messages[0]);
  change();
  if (!isChosen) conversation.title = titleOf(conversation.messages[0]);
}

const blank = () => ({ role: "assistant", content: "", notices: [], route: [], tokens: 0 });

async function send(said) {
  const conversation = open ?? store.create();
  conversation.system ??= store.settings.system ?? "";
  const message = { role: "user", content: said, ...takeAttached() };
  withTitle(conversation, () => {
    if (editing === null) conversation.messages.push(message);
    else replaceFrom(conversation.messages, editing, message);
  });
  show(conversation);
  const answer = blank();
  conversation.messages.push(answer);
  await reply(conversation, answer);
}

async function regenerate() {
  if (answering || open?.messages.at(-1)?.role !== "assistant") return;
  const answer = blank();
  replaceFrom(open.messages, open.messages.length - 1, answer);
  await reply(open, answer);
}

// Continue a broken answer.
async function goOn() {
  if (answering || open?.messages.at(-1)?.role !== "assistant") return;
  const message = open.messages.at(-1);
  Object.assign(message, { notices: [], finish: null });
  await reply(open, message, true);
}

// Write an answer into `message`, the last of the conversation; `goOn`: it has a beginning.
async function reply(conversation, message, goOn = false) {
  const asked = conversation.messages.slice(0, goOn ? undefined : -1).map(asSaid);
  const options = { system: systemOf(conversation), goOn };
  const abort = new AbortController();
  answering = { conversation, message, abort };
  message.writing = true;
  store.writing.add(conversation);
  keep(conversation);
  busy(true);
  const receive = receiver(message);
  let drawn = false;
  let saved = performance.now();
  const draw = () => {
    drawn = false;
    if (answering?.message === message) redraw(message);
  };
  drawAll(); // buttons of other messages wait until this one is complete
  toEnd();
  try {
    for await (const chunk of api.answer(model, asked, abort.signal, options)) {
      receive(chunk);
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
      if (message.writing) store.breakOff(message, "Stopped."); // else the page is left
    } else {
      const reason = error instanceof api.ApiError ? error.message : "the gateway can’t be reached";
      message.notices.push({ kind: "bad", cut: true, text: `The answer broke off: ${reason}` });
      if (error.status === 401) byId("settings").showModal();
    }
  } finally {
    delete message.writing;
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

function showContext() {
  const left = model?.max_model_len - open?.messages.findLast((message) => message.used)?.used;
  byId("context").textContent = left >= 0 ? `${left} of ${model.max_model_len} tokens left. ` : "";
}

const systemOf = (conversation) => conversation?.system ?? store.settings.system;

// The messages that would be sent now, as texts, and the system prompt.
function draft() {
  const before = (open?.messages ?? []).slice(0, editing ?? undefined);
  const messages = [...before, { role: "user", content: text.value, ...attached() }];
  return [messages.map((message) => ({ role: message.role, content: textOf(message) })), systemOf(open)];
}

function stop() {
  answering?.abort.abort();
}

function busy(now) {
  byId("stop").hidden = !now;
  byId("send").hidden = now;
}

// ---------------------------------------------------------------- the rest of the page

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

byId("composer").addEventListener("submit", async (event) => {
  event.preventDefault();
  const said = text.value.trim();
  if ((!said && !attached().files) || answering) return;
  early = !model;
  if (early || (await isTooLong(...draft())) || text.value.trim() !== said || answering) return;
  text.value = "";
  fit();
  send(said);
});
text.addEventListener("input", () => {
  fit();
  measureSoon(draft);
});
onAttached(() => measureSoon(draft));
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || byId("settings").open) return;
  if (answering) stop();
  else if (editing !== null) giveUpEdit();
  else closeSide();
});
function giveUpEdit() {
  dontEdit();
  putAttached({});
  text.value = "";
  fit();
  text.focus();
}
byId("dont-edit").addEventListener("click", giveUpEdit);
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
onModel(() => {
  showAttach();
  showContext();
  measureSoon(draft);
  if (!answering) drawAll(); // the model decides if an answer can be continued
  if (early) byId("composer").requestSubmit();
});
byId("export").addEventListener("click", () => open && exportOne(open));
addEventListener("hashchange", () => {
  const named = store.find(location.hash.slice(1)) ?? null;
  if (named !== open) show(named);
});
byId("ideas").replaceChildren(
  ...IDEAS.map((idea) => {
    const button = document.createElement("button");
    button.className = "button";
    button.textContent = idea;
    button.addEventListener("click", () => {
      early = !model;
      if (early) text.value = idea;
      else if (!answering) send(idea);
    });
    return button;
  }),
);
addEventListener("pagehide", () => {
  if (!answering) return;
  store.breakOff(answering.message, store.PAGE_LEFT);
  store.save(answering.conversation);
  stop();
});

showSettings();
show(store.find(location.hash.slice(1)) ?? null);
begin();
health();
