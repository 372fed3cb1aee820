// One answer as it grows: events in, parts and figures out. Live and recorded runs share it.

const KINDS = { d: "d", f: "f", p: "p", t: "t-t" };
const READ = { r: "r", c: "c", n: "t-t" };  // a prompt's tokens: reused, recomputed, new
const FINISHES = { stop: "done", length: "limit" };

export function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

export class Answer {
  // outlined: whether it begins with an outline.
  constructor(title, outlined) {
    this.outlined = outlined;
    this.figures = make("p", { className: "figures" });
    this.outline = make("ol", { className: "outline", tabIndex: 0, ariaLabel: "Outline" });
    this.raw = make("p", { className: "raw" });
    this.parts = make("div", { className: "parts" });
    const raw = make("details", {}, make("summary", { textContent: "Outline as the model wrote it" }),
      this.raw);
    const kind = `card answer ${outlined ? "outlined" : "plain"}`;
    this.node = make("section", { className: kind, ariaLabel: title },
      make("h2", { textContent: title }), this.figures);
    if (outlined) this.node.append(this.outline);
    this.node.append(this.parts);
    if (outlined) this.node.append(raw);
    this.clear();
  }

  clear() {
    this.texts = new Map();
    this.titles = [];
    this.steps = new Set();
    this.rounds = 0;
    this.accepted = 0;
    this.tokens = 0;
    this.first = null;
    this.parts.replaceChildren();
    this.raw.replaceChildren();
    this.outline.replaceChildren(make("li", { className: "wait", textContent: "being written …" }));
  }

  part(index) {
    if (!this.texts.has(index)) {
      const found = { name: "", finish: "", text: this.raw };
      if (index >= 0) {
        found.title = make("span");
        found.end = make("span", { className: "soft" });
        found.text = make("p", { tabIndex: 0, role: "group" });
        found.node = make("div", { className: "part writing" },
          make("h3", {}, found.title, found.end), found.text);
        const later = [...this.texts.keys()].filter((one) => one > index).sort((a, b) => a - b)[0];
        this.parts.insertBefore(found.node, this.texts.get(later)?.node ?? null);
      }
      this.texts.set(index, found);
      this.named(index);
    }
    return this.texts.get(index);
  }

  named(index) {
    const one = this.texts.get(index);
    if (index < 0) return;
    const own = this.titles[index] ?? one.name;
    const name = own ? `${index + 1}. ${own}` : "Answer";
    one.title.textContent = one.title.title = name;
    one.end.textContent = FINISHES[one.finish] ?? one.finish;
    one.text.setAttribute("aria-label", name);
    one.node.classList.toggle("writing", !one.finish);
  }

  // events: [name, part, more], as the server sends them; step: the engine's number of it; millis:
  // since the request.
  take(events, step, millis) {
    for (const [name, index, more] of events) {
      if (name === "outline") {
        this.titles = more;
        this.outline.replaceChildren(...(more.length ? more : ["none: one plain answer"])
          .map((title) => make("li", { textContent: title })));
        more.forEach((_, at) => { this.part(at); this.named(at); });
        continue;
      }
      const one = this.part(index);
      if (name === "opened") one.name = more === "answer" || more === "outline" ? "" : more;
      if (name === "ended") one.finish = more;
      if (name === "reused") this.read(one, more);
      if (name === "wrote") this.wrote(one, more, step);
      if (name === "wrote" && index >= 0) this.first ??= millis;
      if (name === "rejected") {  // the model's own token replaces them
        one.text.lastElementChild?.before(make("del", { textContent: more }));
      }
      if (name !== "wrote") this.named(index);
      one.text.scrollTop = one.text.scrollHeight;
    }
  }

  // runs: [text, how] of the prompt before this part.
  read(one, runs) {
    const text = make("p", { className: "read", tabIndex: 0, role: "group", ariaLabel: "Its prompt" });
    text.append(...runs.map(([piece, how]) =>
      make("span", { className: `t ${READ[how] ?? "t-t"}`, textContent: piece })));
    one.text.before(text);
  }

  wrote(one, pieces, step) {
    for (const [text, origin] of pieces) {
      one.text.append(make("span", { className: `t ${KINDS[origin] ?? "t-t"}`, textContent: text }));
      this.tokens += 1;
    }
    if (pieces.some(([, origin]) => origin !== "p")) this.rounds += 1;
    this.accepted += pieces.filter(([, origin]) => origin === "d" || origin === "f").length;
    this.steps.add(step);
  }

  // millis: so far; figures for the line above the answer and for the comparison.
  show(millis) {
    const found = {
      tokens: this.tokens, millis, first: this.first ?? millis,
      each: this.tokens / Math.max(this.steps.size, 1),
      mean: 1 + this.accepted / Math.max(this.rounds, 1),
    };
    const drafts = this.accepted ? ` · ${(found.mean - 1).toFixed(1)} drafts accepted per round` : "";
    this.figures.textContent = `${found.tokens} tokens in ${this.steps.size} forwards = ` +
      `${found.each.toFixed(1)} per forward${drafts} · ${seconds(millis)}`;
    return found;
  }
}

export function seconds(millis) {
  return millis < 1000 ? `${millis.toFixed(millis < 20 ? 1 : 0)} ms` : `${(millis / 1000).toFixed(2)} s`;
}
