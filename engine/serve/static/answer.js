// One answer as it grows: events in, branches and figures out. Live and recorded runs share it.

const NAMES = { d: "d", f: "f", p: "p", t: "t-t" };
const READ = { r: "r", c: "c", n: "t-t" };  // a prompt's tokens: reused, recomputed, new

export function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

export class Answer {
  constructor(title) {
    this.title = title;
    this.node = make("section", { className: "card answer" });
    this.figures = make("p", { className: "figures" });
    this.branches = make("div", { className: "branches" });
    this.chart = make("ul", { className: "chart", ariaLabel: "Accepted drafts in a round" });
    this.head = make("h2", { textContent: title });
    const caption = make("p", { className: "figures", textContent: "drafts accepted in a round" });
    this.more = make("div", { hidden: true }, this.chart, caption);
    this.node.append(this.head, this.figures, this.branches, this.more);
    this.clear();
  }

  clear() {
    this.texts = new Map();
    this.titles = [];
    this.steps = new Set();
    this.accepted = [];
    this.tokens = 0;
    this.drafted = 0;
    this.first = null;
    this.branches.replaceChildren();
  }

  branch(index) {
    if (!this.texts.has(index)) {
      const title = make("h3");
      const text = make("p", { tabIndex: 0, role: "group" });
      const node = make("div", { className: index < 0 ? "branch outline" : "branch" }, title, text);
      const found = { node, title, text, name: "", finish: "" };
      this.texts.set(index, found);
      const later = [...this.texts.keys()].filter((one) => one > index).sort((a, b) => a - b)[0];
      const before = later === undefined ? null : this.texts.get(later).node;
      this.branches.insertBefore(node, before);
      this.named(index);
    }
    return this.texts.get(index);
  }

  named(index) {
    const one = this.texts.get(index);
    if (!one) return;
    const own = this.titles[index] ?? one.name;
    const name = index < 0 ? "Outline" : own ? `${index + 1}. ${own}` : "Answer";
    one.title.textContent = one.finish ? `${name} · ${one.finish}` : name;
    one.text.setAttribute("aria-label", name);
    one.node.classList.toggle("writing", !one.finish);
  }

  // events: [name, branch, more], as the server tells them; step: the engine's number of it.
  take(events, step) {
    for (const [name, index, more] of events) {
      if (name === "outline") {
        this.titles = more;
        more.forEach((_, at) => this.branch(at));
        more.forEach((_, at) => this.named(at));
        continue;
      }
      const one = this.branch(index);
      if (name === "opened") one.name = more === "answer" || more === "outline" ? "" : more;
      if (name === "ended") one.finish = more;
      if (name === "reused") this.read(one, more);
      if (name === "wrote") this.wrote(one, more, step);
      this.named(index);
    }
  }

  // runs: [text, how] of the prompt before this branch.
  read(one, runs) {
    const text = make("p", { className: "read", tabIndex: 0, role: "group" });
    text.setAttribute("aria-label", "Its prompt");
    text.append(...runs.map(([piece, how]) =>
      make("span", { className: `t ${READ[how] ?? "t-t"}`, textContent: piece })));
    one.node.insertBefore(text, one.text);
  }

  wrote(one, pieces, step) {
    let accepted = 0;
    for (const [text, origin] of pieces) {
      const kind = NAMES[origin] ?? "t-t";
      one.text.append(make("span", { className: `t ${kind}`, textContent: text }));
      if (origin === "d" || origin === "f") accepted += 1;
      this.tokens += 1;
    }
    one.text.scrollTop = one.text.scrollHeight;
    if (pieces.some(([, origin]) => origin !== "p")) {
      this.accepted[accepted] = (this.accepted[accepted] ?? 0) + 1;
      this.drafted += accepted;
    }
    this.steps.add(step);
  }

  // millis: so far; first: until the first text; said: what else is known.
  show(millis, said = "") {
    const rounds = this.accepted.reduce((sum, one) => sum + (one ?? 0), 0);
    const each = this.steps.size ? (this.tokens / this.steps.size).toFixed(2) : "–";
    const mean = rounds ? (1 + this.drafted / rounds).toFixed(2) : "–";
    const speed = millis > 0 ? (this.tokens / millis * 1000).toFixed(0) : "–";
    const first = this.first === null ? "" : `, first after ${seconds(this.first)}`;
    this.figures.textContent =
      `${this.tokens} tokens in ${seconds(millis)}${first} · ${speed} tokens/s · ` +
      `${each} tokens a forward · accepted length ${mean}${said ? ` · ${said}` : ""}`;
    this.more.hidden = this.drafted === 0;
    const most = Math.max(1, ...Array.from(this.accepted, (one) => one ?? 0));
    this.chart.replaceChildren(...Array.from(this.accepted, (count = 0, at) => {
      const bar = make("i");
      bar.style.height = `${Math.round(44 * count / most)}px`;
      return make("li", {}, String(count), bar, String(at));
    }));
    return { tokens: this.tokens, millis, first: this.first, each, mean };
  }
}

export function seconds(millis) {
  return millis < 1000 ? `${Math.round(millis)} ms` : `${(millis / 1000).toFixed(2)} s`;
}
