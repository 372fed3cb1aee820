// The page: what is asked, what is shown, and what a recorded run looked like.

import { Answer, make, seconds } from "./answer.js";
import { Machine, Memory } from "./machine.js";
import { Playback } from "./playback.js";
import { Server } from "./server.js";

const $ = (id) => document.getElementById(id);
const server = new Server(() => $("key").value);
const machine = new Machine($("machine"), document.querySelectorAll(".graphname"));
const memory = new Memory(
  $("strip"), $("scale"), $("bar").firstElementChild, $("striplegend"), $("memorytext"));
const graphs = new Map();
let asking = null, playback = null, watching = null;

function complain(message) {
  $("problem").textContent = message;
  $("problem").hidden = !message;
}

// -- playback: of a live answer while it grows, and of recorded runs ------------------------------

// answers: by key; graph: whose states and slots are shown.
function open(answers, graph) {
  playback?.pause();
  playback = new Playback(answers, showFrame);
  playback.speed = Number($("speed").value);
  machine.draw(graph);
  memory.shown = 0;
  $("answers").replaceChildren(...[...answers.values()].map((answer) => answer.node));
  for (const answer of answers.values()) answer.show(0);
  $("numbers").hidden = true;
  for (const id of ["at", "back", "play", "forth"]) $(id).disabled = false;
}

function showFrame(player, picture) {
  if (player !== playback) return;
  if (picture) {
    machine.light(picture.state, picture.past);
    memory.show(picture.runs, picture.used, picture.capacity, picture.queue);
  }
  $("at").max = Math.max(player.last, 0);
  $("at").value = Math.max(player.at, 0);
  const t = player.frames[player.at]?.t ?? 0;
  $("where").textContent = `${player.at + 1} of ${player.last + 1} · ${seconds(t)}`;
  $("at").setAttribute("aria-valuetext", $("where").textContent);
  $("play").textContent = player.playing ? "Pause" : "Play";
  if (player.at === player.last && !player.growing) player.whenAtEnd?.();
}

// -- live -----------------------------------------------------------------------------------------

async function answer(name, player, signal) {
  const body = {
    model: name, stream: true,
    messages: [{ role: "user", content: $("prompt").value }],
    specsot: {
      trace: true, part_tokens: Number($("budget").value) || 96,
      documents: $("documents").value.split(/\n\s*\n/).filter((one) => one.trim()),
    },
  };
  for await (const chunk of server.events("/v1/chat/completions", body, signal)) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (!chunk.specsot?.events) continue;
    const events = chunk.specsot.events.map((event) => [name, ...event]);
    const step = chunk.specsot.step;
    player.frames.push({ t: performance.now() - player.began, step, events });
  }
  player.millis.set(name, performance.now() - player.began);
}

async function ask(event) {
  event.preventDefault();
  complain("");
  asking?.abort();
  const own = asking = new AbortController();
  const names = [...new Set([$("graph").value, $("other").value].filter(Boolean))];
  open(new Map(names.map((name) => [name, new Answer(name, graphs.get(name).skeleton)])),
    graphs.get(names[0]));
  const player = playback;
  Object.assign(player, { began: performance.now(), millis: new Map(), pictures: new Map() });
  $("verdict").textContent = names.length > 1
    ? "Both graphs have started together; the engine makes their steps in turns."
    : "One graph, without a comparison.";
  $("stop").disabled = false;
  $("go").disabled = true;
  watch();
  player.play();
  try {
    await Promise.all(names.map((name) => answer(name, player, own.signal)));
    await lastPictures(player, names);
    player.whenAtEnd = () => names.length > 1 && compare(player, names);
    $("status").textContent = "answered";
  } catch (error) {
    own.abort();
    $("verdict").textContent = "Stopped.";
    if (error.name !== "AbortError") complain(error.message);
    if (error.status === 401) $("keyfield").hidden = false;
  } finally {
    player.growing = false;
    if (!player.playing) showFrame(player, null);
    if (asking === own) {
      $("stop").disabled = true;
      $("go").disabled = false;
      asking = null;
    }
  }
}

// Pictures come on another stream than answers: wait for the ones after the end, at most a second.
async function lastPictures(player, names) {
  for (let waits = 0; waits < 20; waits += 1) {
    if (names.every((name) => player.pictures.get(name)?.running === 0)) return;
    await new Promise((resolve) => { setTimeout(resolve, 50); });
  }
}

