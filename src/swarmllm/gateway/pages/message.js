// One message as an element: its text, events on the way, its speed and its route.

import { fileRow, pictureRow } from "/static/attached.js";
import { dressCode } from "/static/code.js";
import { markdown } from "/static/markdown.js";

export const endOfId = (hop) => hop.public_name || `…${hop.peer_id.slice(-6)}`;
const blocks = (hop) => `${hop.blocks?.[0]}:${hop.blocks?.[1]}`;

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function ordinal(place) {
  const last = place % 100 > 10 && place % 100 < 14 ? 0 : place % 10;
  return `${place}${["th", "st", "nd", "rd"][last] ?? "th"}`;
}

// An event of the swarm in words; null: it needs none.
export function noticeOf(event, route) {
  if (event.event === "queue") {
    return { kind: "", searching: true, text: event.place ? `${ordinal(event.place)} in line. All others were asked before.` : "It is your turn." };
  }
  if (event.event === "shard_status") {
    const hop = route.find((one) => one.peer_id === event.peer_id);
    const who = hop ? endOfId(hop) : event.peer_id ? `…${event.peer_id.slice(-6)}` : "A server";
    return { kind: "", searching: true, text: `${who} failed. Looking for another way…` };
  }
  if (event.event === "shard_failover") {
    if (!event.replaced_by.length) return { kind: "good", text: "The route was repaired. Nothing was lost." };
    const hops = event.replaced_by.map((hop) => `${endOfId(hop)} (blocks ${blocks(hop)})`).join(", ");
    const lost = event.lost.length ? `${event.lost.map(endOfId).join(", ")} failed. ` : "";
    return { kind: "good", text: `${lost}${hops} took over. Nothing was lost.` };
  }
  if (event.event === "pipeline_aborted") {
    if (event.fallback_to_local) return { kind: "", text: "The swarm can’t go on. The gateway’s own model does." };
    return { kind: "bad", text: "The swarm can’t go on." };
  }
  return null;
}

function button(label, onClick) {
  const element = make("button", "button plain", label);
  element.type = "button";
  element.addEventListener("click", onClick);
  return element;
}

function copyButton(textOf) {
  const element = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(textOf(element));
      element.textContent = "Copied";
    } catch {
      element.textContent = "Not allowed";
    }
    setTimeout(() => (element.textContent = "Copy"), 1500);
  });
  return element;
}

// ‹ 1/2 ›, if the message has several versions; else null.
function versions(message, onVersion) {
  if (!onVersion || !(message.versions?.length > 1)) return null;
  const line = make("span", "versions");
  const step = (sign, label, to) => {
    const one = button(sign, () => onVersion(to, label));
    one.setAttribute("aria-label", label);
    one.disabled = !(to in message.versions);
    return one;
  };
  const count = make("span", "", `${message.version + 1}/${message.versions.length}`);
  count.prepend(make("span", "only-read", "Version "));
  line.append(step("‹", "Previous version", message.version - 1), count, step("›", "Next version", message.version + 1));
  return line;
}

function foot(message, busy, { onRegenerate, onContinue, onVersion }) {
  const line = make("div", "foot");
  if (!busy) {
    const acts = make("span", "acts");
    acts.append(...[versions(message, onVersion)].filter(Boolean));
    if (message.content) acts.append(copyButton(() => message.content));
    if (onContinue) acts.append(button("Continue", onContinue));
    if (onRegenerate) acts.append(button("Regenerate", onRegenerate));
    line.append(acts);
  }
  if (message.tokens) {
    const parts = [`${message.tokens} token${message.tokens === 1 ? "" : "s"}`];
    if (message.rate) parts.push(`${message.rate.toFixed(1)} tokens/s`);
    if (message.firstTokenMs && !busy) parts.push(`first after ${(message.firstTokenMs / 1000).toFixed(2)} s`);
    if (message.finish === "length") parts.push("cut at its longest");
    line.append(make("span", "rate", parts.join(" · ")));
  }
  if (message.route?.length) {
    const route = make("span", "route");
    route.append(make("span", "only-read", "Route: "));
    message.route.forEach((hop, index) => {
      if (index) {
        const arrow = make("span", "arrow", "→");
        arrow.setAttribute("aria-hidden", "true");
        route.append(arrow);
      }
      const chip = make("span", "hop", `${endOfId(hop)} ${blocks(hop)}`);
      chip.title = `${hop.peer_id}, blocks ${blocks(hop)}`;
      if (message.fresh?.some((one) => one.peer_id === hop.peer_id && blocks(one) === blocks(hop))) chip.classList.add("new");
      route.append(chip);
    });
    line.append(route);
  }
  return line;
}

// The model's thoughts before its answer: folded until the user opens them.
function thoughts(message, busy) {
  const details = make("details", "thoughts");
  details.open = Boolean(message.unfolded);
  details.append(make("summary", "", busy && !message.content ? "Thinking…" : "Thoughts"));
  details.append(make("div", "", message.reasoning));
  details.addEventListener("toggle", () => (message.unfolded = details.open));
  return details;
}

export function renderMessage(message, { busy, onRegenerate, onContinue, onEdit, onVersion }) {
  const article = make("article", `message ${message.role}`);
  article.setAttribute("aria-label", message.role === "user" ? "You" : "Model");
  const body = make("div", "body");
  body.dir = "auto";
  article.append(body);
  if (message.role === "user") {
    body.textContent = message.content;
    body.prepend(...[pictureRow(message.pictures), fileRow(message.files)].filter(Boolean));
    if (onEdit) article.prepend(button("Edit", onEdit));
    article.prepend(...[versions(message, onVersion)].filter(Boolean));
    return article;
  }
  article.setAttribute("aria-busy", String(busy));
  if (message.reasoning) article.prepend(thoughts(message, busy));
  body.append(markdown(message.content));
  dressCode(body, (textOf) => {
    const copy = copyButton(textOf);
    copy.classList.add("copy");
    return copy;
  });
  for (const part of body.querySelectorAll("p, li, blockquote, h1, h2, h3, h4, td, th")) part.dir = "auto";
  if (message.notices?.length) {
    const list = make("ul", "notices");
    list.append(...message.notices.map((notice) => make("li", notice.kind, notice.text)));
    article.append(list);
  }
  article.append(foot(message, busy, { onRegenerate, onContinue, onVersion }));
  return article;
}
