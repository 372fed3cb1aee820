// The state graph with the current state lit, and the pool's strip.

const SVG = "http://www.w3.org/2000/svg";
const WIDE = 132, HIGH = 34, GAP_X = 52, GAP_Y = 12;
const OWNERS = ["free", "shared prefix (BIM −1)", "tree in flight", "outline", "padding",
  "reused chunk", "recomputed", "kept for others"];
const BRANCH = 8;

function draw(tag, attributes, parent) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  parent.append(node);
  return node;
}

// Columns by distance from the initial state.
function columnsOf(graph) {
  const depth = new Map([[graph.initial, 0]]);
  for (const state of depth.keys()) {
    for (const [from, to] of graph.ways) {
      if (from === state && !depth.has(to)) depth.set(to, depth.get(state) + 1);
    }
  }
  const columns = [];
  for (const state of graph.states) {
    (columns[depth.get(state) ?? 0] ??= []).push(state);
  }
  return columns.map((one) => one ?? []);
}

export class Machine {
  constructor(place, told) {
    this.place = place;
    this.told = told;
    this.nodes = new Map();
    this.past = [];
  }

  draw(graph) {
    if (this.name === graph.name) return;
    this.name = graph.name;
    this.nodes.clear();
    const columns = columnsOf(graph);
    const tall = Math.max(...columns.map((one) => one.length)) * (HIGH + GAP_Y);
    const width = columns.length * (WIDE + GAP_X) - GAP_X + 12;
    this.low = tall + 4;
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `-6 -6 ${width} ${tall + 18}`);
    svg.setAttribute("class", "machine");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `states of ${graph.name}: ${graph.states.join(", ")}`);
    const at = new Map();
    columns.forEach((states, x) => states.forEach((state, y) => {
      const top = (tall - states.length * (HIGH + GAP_Y)) / 2 + y * (HIGH + GAP_Y);
      at.set(state, [x * (WIDE + GAP_X), top]);
    }));
    for (const [from, to] of graph.ways) this.way(svg, at.get(from), at.get(to));
    for (const [state, [x, y]] of at) {
      const group = draw("g", {}, svg);
      draw("rect", { x, y, width: WIDE, height: HIGH, rx: 7 }, group);
      draw("text", { x: x + WIDE / 2, y: y + HIGH / 2 }, group).textContent = state;
      this.nodes.set(state, group);
    }
    this.place.replaceChildren(svg);
  }

  way(svg, [x1, y1], [x2, y2]) {
    const middle = HIGH / 2;
    const forward = x2 > x1;
    if (x1 - x2 > WIDE + GAP_X) { // far back: below everything else
      const low = this.low, from = x1 + WIDE / 2, to = x2 + WIDE / 2;
      const line = `M${from} ${y1 + HIGH} V${low} H${to} V${y2 + HIGH}`;
      draw("path", { d: line, "stroke-dasharray": "3 4" }, svg);
      return;
    }
    const from = forward ? x1 + WIDE : x1, to = forward ? x2 : x2 + WIDE;
    const bend = (from + to) / 2;
    const line = `M${from} ${y1 + middle} C${bend} ${y1 + middle} ${bend} ${y2 + middle} ` +
      `${to} ${y2 + middle}`;
    draw("path", { d: line, "stroke-dasharray": forward ? "none" : "3 4" }, svg);
  }

  // state: the current one; past: those that were passed since the last picture.
  light(state, past = []) {
    for (const [name, node] of this.nodes) {
      node.classList.toggle("lit", name === state);
      node.classList.toggle("past", name !== state && past.includes(name));
    }
    this.told.textContent = state ? `· ${state}` : "";
  }
}

export class Strip {
  constructor(strip, legend, text) {
    this.strip = strip;
    this.legend = legend;
    this.text = text;
  }

  // runs: [code, slots]; the free end is drawn short, so that what is used can be seen.
  show(runs, used, capacity, more = "") {
    const last = runs.at(-1);
    const shown = last && last[0] === 0 ? runs.slice(0, -1) : runs;
    const total = Math.max(shown.reduce((sum, [, count]) => sum + count, 0), 64);
    this.strip.replaceChildren(...shown.map(([code, count]) => {
      const piece = document.createElement("i");
      piece.className = classOf(code);
      piece.style.width = `${100 * count / total}%`;
      piece.title = `${nameOf(code)}: ${count}`;
      return piece;
    }));
    const slots = new Map();
    for (const [code, count] of shown) slots.set(code, (slots.get(code) ?? 0) + count);
    this.legend.replaceChildren(...[...slots].sort((a, b) => a[0] - b[0]).map(([code, count]) => {
      const item = document.createElement("li");
      const key = document.createElement("span");
      key.className = `key ${classOf(code)}`;
      item.append(key, `${nameOf(code)}: ${count}`);
      return item;
    }));
    const share = capacity ? ` (${(100 * used / capacity).toFixed(1)} %)` : "";
    this.text.textContent = `${used} of ${capacity} slots in use${share}${more}`;
    this.strip.setAttribute("aria-label", this.text.textContent);
  }
}

function classOf(code) {
  return code < BRANCH ? `k${code}` : `b${(code - BRANCH) % 8}`;
}

function nameOf(code) {
  return code < BRANCH ? OWNERS[code] : `BIM ${code - BRANCH}`;
}
