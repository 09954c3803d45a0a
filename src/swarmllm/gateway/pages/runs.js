// Common trainings of several homes: curves and a table for each run. Asks every ten seconds; without runs it shows nothing.
//
// Names come from other homes. They are only ever text of elements, never HTML.

const PERIOD_MS = 10_000;
const NS = "http://www.w3.org/2000/svg";
const [LEFT, RIGHT, TOP, HEIGHT, BOTTOM] = [44, 10, 8, 170, 34];
const section = document.getElementById("runs");
const loss = new Intl.NumberFormat("en", { minimumFractionDigits: 3, maximumFractionDigits: 3 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const bytes = (value) => `${compact.format(value / 1e6)} MB`;
const many = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
const fromTo = (curve) => (curve.length ? `${loss.format(curve[0][1])} → ${loss.format(curve.at(-1)[1])}` : "–");
let [etag, runs] = [null, []];

function make(name, attributes, ...children) {
  const element = name.startsWith("svg:") ? document.createElementNS(NS, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// Without common texts each home measures on its own ones, so that homes can't be compared.
const isMeasured = (run) => run.shared_losses.length > 0 || run.homes.some((home) => home.own_losses.length);
const nameOf = (home) => `${home.name || home.peer_id.slice(-6)}${home.is_here ? " (here)" : ""}`;

// The curves of a run: `place` chooses colour and dashes; the shared values have none.
function curvesOf(run) {
  const homes = run.homes.map((home, place) => ({ name: nameOf(home), place, points: isMeasured(run) ? home.own_losses : home.losses }));
  const shared = { name: "all together", place: null, points: run.shared_losses };
  return [...homes, ...(isMeasured(run) ? [shared] : [])].filter((curve) => curve.points.length);
}

// Round steps of a scale with about four marks.
function marks(low, high) {
  const rough = (high - low) / 4 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const found = [];
  for (let mark = Math.ceil(low / step) * step; mark <= high + step / 1000; mark += step) found.push(mark);
  return found;
}

function look(curve) {
  return curve.place === null ? { class: "curve shared" } : { class: "curve", style: `--hue: ${(curve.place * 137 + 210) % 360}`, "stroke-dasharray": ["none", "7 3", "2 3", "9 3 2 3"][curve.place % 4] };
}

function chart(run, width) {
  const curves = curvesOf(run);
  const points = curves.flatMap((curve) => curve.points);
  const [first, last] = [Math.min(...points.map(([at]) => at)), Math.max(...points.map(([at]) => at))];
  const values = points.map(([, value]) => value);
  const flat = Math.max(...values) === Math.min(...values) ? 0.5 : 0;
  const [low, high] = [Math.min(...values) - flat, Math.max(...values) + flat];
  const x = (at) => LEFT + ((at - first) / (last - first || 1)) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (value - low) / (high - low)) * HEIGHT;
  const told = curves.map((curve) => `${curve.name} ${fromTo(curve.points)}`).join("; ");
  const what = isMeasured(run) ? "Loss on the common texts" : "Loss of each home on its own texts";
  const total = TOP + HEIGHT + BOTTOM;
  const svg = make("svg:svg", { width, height: total, viewBox: `0 0 ${width} ${total}`, role: "img", "aria-label": `${what}, rounds ${first} to ${last}: ${told}` });
  for (const mark of marks(low, high)) {
    svg.append(make("svg:line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(mark), y2: y(mark) }));
    svg.append(make("svg:text", { class: "scale", x: LEFT - 6, y: y(mark) + 4 }, String(Number(mark.toPrecision(3)))));
  }
  for (const mark of marks(first, last).filter(Number.isInteger)) svg.append(make("svg:text", { class: "time", x: x(mark), y: total - 18 }, String(mark)));
  svg.append(make("svg:text", { class: "time", x: (LEFT + width) / 2, y: total - 3 }, "round"));
  for (const curve of curves) {
    const line = make("svg:polyline", { ...look(curve), points: curve.points.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ") });
    line.append(make("svg:title", {}, `${curve.name}: ${fromTo(curve.points)}`));
    svg.append(line);
    if (curve.points.length === 1) svg.append(make("svg:circle", { ...look(curve), cx: x(curve.points[0][0]), cy: y(curve.points[0][1]), r: 2.5 }));
  }
  return svg;
}

function legend(run) {
  const items = curvesOf(run).map((curve) => {
    const sample = make("svg:svg", { viewBox: "0 0 26 8", "aria-hidden": "true" }, make("svg:line", { ...look(curve), x1: 0, x2: 26, y1: 4, y2: 4 }));
    return make("li", {}, sample, curve.name);
  });
  return make("ul", { class: "legend", "aria-label": "Curves" }, ...items);
}

function notes(home) {
  const found = [];
  if (home.shortened) found.push(`${many(home.shortened, "round")} shortened`);
  if (home.contradicted) found.push(`${many(home.contradicted, "claim")} differ from what was measured here`);
  return found.join(", ");
}

function table(run) {
  const measured = isMeasured(run);
  const titles = ["Home", "Rounds", "Tokens", "Loss on its own texts", ...(measured ? ["Loss on the common texts"] : []), "Notes"];
  const rows = run.homes.map((home) => [nameOf(home), home.rounds, compact.format(home.tokens), fromTo(home.losses), ...(measured ? [fromTo(home.own_losses)] : []), notes(home)]);
  if (measured) rows.push(["all together", run.round + 1, compact.format(run.tokens), "–", fromTo(run.shared_losses), ""]);
  const head = make("tr", {}, ...titles.map((title) => make("th", { scope: "col" }, title)));
  const body = rows.map(([name, ...cells]) => make("tr", {}, make("th", { scope: "row" }, name), ...cells.map((cell) => make("td", {}, String(cell)))));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
}

function article(run, width) {
  const when = new Date(1000 * run.at).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
  const facts = [`${many(run.round + 1, "round")}, the last one at ${when}`, `${many(run.homes_in_last_round, "home")} in it`, `${compact.format(run.tokens)} tokens in all`, `${bytes(run.sent_bytes)} sent and ${bytes(run.received_bytes)} received here`];
  const wrong = run.wrong_lines ? [make("p", { class: "advice" }, `${many(run.wrong_lines, "line")} of this log have a wrong signature.`)] : [];
  const what = isMeasured(run) ? "Loss on the common texts: of each home’s own adapter, as it says, and of the shared one." : "Loss of each home on its own texts, as it says. This run has no common texts.";
  const scroll = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Table of homes, ${run.directory}` }, table(run));
  const picture = curvesOf(run).length ? [make("p", { class: "lead" }, what), make("div", { class: "chart" }, chart(run, width)), legend(run)] : [];
  return make("article", { class: "run" }, make("h3", {}, run.directory), make("p", { class: "facts" }, facts.join(" · ")), ...wrong, ...picture, scroll);
}

function show() {
  section.hidden = !runs.length;
  if (!runs.length) return;
  const width = Math.max(section.clientWidth - 36, 260);
  section.replaceChildren(make("div", { class: "card-top" }, make("h2", { id: "runs-title" }, "Trained together")), ...runs.map((run) => article(run, width)));
}

async function ask() {
  try {
    const response = await fetch("/api/runs", { headers: etag ? { "If-None-Match": etag } : {}, cache: "no-store" });
    if (response.status !== 200) return;
    etag = response.headers.get("etag");
    ({ runs } = await response.json());
    show();
  } catch {
    // the page itself tells that the gateway is lost
  }
}

async function keepAsking() {
  if (!document.hidden) await ask();
  setTimeout(keepAsking, PERIOD_MS);
}

let shownWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === shownWidth) return;
  shownWidth = innerWidth;
  show();
});
keepAsking();
