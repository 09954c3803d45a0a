// The list of conversations: search, rename, export, delete with undo.

import { textOf } from "/static/attached.js";
import { model } from "/static/head.js";
import * as store from "/static/store.js";

const byId = (id) => document.getElementById(id);
const UNDO_MS = 10000;
const LONGEST_NAME = 80;
let shown = () => {};
let naming = null; // {skipped} while a name is edited: the list stays unchanged; true: it should have changed

function button(label, sign, name, onClick) {
  const element = document.createElement("button");
  element.className = name;
  element.textContent = sign;
  element.title = label;
  element.setAttribute("aria-label", label);
  element.addEventListener("click", onClick);
  return element;
}

function matches(one, wanted) {
  return !wanted || [one.title, ...one.messages.map((message) => message.content)].some((text) => text?.toLowerCase().includes(wanted));
}

const DAYS = new Intl.RelativeTimeFormat("en", { numeric: "auto" });
const noon = (at) => new Date(at).setHours(12, 0, 0, 0);

// Today, yesterday, or the month of its start.
function when(one) {
  const at = parseInt(one.id.slice(0, 8), 36); // an id begins with the time
  if (!(at > 1e12)) return ""; // another program wrote it
  const days = Math.round((noon(at) - noon(Date.now())) / 86400000);
  const named = days > -2 ? DAYS.format(days, "day") : new Date(at).toLocaleDateString("en", { month: "long", year: "numeric" });
  return named[0].toUpperCase() + named.slice(1);
}

// Edit a name in a field: Enter or leaving it keeps the text, Escape doesn't.
function rename(one, title) {
  const field = document.createElement("input");
  field.className = "title";
  field.dir = "auto";
  field.maxLength = LONGEST_NAME;
  field.value = one.title;
  field.setAttribute("aria-label", "Name of the conversation");
  naming = { skipped: false };
  const end = (given) => {
    if (!naming) return;
    const { skipped } = naming;
    naming = null;
    if (given) {
      one.title = given;
      store.save(one);
      title.textContent = given;
    }
    field.replaceWith(title); // the field alone: the element that was clicked to leave it must keep its place
    if (given || skipped) setTimeout(() => naming || shown(), 300);
  };
  field.addEventListener("blur", () => end(field.value.trim()));
  field.addEventListener("keydown", (event) => {
    if (event.isComposing || (event.key !== "Enter" && event.key !== "Escape")) return;
    event.stopPropagation(); // Escape would stop an answer
    end(event.key === "Enter" ? field.value.trim() : "");
    title.focus();
  });
  title.replaceWith(field);
  field.select();
}

export function drawList(open, { onOpen, onDelete }) {
  shown = () => drawList(open, { onOpen, onDelete });
  if (naming) {
    naming.skipped = true;
    return;
  }
  document.title = `${open?.title || model?.id || "chat"} · swarmllm`;
  const wanted = byId("search").value.trim().toLowerCase();
  const all = store.all().filter((one) => one.messages.length);
  byId("search").hidden = all.length < 2 && !wanted;
  let last = "";
  byId("conversations").replaceChildren(
    ...all.filter((one) => matches(one, wanted)).map((one) => {
      const item = document.createElement("li");
      if (one === open) item.setAttribute("aria-current", "true");
      if (when(one) !== last) item.dataset.when = last = when(one);
      const title = document.createElement("button");
      title.className = "title";
      title.dir = "auto";
      title.textContent = one.title || "…";
      title.addEventListener("click", () => onOpen(one));
      const edit = button(`Rename “${one.title}”`, "✎", "act", () => rename(one, title));
      const remove = button(`Delete “${one.title}”`, "×", "act delete", () => {
        onDelete(one);
        offerUndo(one, onOpen);
      });
      item.append(title, edit, remove);
      return item;
    }),
  );
}

let forgetting = 0;

function offerUndo(conversation, onOpen) {
  const toast = byId("undo");
  const again = document.createElement("button");
  again.className = "button plain";
  again.textContent = "Undo";
  again.addEventListener("click", () => {
    toast.replaceChildren();
    store.restore(conversation);
    onOpen(conversation);
  });
  toast.replaceChildren(`Deleted “${conversation.title}”.`, again);
  clearTimeout(forgetting);
  forgetting = setTimeout(() => toast.replaceChildren(), UNDO_MS);
}

// Save a conversation as Markdown.
export function exportOne(conversation) {
  const who = { user: "You", assistant: "Model" };
  const system = conversation.system ? `> ${conversation.system.replaceAll("\n", "\n> ")}\n\n` : "";
  const said = conversation.messages.map((message) => `## ${who[message.role]}\n\n${textOf(message)}\n`).join("\n");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([`# ${conversation.title}\n\n${system}${said}`], { type: "text/markdown" }));
  link.download = `${conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) || "conversation"}.md`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

byId("search").addEventListener("input", () => shown());
