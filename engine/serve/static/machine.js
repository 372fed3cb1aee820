// The state graph with the current state lit, and the owners of the KV cache's slots.

const SVG = "http://www.w3.org/2000/svg";
const WIDE = 78, HIGH = 32, GAP_X = 26, GAP_Y = 6;
const OWNERS = ["free", "shared prompt", "drafts being verified", "outline", "padding",
  "reused chunk", "recomputed", "kept for later requests"];
const PART = 8;  // codes from here on are of parts

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
  for (const state of graph.states) (columns[depth.get(state) ?? 0] ??= []).push(state);
  return columns;
}

export class Machine {
  // names: where the graph's name is shown.
  constructor(place, names) {
    this.place = place;
    this.names = names;
    this.nodes = new Map();
  }

  draw(graph) {
    if (this.graph === graph) return;
    this.graph = graph;
    for (const name of this.names) name.textContent = graph.name;
    this.nodes.clear();
    const columns = columnsOf(graph);
    const tall = Math.max(...columns.map((one) => one.length)) * (HIGH + GAP_Y);
    const width = columns.length * (WIDE + GAP_X) - GAP_X + 4;
    this.low = tall + 2;
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `-2 -2 ${width} ${tall + 6}`);
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
      const lines = state.split("_");
      draw("rect", { x, y, width: WIDE, height: HIGH, rx: 7 }, group);
      lines.forEach((line, row) => {
        const middle = y + HIGH / 2 + (row - (lines.length - 1) / 2) * 13;
        draw("text", { x: x + WIDE / 2, y: middle }, group).textContent = line;
      });
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
  }
}

export class Memory {
  // strip: the first slots in order, with their owners; bar: used of all slots.
  constructor(strip, scale, bar, legend, text) {
    Object.assign(this, { strip, scale, bar, legend, text });
    this.shown = 0;
  }

  // runs: [code, slots] in the order of the slots.
  show(runs, used, capacity, more = "") {
    const filled = runs.at(-1)?.[0] === 0 ? runs.slice(0, -1) : runs;
    const end = filled.reduce((sum, [, count]) => sum + count, 0);
    while (this.shown < Math.min(end, capacity)) this.shown = Math.max(this.shown * 2, 256);
    this.shown = Math.min(this.shown, capacity);
    this.scale.textContent = `slots 1 to ${this.shown} of ${capacity}, in order`;
    this.strip.replaceChildren(...filled.map(([code, count]) => {
      const piece = document.createElement("i");
      piece.className = classOf(code);
      piece.style.width = `${100 * count / this.shown}%`;
      piece.title = `${nameOf(code)}: ${count} slots`;
      return piece;
    }));
    const slots = new Map();
    for (const [code, count] of filled) if (code) slots.set(code, (slots.get(code) ?? 0) + count);
    this.legend.replaceChildren(...[...slots].sort((a, b) => a[0] - b[0]).map(([code, count]) => {
      const item = document.createElement("li");
      const key = document.createElement("span");
      key.className = `key ${classOf(code)}`;
      item.append(key, `${nameOf(code)} ${count}`);
      return item;
    }));
    const share = capacity ? 100 * used / capacity : 0;
    this.bar.style.width = `${share}%`;
    this.text.textContent = `${used} of ${capacity} slots in use (${share.toFixed(1)} %)${more}`;
    this.strip.setAttribute("aria-label", this.text.textContent);
  }
}

function classOf(code) {
  return code < PART ? `k${code}` : `b${(code - PART) % 8}`;
}

function nameOf(code) {
  return code < PART ? OWNERS[code] : `part ${code - PART + 1}`;
}
