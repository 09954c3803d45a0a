// Blocks × servers as SVG. Servers that don't overlap share a line, so that many hundreds fit a screen.

const NS = "http://www.w3.org/2000/svg";
const AXIS = 20;
const HEAT = 14;
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

function make(name, attributes, parent) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent?.append(element);
  return element;
}

export const nameOf = (server) => server.public_name || `…${server.peer_id.slice(-6)}`;

// Put each server on the first line that is free at its start; servers of the route come first, on top.
function lines(servers, onRoute) {
  const ordered = [...servers].sort(
    (a, b) => onRoute.has(b.peer_id) - onRoute.has(a.peer_id) || a.start - b.start || b.end - a.end,
  );
  const taken = [];
  return ordered.map((server) => {
    let line = taken.findIndex((spans) => spans.every(([start, end]) => end <= server.start || server.end <= start));
    if (line < 0) line = taken.push([]) - 1;
    taken[line].push([server.start, server.end]);
    return { server, line };
  });
}

export function runs(blocks) {
  const found = [];
  for (const block of blocks) {
    if (found.length && found.at(-1)[1] === block) found.at(-1)[1] = block + 1;
    else found.push([block, block + 1]);
  }
  return found;
}

// The stacks of the model: one without a name, or encoder and decoder, with blocks numbered in each.
function stacksOf(swarm) {
  const first = swarm.encoder_blocks;
  if (!(first > 0 && first < swarm.num_blocks)) return [{ name: "", start: 0, end: swarm.num_blocks }];
  return [{ name: "encoder ", start: 0, end: first }, { name: "decoder ", start: first, end: swarm.num_blocks }];
}

// `4:8`, or `encoder 2:4, decoder 0:6`, as `swarmllm status` writes them.
export function blocksOf(swarm, start, end) {
  return stacksOf(swarm)
    .filter((stack) => start < stack.end && end > stack.start)
    .map((stack) => `${stack.name}${Math.max(start, stack.start) - stack.start}:${Math.min(end, stack.end) - stack.start}`)
    .join(", ");
}

