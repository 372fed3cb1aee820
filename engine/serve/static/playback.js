// A recorded run, played at any speed, forwards and back, step by step.

import { Answer } from "./answer.js";

export class Playback {
  // shows: called with each frame that is reached; run: as /specsot/runs/… gives it.
  constructor(run, request, shows) {
    this.run = run;
    this.frames = run.frames;
    this.request = request;
    this.shows = shows;
    this.answer = new Answer(`${run.graph.name} · ${run.run}`);
    this.at = -1;
    this.timer = null;
    this.speed = 1;
    this.go(0);
  }

  get playing() {
    return this.timer !== null;
  }

  // Frames are differences: going back begins at the beginning, which takes a moment only.
  go(to) {
    const target = Math.min(Math.max(to, 0), this.frames.length - 1);
    if (target < this.at) {
      this.answer.clear();
      this.at = -1;
    }
    while (this.at < target) {
      this.at += 1;
      const own = this.frames[this.at].events.filter(([key]) => key === this.request);
      this.answer.take(own.map(([, ...event]) => event), this.at);
    }
    const frame = this.frames[this.at];
    this.answer.show(frame.t, `step ${this.at + 1} of ${this.frames.length}`);
    this.shows(this, frame);
  }

  play() {
    if (this.at === this.frames.length - 1) this.go(0);
    let last = performance.now(), clock = this.frames[this.at].t;
    const tick = (now) => {
      clock += (now - last) * this.speed;
      last = now;
      let next = this.at;
      while (next + 1 < this.frames.length && this.frames[next + 1].t <= clock) next += 1;
      this.timer = next === this.frames.length - 1 ? null : requestAnimationFrame(tick);
      if (next !== this.at || this.timer === null) this.go(next);
    };
    this.timer = requestAnimationFrame(tick);
    this.shows(this, this.frames[this.at]);
  }

  pause() {
    cancelAnimationFrame(this.timer);
    this.timer = null;
    this.shows(this, this.frames[this.at]);
  }
}
