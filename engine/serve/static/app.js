// The page: what is asked, what is shown, and what a recorded run looked like.

import { Answer, make, seconds } from "./answer.js";
import { Machine, Strip } from "./machine.js";
import { Playback } from "./playback.js";
import { Server } from "./server.js";

const $ = (id) => document.getElementById(id);
const server = new Server(() => $("key").value);
const machine = new Machine($("machine"), $("state"));
const strip = new Strip($("strip"), $("striplegend"), $("pooltext"));
const graphs = new Map();
let asking = null, playback = null, watching = null;

function complain(message) {
  $("problem").textContent = message;
  $("problem").hidden = !message;
}

// -- live -----------------------------------------------------------------------------------------

async function answer(name, signal) {
  const shown = new Answer(name);
  $("answers").append(shown.node);
  machine.draw(graphs.get(name));
  const began = performance.now();
  const timer = setInterval(() => shown.show(performance.now() - began), 200);
  const body = {
    model: name, stream: true, stream_options: { include_usage: true },
    messages: [{ role: "user", content: $("prompt").value }],
    specsot: {
      trace: true, part_tokens: Number($("budget").value) || 96,
      documents: $("documents").value.split(/\n\s*\n/).filter((one) => one.trim()),
    },
  };
  let said = "stopped";
  try {
    for await (const chunk of server.events("/v1/chat/completions", body, signal)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) said = `prompt ${chunk.usage.prompt_tokens} tokens`;
      if (!chunk.specsot?.events) continue;
      if (shown.first === null && chunk.choices[0].delta.content) {
        shown.first = performance.now() - began;
      }
      shown.take(chunk.specsot.events, chunk.specsot.step);
    }
  } finally {
    clearInterval(timer);
    shown.result = { name, ...shown.show(performance.now() - began, said) };
  }
  return shown.result;
}

function compare(results) {
  const [one, two] = results;
  const head = make("tr", {}, make("td"), ...[...results.map((r) => r.name), "ratio"].map((text) =>
    make("th", { textContent: text, scope: "col" })));
  const row = (name, values, ratio) => make("tr", {}, make("th", { textContent: name, scope: "row" }),
    ...[...values, ratio].map((text) => make("td", { textContent: text })));
  const times = (field) => row(field === "first" ? "first text" : "whole answer",
    results.map((r) => seconds(r[field] ?? 0)), `${(two[field] / one[field]).toFixed(2)} ×`);
  const each = row("per token", results.map((r) => seconds(r.millis / r.tokens)),
    `${(two.millis / two.tokens / (one.millis / one.tokens)).toFixed(2)} ×`);
  const table = make("table", {}, head, times("first"), times("millis"), each,
    row("tokens", results.map((r) => r.tokens), ""),
    row("tokens a forward", results.map((r) => r.each), ""),
    row("accepted length", results.map((r) => r.mean), ""));
  const title = make("h2", { textContent: "The same prompt, one after the other" });
  const why = make("p", { className: "figures", textContent:
    "Graphs with an outline write another text than those without; compare them per token." });
  $("compared").replaceChildren(title, make("div", { className: "tables", tabIndex: 0, role: "group",
    ariaLabel: "Times" }, table), why);
  $("compared").hidden = false;
}

async function ask(event) {
  event.preventDefault();
  complain("");
  stopPlayback();
  asking?.abort();
  asking = new AbortController();
  const own = asking;
  $("answers").replaceChildren();
  $("compared").hidden = true;
  $("stop").disabled = false;
  $("go").disabled = true;
  watch();
  try {
    const names = [$("graph").value, $("other").value].filter(Boolean);
    const results = [];
    for (const name of names) results.push(await answer(name, own.signal));
    if (results.length === 2) compare(results);
    $("status").textContent = "answered";
  } catch (error) {
    if (error.name !== "AbortError") complain(error.message);
    if (error.status === 401) $("keyfield").hidden = false;
  } finally {
    $("stop").disabled = true;
    $("go").disabled = false;
    asking = null;
  }
}