function compare(player, names) {
  const results = names.map((name) => {
    const millis = player.millis.get(name);
    const found = player.answers.get(name).show(millis);
    const busy = (player.pictures.get(name)?.busy ?? 0) * 1000 || millis;
    return { ...found, name, busy, token: busy / found.tokens };
  });
  const [one, two] = results;
  const times = (ratio) => ratio >= 0.95 && ratio <= 1.05 ? "as" : `${ratio.toFixed(1)} times as`;
  $("verdict").textContent = `${one.name} was ${times(two.token / one.token)} fast per token as ` +
    `${two.name}; its answer is ${times(one.tokens / two.tokens)} long.`;
  const row = (name, texts) => make("tr", {}, make("th", { textContent: name, scope: "row" }),
    ...texts.map((text) => make("td", { textContent: text })));
  const head = make("tr", {}, make("td"), ...results.map(({ name }) =>
    make("th", { textContent: name, scope: "col" })));
  $("table").replaceChildren(head,
    row("tokens", results.map((r) => r.tokens)),
    row("engine's time", results.map((r) => seconds(r.busy))),
    row("… per token", results.map((r) => seconds(r.token))),
    row("first text after", results.map((r) => seconds(r.first))),
    row("whole answer after", results.map((r) => seconds(r.millis))),
    row("tokens per forward", results.map((r) => r.each.toFixed(2))),
    row("accepted length", results.map((r) => r.mean.toFixed(2))));
  $("numbers").hidden = false;
}

// Pictures of the engines: while a live answer grows.
async function watch() {
  if (watching) return;
  watching = new AbortController();
  try {
    for await (const picture of server.events("/specsot/pictures", undefined, watching.signal)) {
      if (!playback?.pictures) continue;
      playback.pictures.set(picture.graph, picture);
      if (!playback.growing || picture.graph !== machine.graph.name) continue;
      const past = picture.moves.map(([from]) => from);
      const queue = ` · ${picture.running} running, ${picture.waiting} waiting`;
      playback.frames.push({ t: performance.now() - playback.began, ...picture, past, queue });
    }
  } catch (error) {
    if (error.name !== "AbortError") $("status").textContent = "the engine cannot be watched";
  }
  watching = null;
}

// -- recorded -------------------------------------------------------------------------------------

async function load() {
  complain("");
  asking?.abort();
  try {
    const run = await server.json(`/specsot/runs/${encodeURIComponent($("run").value)}`);
    const options = run.requests.map(([key, text]) =>
      make("option", { value: key, textContent: `${key}: ${text.slice(0, 60)}` }));
    $("request").replaceChildren(...options);
    $("requestfield").hidden = run.requests.length < 2;
    const show = () => {
      const key = $("request").value;
      const outlined = run.frames.some(({ events }) =>
        events.some(([of, , part]) => of === key && part < 0));
      open(new Map([[key, new Answer(`${run.graph.name} · ${run.run}`, outlined)]]), run.graph);
      playback.frames = run.frames;
      playback.growing = false;
      playback.jump(0);
    };
    show();
    $("request").onchange = show;
    if (run.lacks.length) complain(`This run has not kept: ${run.lacks.join(", ")}`);
  } catch (error) {
    complain(error.message);
  }
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
    $("ask").hidden = $("compared").hidden = !about.live;
    options($("graph"), [...graphs.keys()]);
    options($("other"), [...graphs.keys()], "none");
    options($("run"), about.runs);
    $("recorded").hidden = about.runs.length === 0;
    $("recorded").open = !about.live && about.runs.length > 1;
    if (about.live && about.state !== "ready") {
      $("status").textContent = `the engine is ${about.state} …`;
      document.body.classList.remove("loading");
      setTimeout(begin, 700);
      return;
    }
    $("status").textContent = about.live
      ? `${graphs.size} graphs over ${graphs.values().next().value.model}` : "a recorded run";
    if (about.live) suggest();
    else if (about.runs.length) await load();
  } catch (error) {
    $("status").textContent = "not connected";
    $("keyfield").hidden = error.status !== 401;
    complain(error.message);
  }
  document.body.classList.remove("loading");
}

// At first: a graph with outlines and drafts, compared with one that has neither.
function suggest() {
  const all = [...graphs.values()];
  const drafts = (graph) => graph.drafter !== "none";
  const first = all.find((graph) => graph.skeleton && drafts(graph)) ?? all[0];
  const plain = all.find((graph) => !graph.skeleton && !drafts(graph));
  $("graph").value = first.name;
  $("other").value = plain && plain !== first ? plain.name : "";
  machine.draw(first);
}

$("ask").addEventListener("submit", ask);
$("prompt").addEventListener("keydown", (event) => {  // Shift+Enter begins a line
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!asking) $("ask").requestSubmit();
});
$("stop").addEventListener("click", () => asking?.abort());
$("graph").addEventListener("change", () => {
  if (!playback) machine.draw(graphs.get($("graph").value));
});
$("key").addEventListener("change", () => { complain(""); begin(); });
$("load").addEventListener("click", load);
$("play").addEventListener("click", () => playback.playing ? playback.pause() : playback.play());
$("back").addEventListener("click", () => playback.jump(playback.at - 1));
$("forth").addEventListener("click", () => playback.jump(playback.at + 1));
$("at").addEventListener("input", () => playback.jump(Number($("at").value)));
$("speed").addEventListener("change", () => {
  if (playback) playback.speed = Number($("speed").value);
});
$("rejects").addEventListener("change", () => {
  $("answers").classList.toggle("rejects", $("rejects").checked);
});
$("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.body).backgroundColor === "rgb(21, 24, 26)";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  $("theme").setAttribute("aria-pressed", String(!dark));
});
begin();
