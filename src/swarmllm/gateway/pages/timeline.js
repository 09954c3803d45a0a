// The last minutes as SVG: tokens per second, served blocks, servers that came or went. One column is a minute.

const NS = "http://www.w3.org/2000/svg";
const LEFT = 44; // for the scale
const RIGHT = 8;
const TOP = 10;
const TRAFFIC = 78; // heights
const SERVED = 12;
const MARKS = 18;
const numbers = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

function make(name, attributes, parent, text) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent?.append(element);
  return element;
}

const clock = (at) => new Date(1000 * at).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });
const many = (number, what) => `${number} ${what}`;

// The next of 1, 2 and 5 times a power of ten.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= value);
}

function told(minute, needed) {
  const happened = ["joined", "left", "lost"].filter((kind) => minute[kind]).map((kind) => many(minute[kind], kind));
  return [clock(minute.at), `${minute.blocks} of ${needed} blocks served`, `${numbers.format(minute.tokens_per_s)} tokens/s`, ...happened].join(", ");
}

function summary(minutes, needed) {
  const sum = (kind) => minutes.reduce((total, minute) => total + minute[kind], 0);
  const fewest = Math.min(...minutes.map((minute) => minute.blocks));
  const most = Math.max(...minutes.map((minute) => minute.tokens_per_s));
  return `${many(minutes.length, minutes.length === 1 ? "minute" : "minutes")}: at least ${fewest} of ${needed} blocks served, at most ${numbers.format(most)} tokens/s, ${sum("joined")} joined, ${sum("left")} left, ${sum("lost")} lost`;
}

function scale(svg, most, width) {
  for (const [share, label] of [[0, "0"], [0.5, numbers.format(most / 2)], [1, numbers.format(most)]]) {
    const y = TOP + TRAFFIC * (1 - share);
    make("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }, svg);
    make("text", { class: "scale", x: LEFT - 6, y: y + 4 }, svg, label);
  }
}

function times(svg, last, x, { total, width, numMinutes }) {
  for (let ago = 0; ago < numMinutes; ago += 1) {
    const at = last.at - 60 * ago;
    if (new Date(1000 * at).getMinutes() % (numMinutes > 20 ? 15 : 2)) continue;
    const middle = x(ago);
    make("text", { class: "time", x: Math.min(Math.max(middle, LEFT + 12), width - 16), y: total - 3 }, svg, clock(at));
  }
}

export function drawTimeline(holder, swarm, numMinutes) {
  const minutes = swarm.history.slice(-numMinutes);
  if (!minutes.length) {
    holder.replaceChildren();
    return;
  }
  const needed = swarm.needed_blocks;
  const width = Math.max(holder.clientWidth, 280);
  const per = (width - LEFT - RIGHT) / numMinutes;
  const marksTop = TOP + TRAFFIC + SERVED + 10;
  const total = marksTop + MARKS + 18;
  const last = minutes.at(-1);
  const x = (ago) => width - RIGHT - (ago + 0.5) * per;
  const most = roundUp(Math.max(1, ...minutes.map((minute) => minute.tokens_per_s)));

  const svg = make("svg", { width, height: total, viewBox: `0 0 ${width} ${total}`, role: "img", "aria-label": summary(minutes, needed) });
  scale(svg, most, width);
  for (const minute of minutes) {
    const middle = x((last.at - minute.at) / 60);
    const column = make("g", { class: minute === last ? "minute now" : "minute" }, svg);
    make("title", {}, column, told(minute, needed));
    make("rect", { class: "hit", x: middle - per / 2, y: TOP, width: per, height: total - TOP - 16 }, column);
    const height = (TRAFFIC * minute.tokens_per_s) / most;
    if (height > 0) make("rect", { class: "traffic", x: middle - per * 0.4, y: TOP + TRAFFIC - Math.max(height, 1.5), width: per * 0.8, height: Math.max(height, 1.5), rx: Math.min(3, per / 4) }, column);
    const state = minute.blocks >= needed ? "all" : minute.blocks ? "some" : "none";
    make("rect", { class: `served ${state}`, x: middle - per / 2, y: TOP + TRAFFIC + 6, width: per - (per > 6 ? 1 : 0.3), height: SERVED }, column);
    if (minute.joined) make("path", { class: "mark joined", d: `M${middle} ${marksTop} l4 7 h-8 z` }, column);
    if (minute.left) make("path", { class: "mark left", d: `M${middle} ${marksTop + 17} l4 -7 h-8 z` }, column);
    if (minute.lost) make("path", { class: "mark lost", d: `M${middle - 3.5} ${marksTop + 10} l7 7 m0 -7 l-7 7` }, column);
  }
  times(svg, last, x, { total, width, numMinutes });
  holder.replaceChildren(svg);
}