export function draw(holder, swarm, { chosen, onChoose }) {
  const onRoute = new Set(swarm.route.map((hop) => hop.peer_id));
  const placed = lines(swarm.servers, onRoute);
  const numLines = Math.max(1, ...placed.map(({ line }) => line + 1));
  const width = Math.max(holder.clientWidth, Math.min(swarm.num_blocks * 5, 1200), 280);
  const perBlock = (width - 2) / swarm.num_blocks;
  const height = numLines > 40 ? 12 : numLines > 16 ? 18 : 30;
  const gap = height > 20 ? 6 : 3;
  const top = AXIS + HEAT + 24;
  const total = top + numLines * (height + gap) + 2;
  const x = (block) => 1 + block * perBlock;
  const focused = document.activeElement?.closest?.(".bar")?.dataset.peer;

  const svg = make("svg", { width, height: total, viewBox: `0 0 ${width} ${total}`, role: "group" });
  svg.setAttribute("aria-label", `${swarm.num_blocks} blocks, ${swarm.servers.length} servers; the table below has the same`);

  const step = [1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 50, 100].find((one) => one * perBlock >= 34) ?? 200;
  for (const { name, start, end } of stacksOf(swarm)) {
    const room = Math.ceil(((name.length + 2) * 7) / (step * perBlock)); // columns that the name takes
    for (let block = start; block < end; block += step) {
      const kind = name && start && block === start ? "grid between" : "grid";
      make("line", { class: kind, x1: x(block), x2: x(block), y1: AXIS - 4, y2: total }, svg);
      if (block === start) make("text", { class: "stack", x: x(block) + 3, y: 12 }, svg).textContent = `${name}0`;
      else if (!name || (block - start) / step >= room) make("text", { x: x(block) + 3, y: 12 }, svg).textContent = block - start;
    }
  }

  // Throughput of all servers of a block: the darker the more; red: no server.
  const able = new Array(swarm.num_blocks).fill(0);
  for (const server of swarm.servers) {
    if (server.state !== "online") continue;
    for (let block = server.start; block < server.end; block += 1) able[block] += Math.max(server.throughput, 1e-9);
  }
  const most = Math.max(...able, 1e-9);
  const missing = new Set(swarm.missing_blocks);
  for (let block = 0; block < swarm.num_blocks; block += 1) {
    const cell = make("rect", { class: "cell", x: x(block), y: AXIS, width: Math.max(perBlock - 1, 1), height: HEAT, rx: 2 }, svg);
    if (missing.has(block)) cell.classList.add("missing");
    else cell.setAttribute("opacity", (0.2 + 0.8 * (able[block] / most)).toFixed(2));
  }
  for (const [start, end] of runs(swarm.missing_blocks)) {
    make("rect", { class: "gap", x: x(start), y: AXIS + HEAT, width: (end - start) * perBlock, height: total }, svg);
  }
  if (swarm.bottleneck && able.some((one) => one !== able[swarm.bottleneck.blocks[0]])) {
    const [start, end] = swarm.bottleneck.blocks;
    make("line", { class: "slow", x1: x(start), x2: x(end) - 1, y1: AXIS + HEAT + 4, y2: AXIS + HEAT + 4 }, svg);
    const text = make("text", { class: "slow-text", x: Math.min(x(start), width - 80), y: AXIS + HEAT + 17 }, svg);
    text.textContent = "slowest here";
  }

  for (const { server, line } of placed) {
    const y = top + line * (height + gap);
    const barWidth = Math.max((server.end - server.start) * perBlock - 2, 3);
    const bar = make("g", { class: `bar ${server.state}`, tabindex: 0, role: "button", "data-peer": server.peer_id }, svg);
    const busy = server.num_sessions ? `, ${server.num_sessions} session${server.num_sessions === 1 ? "" : "s"}` : "";
    const traffic = server.tokens_per_s > 0 ? `, ${compact.format(server.tokens_per_s)} tokens/s now` : "";
    const held = `${swarm.encoder_blocks ? "" : "blocks "}${blocksOf(swarm, server.start, server.end)}`;
    const what = `${nameOf(server)}: ${held}, ${server.state}${busy}${traffic}`;
    if (onRoute.has(server.peer_id) && server.state === "online") bar.classList.add("route");
    if (server.peer_id === chosen) bar.classList.add("chosen");
    make("title", {}, bar).textContent = what;
    make("rect", { class: "body", x: x(server.start) + 0.5, y, width: barWidth, height, rx: Math.min(6, height / 3) }, bar);
    const inUse = server.load ?? server.cache_in_use;
    if (inUse > 0 && height > 14) {
      const full = Math.max(barWidth - 10, 0);
      make("rect", { class: "load", x: x(server.start) + 5.5, y: y + height - 5, width: full * Math.min(inUse, 1), height: 2.5, rx: 1 }, bar);
    }
    if (server.tokens_per_s > 0 && height > 14) {
      // Redrawn every two seconds: animations continue from where they were.
      const stream = make("line", { class: "stream", x1: x(server.start) + 6, x2: x(server.start) + barWidth - 6, y1: y + 4.5, y2: y + 4.5 }, bar);
      stream.style.animationDelay = `-${performance.now() % 1000}ms`;
    }
    const label = nameOf(server);
    if (height > 14 && barWidth > label.length * 6.6 + 12) {
      make("text", { x: x(server.start) + 7, y: y + height / 2 + 3.5 }, bar).textContent = label;
      const now = server.tokens_per_s > 0 ? `${compact.format(server.tokens_per_s)} of ` : "";
      const speed = `${now}${compact.format(server.throughput)} tokens/s`;
      if (server.throughput > 0 && barWidth > (label.length + speed.length) * 6.6 + 30) {
        const right = x(server.start) + barWidth - 7;
        make("text", { class: "speed", x: right, y: y + height / 2 + 3.5 }, bar).textContent = speed;
      }
    }
    bar.addEventListener("click", () => onChoose(server.peer_id));
    bar.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        onChoose(server.peer_id);
      }
    });
  }
  holder.replaceChildren(svg);
  if (focused) holder.querySelector(`[data-peer="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}