// Pictures of the engines: while this page is looked at, and nothing is played back.
async function watch() {
  if (watching) return;
  watching = new AbortController();
  try {
    for await (const picture of server.events("/specsot/pictures", undefined, watching.signal)) {
      if (playback || !graphs.has(picture.graph)) continue;
      machine.draw(graphs.get(picture.graph));
      machine.light(picture.state, picture.moves.map(([from]) => from));
      const queue = ` · ${picture.running} running, ${picture.waiting} waiting`;
      strip.show(picture.runs, picture.used, picture.capacity, queue);
    }
  } catch (error) {
    if (error.name !== "AbortError") $("status").textContent = "the engine cannot be watched";
  }
  watching = null;
}

// -- recorded -------------------------------------------------------------------------------------

function stopPlayback() {
  playback?.pause();
  playback = null;
  for (const id of ["at", "back", "play", "forth", "speed"]) $(id).disabled = true;
}

function showFrame(player, frame) {
  machine.light(frame.state);
  strip.show(frame.runs, frame.used, frame.capacity);
  $("at").value = player.at;
  $("where").textContent =
    `${player.at + 1} of ${player.frames.length} · ${frame.state} · ${seconds(frame.t)}`;
  $("at").setAttribute("aria-valuetext", $("where").textContent);
  $("play").textContent = player.playing ? "Pause" : "Play";
}

async function load() {
  complain("");
  asking?.abort();
  try {
    const run = await server.json(`/specsot/runs/${encodeURIComponent($("run").value)}`);
    const options = run.requests.map(([key, text]) =>
      make("option", { value: key, textContent: `${key}: ${text.slice(0, 60)}` }));
    $("request").replaceChildren(...options);
    $("requestfield").hidden = run.requests.length < 2;
    open(run);
    $("request").onchange = () => open(run);
    if (run.lacks.length) complain(`This run has not kept: ${run.lacks.join(", ")}`);
  } catch (error) {
    complain(error.message);
  }
}

function open(run) {
  stopPlayback();
  machine.draw(run.graph);
  $("at").max = run.frames.length - 1;
  for (const id of ["at", "back", "play", "forth", "speed"]) $(id).disabled = false;
  playback = new Playback(run, $("request").value, showFrame);
  playback.speed = Number($("speed").value);
  $("answers").replaceChildren(playback.answer.node);
  $("compared").hidden = true;
}

// -- the beginning --------------------------------------------------------------------------------

function options(select, names, none) {
  const first = none ? [make("option", { value: "", textContent: none })] : [];
  select.replaceChildren(...first, ...names.map((name) =>
    make("option", { value: name, textContent: name })));
}

async function begin() {
  try {
    const about = await server.json("/specsot/about");
    for (const graph of about.graphs) graphs.set(graph.name, graph);
    document.querySelectorAll(".live").forEach((node) => { node.hidden = !about.live; });
    options($("graph"), [...graphs.keys()]);
    options($("other"), [...graphs.keys()], "nothing");
    options($("run"), about.runs);
    $("recorded").hidden = about.runs.length === 0;
    if (graphs.size) machine.draw(graphs.values().next().value);
    if (about.live && about.state !== "ready") {
      $("status").textContent = `the engine is ${about.state} …`;
      setTimeout(begin, 700);
      return;
    }
    $("status").textContent = about.live
      ? `${graphs.size} graphs over ${graphs.values().next().value.model}` : "a recorded run";
    if (!about.live && about.runs.length) await load();
  } catch (error) {
    $("status").textContent = "not connected";
    $("keyfield").hidden = error.status !== 401;
    complain(error.message);
  }
}

$("ask").addEventListener("submit", ask);
$("prompt").addEventListener("keydown", (event) => {  // Shift+Enter begins a line
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!asking) $("ask").requestSubmit();
});
$("stop").addEventListener("click", () => asking?.abort());
$("key").addEventListener("change", () => { complain(""); begin(); });
$("load").addEventListener("click", load);
$("play").addEventListener("click", () => playback.playing ? playback.pause() : playback.play());
$("back").addEventListener("click", () => { playback.pause(); playback.go(playback.at - 1); });
$("forth").addEventListener("click", () => { playback.pause(); playback.go(playback.at + 1); });
$("at").addEventListener("input", () => {
  const to = Number($("at").value);
  playback.pause();
  playback.go(to);
});
$("speed").addEventListener("change", () => { playback.speed = Number($("speed").value); });
$("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.body).backgroundColor === "rgb(21, 24, 26)";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  $("theme").setAttribute("aria-pressed", String(!dark));
});
begin();
