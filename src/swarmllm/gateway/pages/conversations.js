// The list of conversations: search, rename, export, delete with undo.

import * as store from "/static/store.js";

const byId = (id) => document.getElementById(id);
const UNDO_MS = 10000;
let shown = () => {};

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

export function drawList(open, { onOpen, onDelete }) {
  shown = () => drawList(open, { onOpen, onDelete });
  const wanted = byId("search").value.trim().toLowerCase();
  const all = store.all().filter((one) => one.messages.length);
  byId("search").hidden = all.length < 2 && !wanted;
  byId("conversations").replaceChildren(
    ...all.filter((one) => matches(one, wanted)).map((one) => {
      const item = document.createElement("li");
      if (one === open) item.setAttribute("aria-current", "true");
      const title = document.createElement("button");
      title.className = "title";
      title.dir = "auto";
      title.textContent = one.title || "…";
      title.addEventListener("click", () => onOpen(one));
      const rename = button(`Rename “${one.title}”`, "✎", "act", () => {
        const given = prompt("Name of the conversation", one.title)?.trim();
        if (!given) return;
        one.title = given.slice(0, 80);
        store.save(one);
        shown();
      });
      const remove = button(`Delete “${one.title}”`, "×", "act delete", () => {
        onDelete(one);
        offerUndo(one, onOpen);
      });
      item.append(title, rename, remove);
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

// A file of Markdown.
export function exportOne(conversation) {
  const who = { user: "You", assistant: "Model" };
  const system = conversation.system ? `> ${conversation.system.replaceAll("\n", "\n> ")}\n\n` : "";
  const said = conversation.messages.map(({ role, content }) => `## ${who[role]}\n\n${content}\n`).join("\n");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([`# ${conversation.title}\n\n${system}${said}`], { type: "text/markdown" }));
  link.download = `${conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) || "conversation"}.md`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

byId("search").addEventListener("input", () => shown());
